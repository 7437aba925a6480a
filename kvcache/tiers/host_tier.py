"""The host tier: which blocks of host memory hold a copy of which node, coldest first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, Self, TypeAlias

import numpy as np

from ..errors import HostConfigError
from ..prefix.block_pool import BlockPool
from ..prefix.node import ITEM_BYTES, Node
from ..tokens import Int32Array, as_count

WritePolicy: TypeAlias = Literal["exclusive", "back", "through"]
_POLICIES: Final = ("exclusive", "back", "through")


@dataclass(frozen=True)
class HostConfig:
    """How large the host tier is, and when a block is copied to it.

    Attributes:
        num_blocks: usable blocks, with ids ``1 .. num_blocks``.
        write: "exclusive": when it is evicted from the device; a hit moves it back, so that it
            is in one tier at a time. "back": the same, but a hit leaves the host its copy.
            "through": while it is on the device; an eviction copies nothing. None: "through" where
            there is storage, which then has for a later process what was never evicted, and "back"
            where there is none, as the two tiers then hold the most.
        hits: with "through", after how many hits on the device; 0: as soon as it is published.

    Raises:
        CountError: if num_blocks is less than 1, or hits negative.
        HostConfigError: for another policy, or hits with a policy that does not count them.
    """

    num_blocks: int
    write: WritePolicy | None = None
    hits: int = 0

    def __post_init__(self) -> None:
        as_count("num_blocks", self.num_blocks, minimum=1)
        as_count("hits", self.hits)
        if self.write not in (None, *_POLICIES):
            raise HostConfigError(f"write must be one of {_POLICIES}, got {self.write!r}")
        if self.hits and self.write != "through":
            raise HostConfigError(f"hits are counted with write='through', not {self.write!r}")

    def with_policy(self, *, storage: bool) -> HostConfig:
        """Return the same with a policy, if it has none: that of a tier with or without storage."""
        if self.write is not None:
            return self
        return replace(self, write="through" if storage else "back")


class TieredNode(Node):
    """A node that can have a copy on the host: one more word than a `Node`."""

    __slots__ = ("host",)

    def __init__(
        self, parent: Self | None, key: bytes, tokens: bytes | bytearray, device_blocks: bytes
    ) -> None:
        super().__init__(parent, key, tokens, device_blocks)
        self.host: HostRun | None = None


class HostRun:
    """A node's copy in the host tier, of the node's length.

    ::

        landing ──► valid ──► leaving          landing: an operation is writing it
           │          │          │             leaving: its blocks were given back, as an operation
           └──────────┴──────────┴──► dropped           moves what was in them to the device

    Attributes:
        node: whose copy it is; None once dropped.
        blocks: host block ids, as bytes of int32; when leaving, those that were its own.
        landing, leaving: see above; only what is neither can be matched.
        stored: storage has had it.
        holders: lists with this run in them, of those who need its blocks to stay.
        colder, warmer: neighbours in the tier's list.
    """

    __slots__ = (
        "blocks",
        "colder",
        "holders",
        "landing",
        "leaving",
        "node",
        "stored",
        "warmer",
    )

    def __init__(self, node: TieredNode | None, blocks: bytes, *, landing: bool = False) -> None:
        self.node = node
        self.blocks = blocks
        self.landing = landing
        self.leaving = False
        self.stored = False
        self.holders: list[list[HostRun]] = []
        self.colder: HostRun | None = None
        self.warmer: HostRun | None = None

    @property
    def num_blocks(self) -> int:
        """The length of the run in blocks."""
        return len(self.blocks) // ITEM_BYTES

    @property
    def is_valid(self) -> bool:
        """Whether it holds its node's KV."""
        return not (self.landing or self.leaving)

    @property
    def is_idle(self) -> bool:
        """Whether it can be dropped: it is in a list of the tier."""
        return self.warmer is not None

    def split(self, upper: TieredNode, num_blocks: int) -> HostRun:
        """Cut the first num_blocks off, as the copy of upper: for the same holders."""
        cut = num_blocks * ITEM_BYTES
        run = HostRun(upper, self.blocks[:cut])
        self.blocks = self.blocks[cut:]
        run.landing, run.leaving = self.landing, self.leaving
        run.stored = self.stored
        for holder in self.holders:
            holder.insert(holder.index(self), run)
        run.holders = list(self.holders)
        return run


class HostTier:
    """A pool of host blocks, and lists of the copies that can be dropped: valid, and not held.

    ::

        the device has it too    coldest ◄─────────────────► warmest     dropped first, from here
        the host alone has it    coldest ◄─────────────────► warmest
                                 dropped next, from here

    To drop a copy of what the device has loses nothing; the warmest is evicted, and copied again,
    last. As on the device, a path is used from its tail up, so that a child stands before its
    parent. Where an eviction copies nothing, there is one list of both, dropped from its cold end:
    a copy of what the device has is then all that an eviction leaves of it.

    Attributes:
        pool: which host blocks are free.
        num_idle: blocks of the runs in the list.
        num_cached: blocks of all valid runs.
    """

    def __init__(self, num_blocks: int, *, spares_first: bool) -> None:
        """Make an empty tier.

        Args:
            num_blocks: of the pool.
            spares_first: drop copies of what the device has before anything else.
        """
        self.pool = BlockPool(num_blocks)
        self._list = _sentinel()
        self._spares = _sentinel() if spares_first else self._list
        self.num_idle = 0
        self.num_cached = 0

    @property
    def available(self) -> int:
        """How many blocks are free, or can be now."""
        return self.pool.num_free + self.num_idle

    def next_to_drop(self) -> HostRun:
        """Return the run to drop next; there must be one."""
        run = next(self.idle_runs(), None)
        assert run is not None, "the host tier has nothing to drop"
        return run

    def is_spare(self, run: HostRun) -> bool:
        """Whether a run is dropped before what the host alone has, and from its head on."""
        assert run.node is not None, "a dropped copy is looked at"
        return self._spares is not self._list and len(run.node.device_blocks) > 0

    def land(self, node: TieredNode, ids: Int32Array) -> HostRun:
        """Give a node a copy that is yet to be written, in blocks of the pool."""
        assert node.host is None, "a node has two copies on the host"
        run = HostRun(node, ids.tobytes(), landing=True)
        node.host = run
        return run

    def settle(self, run: HostRun) -> None:
        """Say that a landing run has been written."""
        assert run.landing and run.node is not None, "a run that is not landing has arrived"
        run.landing = False
        self.num_cached += run.num_blocks
        if not run.holders:
            self._link_path(run)

    def leave(self, run: HostRun) -> None:
        """Give the blocks of a valid run back; what was in them is on its way to the device."""
        assert run.is_valid and not run.holders, "a run leaves that is not idle"
        self._unlink(run)
        self._forget(run)
        run.leaving = True

    def hold(self, runs: Sequence[HostRun]) -> list[HostRun]:
        """Keep the blocks of some runs until `let_go` of the list that this returns."""
        holder = list(runs)
        for run in runs:
            if run.is_idle:
                self._unlink(run)
            run.holders.append(holder)
        return holder

    def let_go(self, holder: list[HostRun]) -> None:
        """End a hold: what nobody else holds can be dropped; what was dropped gives its blocks."""
        for run in holder:  # in the order of an eviction, that is of last use
            # By identity: two holders of the same runs are equal lists.
            place = next(i for i, each in enumerate(run.holders) if each is holder)
            del run.holders[place]
            if not run.holders:
                if run.node is None:
                    self._recycle(run)
                else:  # it is valid: who writes or moves it holds it for as long
                    self._link_path(run)
        holder.clear()

    def touch(self, run: HostRun) -> None:
        """Make a run the warmest of its list, if it can be dropped."""
        if run.is_idle:
            self._unlink(run)
            self._link(run)

    def gained(self, run: HostRun) -> None:
        """Say that the device has what a run is a copy of, now too."""
        if run.is_idle:
            self._unlink(run)
            self._link_path(run)

    def drop(self, run: HostRun) -> None:
        """Take a run from its node; its blocks are free when nobody holds them."""
        assert run.node is not None, "a run is dropped twice"
        if run.is_idle:
            self._unlink(run)
        run.node.host = None
        run.node = None
        if run.is_valid:
            self.num_cached -= run.num_blocks
        if not run.holders:
            self._recycle(run)

    def _forget(self, run: HostRun) -> None:
        self.num_cached -= run.num_blocks
        self.pool.recycle(np.frombuffer(run.blocks, np.int32))

    def _recycle(self, run: HostRun) -> None:
        if not run.leaving:
            self.pool.recycle(np.frombuffer(run.blocks, np.int32))

    def split(self, run: HostRun, upper: TieredNode, num_blocks: int) -> None:
        """Give upper the first num_blocks of a run."""
        part = run.split(upper, num_blocks)
        upper.host = part
        if run.warmer is not None:  # next to it, as the warmer one
            self._link(part, before=run.warmer)
            self.num_idle -= part.num_blocks  # counted with the whole

    def _link_path(self, run: HostRun) -> None:
        """Make a run the warmest of its list, but for what it follows."""
        self._link(run)
        assert run.node is not None, "a dropped run goes into the host tier's list"
        is_spare, above = self.is_spare(run), run.node.parent
        while above is not None:
            if above.host is not None and self.is_spare(above.host) == is_spare:
                self.touch(above.host)
            above = above.parent

    def _link(self, run: HostRun, before: HostRun | None = None) -> None:
        if before is None:
            before = self._spares if self.is_spare(run) else self._list
        colder = before.colder
        assert colder is not None, "the list of the host tier is not closed"
        run.colder, run.warmer = colder, before
        colder.warmer = before.colder = run
        self.num_idle += run.num_blocks

    def _unlink(self, run: HostRun) -> None:
        colder, warmer = run.colder, run.warmer
        assert colder is not None and warmer is not None, "a run is not in the host tier's list"
        colder.warmer, warmer.colder = warmer, colder
        run.colder = run.warmer = None
        self.num_idle -= run.num_blocks

    def idle_runs(self) -> Iterator[HostRun]:
        """Yield the runs that can be dropped, the next to be dropped first."""
        run = self._spares.colder
        while self._spares is not self._list and run is not None and run is not self._spares:
            yield run
            run = run.colder
        run = self._list.warmer
        while run is not None and run is not self._list:
            yield run
            run = run.warmer


def _sentinel() -> HostRun:
    """Return an empty list: its .warmer is the coldest, its .colder the warmest."""
    sentinel = HostRun(None, b"")
    sentinel.warmer = sentinel.colder = sentinel
    return sentinel

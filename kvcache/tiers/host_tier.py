"""Host tier: its configuration, its block pool, copies of nodes, and their eviction order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final, Literal, Self, TypeAlias

import numpy as np

from ..errors import HostConfigError
from ..events import EventRecorder
from ..prefix.block_pool import BlockPool
from ..prefix.node import ITEM_BYTES, Node
from ..tokens import Int32Array, as_count

WritePolicy: TypeAlias = Literal["exclusive", "back", "through"]
_POLICIES: Final = ("exclusive", "back", "through")


@dataclass(frozen=True)
class HostConfig:
    """Size and write policy of the host tier.

    Attributes:
        num_blocks: number of usable blocks, with ids ``1 .. num_blocks``.
        write: when a block is copied to the host. "exclusive" (write-back): when the device evicts
            it; a hit moves it back, so it is in one tier at a time. "back" (write-back): the same,
            but the host keeps its copy after a hit. "through" (write-through): while it is on the
            device; an eviction copies nothing. None selects "through" with storage, so that a
            later process finds blocks that were never evicted, and "back" without storage, because
            the two tiers then hold the most.
        hits: with "through", number of hits on the device before a block is copied; 0 copies it
            when it is published.

    Raises:
        CountError: if num_blocks is less than 1 or hits is negative.
        HostConfigError: for an unknown policy, or hits with a policy other than "through".
    """

    num_blocks: int
    write: WritePolicy | None = None
    hits: int = 0

    def __post_init__(self) -> None:
        for name, minimum in (("num_blocks", 1), ("hits", 0)):
            object.__setattr__(self, name, as_count(name, getattr(self, name), minimum))
        if self.write not in (None, *_POLICIES):
            raise HostConfigError(f"write must be one of {_POLICIES}, got {self.write!r}")
        if self.hits and self.write != "through":
            raise HostConfigError(f"hits needs write='through', got write={self.write!r}")

    def with_policy(self, *, storage: bool) -> HostConfig:
        """Return the configuration with the default policy if it has none."""
        if self.write is not None:
            return self
        return replace(self, write="through" if storage else "back")


class TieredNode(Node):
    """A node that can have a copy on the host. It takes one word more than a `Node`."""

    __slots__ = ("host",)

    def __init__(
        self, parent: Self | None, key: bytes, tokens: bytes | bytearray, device_blocks: bytes
    ) -> None:
        super().__init__(parent, key, tokens, device_blocks)
        self.host: HostRun | None = None


class HostRun:
    """Copy of a node in the host tier, as long as the node.

    ::

        in flight ──► valid ──► promoting      in flight: an operation writes it
            │           │           │          promoting: an operation moves its contents to the
            └───────────┴───────────┴──► dropped          device; its blocks are recycled already

    Attributes:
        node: the node; None once dropped.
        blocks: host block ids, as bytes of int32; of a promoting run, its former blocks.
        in_flight, promoting: see above. A run in neither state is valid and can be matched.
        stored: whether it was written to storage.
        holders: lists that hold this run, so that its blocks stay.
        colder, warmer: neighbours in an LRU list of the tier.
    """

    __slots__ = (
        "blocks",
        "colder",
        "holders",
        "in_flight",
        "node",
        "promoting",
        "stored",
        "warmer",
    )

    def __init__(self, node: TieredNode | None, blocks: bytes, *, in_flight: bool = False) -> None:
        self.node = node
        self.blocks = blocks
        self.in_flight = in_flight
        self.promoting = False
        self.stored = False
        self.holders: list[list[HostRun]] = []
        self.colder: HostRun | None = None
        self.warmer: HostRun | None = None

    @property
    def num_blocks(self) -> int:
        """Length in blocks."""
        return len(self.blocks) // ITEM_BYTES

    @property
    def is_valid(self) -> bool:
        """Whether it holds its node's KV."""
        return not (self.in_flight or self.promoting)

    @property
    def is_idle(self) -> bool:
        """Whether it can be dropped: it is in an LRU list of the tier."""
        return self.warmer is not None

    def split(self, upper: TieredNode, num_blocks: int) -> HostRun:
        """Cut off the first num_blocks blocks as the copy of upper, with the same holders."""
        cut = num_blocks * ITEM_BYTES
        run = HostRun(upper, self.blocks[:cut])
        self.blocks = self.blocks[cut:]
        run.in_flight, run.promoting = self.in_flight, self.promoting
        run.stored = self.stored
        for holder in self.holders:
            holder.insert(holder.index(self), run)
        run.holders = list(self.holders)
        return run


class HostTier:
    """Pool of host blocks, and LRU lists of the copies that can be dropped (valid and not held).

    ::

        also on the device (redundant)   coldest ◄──────────► warmest    dropped first, from here
        only on the host                 coldest ◄──────────► warmest
                                         dropped next, from here

    Dropping a redundant copy loses nothing. The warmest goes first: the device evicts its blocks,
    and copies them again, last. As on the device, a path is used from its tail up, so a child comes
    before its parent. With write-through there is one list of both, dropped from its cold end: an
    eviction copies nothing, so the copy is all that remains of an evicted block.

    Attributes:
        pool: pool of host blocks.
        events: recorder of KV events, or None.
        num_idle: number of blocks in the lists.
        num_cached: number of blocks in valid runs.
    """

    def __init__(
        self, num_blocks: int, *, redundant_first: bool, events: EventRecorder | None = None
    ) -> None:
        """Make an empty tier.

        Args:
            num_blocks: size of the pool.
            redundant_first: whether to drop redundant copies before the others.
            events: recorder of KV events, or None.
        """
        self.pool = BlockPool(num_blocks)
        self.events = events
        self._list = _sentinel()
        self._redundant = _sentinel() if redundant_first else self._list
        self.num_idle = 0
        self.num_cached = 0

    @property
    def available(self) -> int:
        """Number of blocks that are free or can be dropped."""
        return self.pool.num_free + self.num_idle

    def next_to_drop(self) -> HostRun:
        """Return the run to drop next; there must be one."""
        run = next(self.idle_runs(), None)
        assert run is not None, "the host tier has nothing to drop"
        return run

    def is_redundant(self, run: HostRun) -> bool:
        """Return whether a run is in the list that is dropped first, from the head of the run."""
        assert run.node is not None, "a dropped copy has no place in a list"
        return self._redundant is not self._list and len(run.node.device_blocks) > 0

    def add_copy(self, node: TieredNode, ids: Int32Array) -> HostRun:
        """Give a node an in-flight copy in allocated blocks."""
        assert node.host is None, "a node has two copies on the host"
        run = HostRun(node, ids.tobytes(), in_flight=True)
        node.host = run
        return run

    def mark_valid(self, run: HostRun) -> None:
        """Mark an in-flight run as written."""
        assert run.in_flight and run.node is not None, "a run that is not in flight was written"
        run.in_flight = False
        self.num_cached += run.num_blocks
        if self.events is not None:
            self.events.copied(run.node, run.blocks)
        if not run.holders:
            self._link_path(run)

    def start_promotion(self, run: HostRun) -> None:
        """Recycle the blocks of a valid run whose contents move to the device."""
        assert run.is_valid and not run.holders, "a run that is not idle is promoted"
        if self.events is not None:
            self.events.dropped(run.blocks)
        self._unlink(run)
        self._forget(run)
        run.promoting = True

    def hold(self, runs: Sequence[HostRun]) -> list[HostRun]:
        """Keep the blocks of some runs until `release_hold` of the returned list."""
        holder = list(runs)
        for run in runs:
            if run.is_idle:
                self._unlink(run)
            run.holders.append(holder)
        return holder

    def release_hold(self, holder: list[HostRun]) -> None:
        """End a hold: runs without another holder can be dropped, dropped ones are recycled."""
        for run in holder:  # in LRU order, as they were evicted
            # By identity: two holders of the same runs are equal lists.
            place = next(i for i, each in enumerate(run.holders) if each is holder)
            del run.holders[place]
            if not run.holders:
                if run.node is None:
                    self._recycle(run)
                else:  # valid: an operation that writes or moves a run holds it
                    self._link_path(run)
        holder.clear()

    def touch(self, run: HostRun) -> None:
        """Make a run the warmest of its list if it can be dropped."""
        if run.is_idle:
            self._unlink(run)
            self._link(run)

    def relink(self, run: HostRun) -> None:
        """Move a run to the list of redundant copies: the device has its blocks now."""
        if run.is_idle:
            self._unlink(run)
            self._link_path(run)

    def drop(self, run: HostRun) -> None:
        """Take a run from its node. Its blocks are recycled when nothing holds them."""
        assert run.node is not None, "a run is dropped twice"
        if run.is_idle:
            self._unlink(run)
        run.node.host = None
        run.node = None
        if run.is_valid:
            if self.events is not None:
                self.events.dropped(run.blocks)
            self.num_cached -= run.num_blocks
        if not run.holders:
            self._recycle(run)

    def _forget(self, run: HostRun) -> None:
        self.num_cached -= run.num_blocks
        self.pool.recycle(np.frombuffer(run.blocks, np.int32))

    def _recycle(self, run: HostRun) -> None:
        if not run.promoting:
            self.pool.recycle(np.frombuffer(run.blocks, np.int32))

    def split(self, run: HostRun, upper: TieredNode, num_blocks: int) -> None:
        """Give upper the first num_blocks blocks of a run."""
        part = run.split(upper, num_blocks)
        upper.host = part
        if run.warmer is not None:  # place the upper part next to it, as the warmer one
            self._link(part, before=run.warmer)
            self.num_idle -= part.num_blocks  # counted already

    def are_alike(self, upper: HostRun | None, lower: HostRun | None) -> bool:
        """Return whether the copies of a node and its only child can become one."""
        if upper is None or lower is None:
            return upper is lower
        return upper.is_idle and lower.is_idle and upper.stored == lower.stored

    def join(self, runs: Sequence[HostRun]) -> None:
        """Join the copies of alike nodes of a path, which was used last, into the last one."""
        for upper, lower in pairwise(runs):
            assert lower.warmer is upper, "copies are joined that were used at different times"
        runs[-1].blocks = b"".join([run.blocks for run in runs])
        for run in runs[:-1]:
            self._unlink(run)
            self.num_idle += run.num_blocks  # the last one has them
            assert run.node is not None, "a dropped copy is joined"
            run.node.host = None
            run.node = None

    def _link_path(self, run: HostRun) -> None:
        """Make a run the warmest of its list, except for the runs before it on its path."""
        self._link(run)
        assert run.node is not None, "a dropped run is put into the host tier's list"
        is_redundant, above = self.is_redundant(run), run.node.parent
        while above is not None:
            if above.host is not None and self.is_redundant(above.host) == is_redundant:
                self.touch(above.host)
            above = above.parent

    def _link(self, run: HostRun, before: HostRun | None = None) -> None:
        if before is None:
            before = self._redundant if self.is_redundant(run) else self._list
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
        """Yield the runs that can be dropped, in the order in which they would be."""
        run = self._redundant.colder
        while self._redundant is not self._list and run is not None and run is not self._redundant:
            yield run
            run = run.colder
        run = self._list.warmer
        while run is not None and run is not self._list:
            yield run
            run = run.warmer


def _sentinel() -> HostRun:
    """Return an empty list: .warmer leads to the coldest run, .colder to the warmest."""
    sentinel = HostRun(None, b"")
    sentinel.warmer = sentinel.colder = sentinel
    return sentinel

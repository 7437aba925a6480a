"""The model of a cache with tiers: `CacheModel`, the host blocks, and where each prefix is.

It keeps the books of the operations that are not over: loads, parked requests and prefetches.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from ...rules import tiers as rules
from ...rules.rule import require
from ..cache import CacheModel, Holding
from ..ghost import Tag
from ..promises import Promises
from .residency import Prefixes, Residency, Step
from .uses import HostOrder, StorageUses, WriteThrough


@dataclass(slots=True)
class Load:
    """A request that is being loaded: a hit on the device, then blocks of the host, then a tail.

    Attributes:
        tail: number of tokens in a parked last block that is not whole, or 0.
        path: tags of the whole blocks that were hit or are loaded.
        tags: tags of the loaded tokens.
        moved: prefixes that were moved off the host for it, and are in flight.
    """

    copy: int
    num_hit: int
    num_host: int
    tail: int
    path: list[Tag]
    tags: list[Tag]
    moved: frozenset[Tag]


@dataclass(slots=True)
class Parked:
    """The saved KV of a parked request.

    Attributes:
        num_tokens: number of computed tokens.
        copy: the operation that saves the remaining blocks, or None.
        copied: the prefixes that it copies.
        blocks: host blocks that the request may need.
        writers: operations that still write some of them: `copy` and others.
        failed: whether some blocks were not saved.
        is_void: whether a reset dropped its namespace.
        keeps_tail: whether a last block that is not whole can be loaded.
    """

    where: str
    path: list[Tag]
    num_tokens: int
    copy: int | None = None
    copied: set[Tag] = field(default_factory=set)
    blocks: set[int] = field(default_factory=set)
    writers: set[int] = field(default_factory=set)
    failed: bool = False
    is_void: bool = False
    keeps_tail: bool = True

    @property
    def is_saved(self) -> bool:
        """Whether all its KV was saved, and can be loaded."""
        return not (self.writers or self.failed or self.is_void)


@dataclass(slots=True)
class Prefetch:
    """A lookup in storage, then a fetch of the found blocks to the host.

    Attributes:
        path: tags of all whole blocks of its tokens; the first `num_known` are cached.
        stage: the next event: "lookup", "asked", "found" (with `num_found`), "fetch" or "done".
        blocks: host blocks that it may need.
        held: cached prefixes that only the host had.
    """

    path: list[Tag]
    num_known: int
    stage: str = "lookup"
    num_found: int = 0
    blocks: set[int] = field(default_factory=set)
    held: list[Tag] = field(default_factory=list)


class TierModel(CacheModel):
    """A `CacheModel` with host blocks, and with leases that end when an operation does.

    Attributes:
        write: the write policy.
        host: owner of each host block that is not free: ``"new"`` until the operation that writes
            it is taken, then ``"op 5"`` until that is fenced, then ``"cache"``.
        read: host blocks that an operation still reads, with the operation.
        now: where each prefix is.
        prefixes: all prefixes that were ever used.
        order: recency of each prefix on the host.
        grown: the published path of each request that published blocks in the current call.
        departed: prefixes that left the device since the last `take`.
        loads, parked, prefetches: by name of the request; a load that continues without its
            request, by name of the operation.
        through: blocks to write through.
        to_store: prefixes that are new on the host and must be stored.
        stored: prefixes whose operation stored all of its blocks, while the host has them.
        uses: uses that must be reported to storage.
    """

    def __init__(self, num_blocks: int, block_size: int, promises: Promises) -> None:
        super().__init__(num_blocks, block_size, promises)
        self.write = ""
        self.host: dict[int, str] = {}
        self.read: dict[int, str] = {}
        self.now = Residency({}, {}, {}, frozenset(), 0, ())
        self.prefixes = Prefixes()
        self.order = HostOrder()
        self.departed: set[Tag] = set()
        self.grown: dict[str, list[Tag]] = {}
        self.loads: dict[str, Load] = {}
        self.parked: dict[str, Parked] = {}
        self.prefetches: dict[str, Prefetch] = {}
        self.to_store: set[Tag] = set()
        self.stored: set[Tag] = set()

    def configure(self, write: str, num_hits: int, window: int) -> None:
        """Set the write policy, and the window of `StorageUses`."""
        self.write = write
        self.through = WriteThrough(num_hits, is_on=write == "through")
        self.uses = StorageUses(window)

    # Where each prefix is

    def moved(self, now: Residency) -> None:
        """Enter where each prefix is after a call."""
        before, self.now = self.now, now
        for path in self.grown.values():
            self.through.published(path)
        self.grown.clear()
        self.counts["dropped_blocks"] += len(before.anywhere - now.anywhere)
        self.departed |= before.device.keys() - now.device.keys()
        changed = before.device.keys() ^ now.device.keys()
        changed |= {tag for tag, _ in before.below.items() ^ now.below.items()}
        changed |= before.idle.keys() ^ now.idle.keys()
        self.order.touch(self.prefixes.paths_to(changed))
        for tag in self.through.hits.keys() - now.device.keys():
            del self.through.hits[tag]
        self.stored &= now.host.keys()
        self.uses.cached(now.anywhere)

    def allow(self, step: Step) -> None:
        """Check that the present state is one that an operation allows."""
        held = {tag for prefetch in self.prefetches.values() for tag in prefetch.held}
        lost = step.allow(self.now, self.prefixes, held)
        for load in self.loads.values():  # another may move again what has come back since
            load.moved &= self.now.promoting
        for name, prefetch in list(self.prefetches.items()):
            # The others went with what they follow.
            prefetch.held = [tag for tag in prefetch.held if tag in self.now.anywhere]
            if prefetch.stage == "done":
                del self.prefetches[name]
        self.situations["dropped for room"] += bool(lost)
        self.situations["demoted, and dropped"] += bool(lost & step.before.device.keys())

    def forget(self, kept: Collection[Tag]) -> None:
        """A reset ends all operations, and keeps what follows some roots."""
        self.loads.clear()
        self.to_store.clear()
        self.uses.reset()
        root_of, paths = self.prefixes.root_of, self.through.paths
        self.through.paths = [path for path in paths if path and root_of(path[0]) in kept]
        for parked in self.parked.values():
            parked.keeps_tail = False
            parked.failed |= bool(parked.writers)
            parked.writers.clear()
        self.prefetches.clear()

    # Uses of prefixes

    def hit(self, name: str, num_blocks: int) -> None:
        """Admit a request; it uses its hit."""
        super().hit(name, num_blocks)
        self.order.use(self.holdings[name].shared)
        self.uses.now += 1

    def ended(self, name: str) -> None:
        """A request has ended; it used its published blocks once more."""
        self.order.use(self.holdings[name].shared)
        super().ended(name)

    def published(self, name: str, blocks: Sequence[int]) -> None:
        """The next blocks of a request were published."""
        super().published(name, blocks)
        self.grown[name] = self.holdings[name].shared

    def _give_back(self, block: int) -> None:
        super()._give_back(block)
        if not self.ending:
            self.grown[self.actor] = self.holdings[self.actor].shared

    # Leases that end with an operation

    def detach(self, name: str, op: str, *, shared: bool) -> None:
        """A request ends while its private blocks are written; the operation owns them now.

        Args:
            shared: whether it owns the shared blocks of the request, too.
        """
        holding = self.holdings[name]
        rest = Holding([], holding.root)
        if not shared:
            holding, rest = rest, holding
            holding.table = rest.take_private()
        self.owner.update(dict.fromkeys(holding.private, op))
        self.holdings.update({name: rest, op: holding})

    def forgotten(self, name: str) -> None:
        """A reset takes the shared blocks of an operation that continues without its request."""
        holding = self.holdings[name]
        private = holding.take_private()
        self.ended(name)
        self.holdings[name] = Holding([], holding.root, table=private)

    def abandoned(self, op: str) -> None:
        """Free the blocks of an operation that continued without its request."""
        require(op in self.holdings, rules.T41, "{} is abandoned, and has ended before", op)
        self.ended(op)

    # Host blocks

    def host_allocated(self, blocks: Sequence[int]) -> None:
        """Free host blocks were allocated."""
        for block in blocks:
            owner = self.host.get(block)
            require(owner is None, rules.T42, "host block {} is taken from {}", block, owner)
            self.host[block] = "new"

    def host_freed(self, blocks: Sequence[int]) -> None:
        """Host blocks became free."""
        for block in blocks:
            owner, reader = self.host.get(block), self.read.get(block)
            require(owner is not None, rules.T42, "host block {} is freed, and was free", block)
            why = "host block {} is freed, and {} writes it"
            require(owner in ("new", "cache"), rules.T11, why, block, owner)
            why = "host block {} is freed, and {} reads it"
            require(reader is None, rules.T10, why, block, reader)
            del self.host[block]

    def dispatched(self, op: str, destinations: Sequence[int], reads: Sequence[int]) -> None:
        """An operation begins to write host blocks and may read others at any time."""
        for block in destinations:
            owner = self.host.get(block)
            require(owner == "new", rules.T11, "{} writes host block {} of {}", op, block, owner)
            self.host[block] = op
        for block in reads:
            is_there = block in self.host
            require(is_there, rules.T10, "{} reads host block {}, that is free", op, block)
            self.read[block] = op

    def written(self, op: str, blocks: Sequence[int]) -> None:
        """Host blocks of an operation were written and are not written any more."""
        for block in blocks:
            if self.host.get(block) == op:
                self.host[block] = "cache"

    def fenced(self, op: str) -> None:
        """An operation is fenced: it can no longer touch its host blocks."""
        self.written(op, list(self.host))
        self.read = {block: reader for block, reader in self.read.items() if reader != op}

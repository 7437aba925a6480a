"""The model of a KV cache: the owner of each block, and guarded steps from owner to owner.

The model has no free list, reference count, heap or tree of nodes. It derives them from the owners,
so it cannot keep them wrongly::

    free blocks     = blocks whose owner is FREE
    users           = the requests whose block table names the block
    leaf            = published, without users, without a published continuation
    available       = free + published without users

A step of a block is an event that the manager reports, and its guards are the rules::

               allocated            published              evicted
        FREE -----------> a request ----------> the cache ----------> EVICTED
          ^                   |                                          |
          +------- freed -----+------------------------------------------+
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from ..rules import cache as rules
from ..rules.rule import require
from .ghost import Tag
from .promises import Promises

FREE: Final = "free"
CACHED: Final = "the cache"
EVICTED: Final = "evicted"  # by the current call, not yet allocated or freed
LEFT: Final = "an ended request"  # of a manager that frees lazily, to be freed by a later call
IN_FLIGHT: Final = "a step in flight"  # of a duplicate that it may read; no request has it

Owner: TypeAlias = str
"""FREE, CACHED, EVICTED, LEFT, IN_FLIGHT, or the name of a request."""


@dataclass(slots=True)
class Published:
    """A published block: its prefix, the prefix before it, its depth and its last use."""

    tag: Tag
    parent: Tag
    depth: int
    last_use: int = 0


@dataclass(slots=True)
class Holding:
    """The blocks of a request: `table` in the order of its tokens.

    `tags` has the prefix of each published block of the table; the others are private to the
    request. `path` has the tag of each whole block of its tokens, `computed` the number of written
    tokens.
    """

    path: list[Tag]
    root: Tag
    computed: int = 0
    table: list[int] = field(default_factory=list)
    tags: dict[int, Tag] = field(default_factory=dict)

    @property
    def shared(self) -> list[Tag]:
        """The prefixes of the published blocks."""
        return [self.tags[block] for block in self.table if block in self.tags]

    @property
    def private(self) -> list[int]:
        """The blocks that nobody else uses."""
        return [block for block in self.table if block not in self.tags]

    def share(self, position: int, block: int, tag: Tag) -> None:
        """Let the table point to a published block."""
        self.tags.pop(self.table[position], None)
        self.table[position] = block
        self.tags[block] = tag

    def take_private(self) -> list[int]:
        """Remove the private blocks from the table, and return them."""
        private = self.private
        self.table = [block for block in self.table if block in self.tags]
        return private


class CacheModel:
    """The model of a cache manager. It receives `Events` and raises if one breaks a rule.

    Attributes:
        owner: the owner of each block that was ever allocated.
        cached: the published blocks.
        copies: the blocks of each published prefix; one, if the manager promises `one_copy`.
        flights: the blocks that each step in flight may read, in the order of the steps.
        situations: how often each situation of interest occurred.
        actor: the request of the current call, or "" if it is of none or all.
        ending: whether the current call ends the actor; `resetting`, whether it is a reset.
        needed: the blocks that the current call may need; it must not evict more.
        wanted: the prefixes that the current admission may hit, and must, if the manager promises
            `hits_all`.
    """

    def __init__(self, num_blocks: int, block_size: int, promises: Promises) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.promises = promises
        self.owner: dict[int, Owner] = {}
        self.cached: dict[int, Published] = {}
        self.copies: dict[Tag, list[int]] = {}
        self.holdings: dict[str, Holding] = {}
        self.flights: list[set[int]] = []
        self.clock = 0
        self.needed = 0
        self.wanted: Sequence[Tag] = ()
        self.actor = ""
        self.ending = self.resetting = False
        self.counts: Counter[str] = Counter()
        self.situations: Counter[str] = Counter()
        self.num_free = num_blocks

    # Derived state

    def longest_hit(self, path: Sequence[Tag]) -> int:
        """Number of leading blocks of a path that are published."""
        return next((i for i, tag in enumerate(path) if tag not in self.copies), len(path))

    def in_use(self) -> set[int]:
        """Blocks that some request holds, or that the current admission must hit."""
        used = {block for holding in self.holdings.values() for block in holding.table}
        for tag in self.wanted if self.promises.hits_all else ():
            copies = self.copies.get(tag, ())
            used.update(copies if len(copies) == 1 else ())
        return used

    def unused(self) -> dict[int, Published]:
        """Published blocks without users."""
        return {block: self.cached[block] for block in self.cached.keys() - self.in_use()}

    def available(self, without: Sequence[Tag] = ()) -> int:
        """Number of free and unused blocks, if the prefixes `without` were used too."""
        unused = self.cached.keys() - self.in_use()
        taken = sum(not unused.isdisjoint(self.copies[tag]) for tag in without)
        return self.num_free + len(unused) - taken

    def _is_followed(self, tag: Tag) -> bool:
        return any(entry.parent == tag for entry in self.cached.values())

    def _coldest_leaf(self, blocks: Mapping[int, Published]) -> int:
        """The least recently used of some blocks that none of the others follows; the deepest."""
        parents = {entry.parent for entry in blocks.values()}
        return min(
            (entry.last_use, -entry.depth, block)
            for block, entry in blocks.items()
            if entry.tag not in parents or len(self.copies[entry.tag]) > 1
        )[2]

    # Requests

    def arrive(self, name: str, holding: Holding, wanted: Sequence[Tag], needed: int) -> None:
        """A request is about to be admitted; it may hit some blocks, and needs new ones."""
        self.holdings[name] = holding
        self.actor, self.wanted, self.needed = name, wanted, needed

    def refuse(self, name: str) -> None:
        """The request was not admitted."""
        self.wanted = ()
        held = self.holdings.pop(name).table
        require(not held, rules.A8, "{} was refused, and has {}", name, held)

    def hit(self, name: str, num_blocks: int) -> None:
        """The request was admitted, with the first `num_blocks` published blocks of its path."""
        holding, due = self.holdings[name], len(self.wanted) if self.promises.hits_all else 0
        self.wanted = ()
        longest, why = self.longest_hit(holding.path), "{} hit {} blocks, {} are published"
        require(num_blocks <= longest, rules.H1, why, name, num_blocks, longest)
        require(num_blocks >= due, rules.H2, why, name, num_blocks, due)
        path = holding.path[:num_blocks]
        if path and self._is_followed(path[-1]):
            self.situations["hit that ends before a published block"] += 1
        holding.tags = {self.copies[tag][0]: tag for tag in path}
        holding.table = [*holding.tags, *holding.table]
        holding.computed = num_blocks * self.block_size

    def look(self, name: str, table: list[int]) -> None:
        """Check a block table.

        Only the manager knows which copy of a prefix it uses. If it frees lazily, it may replace a
        private block by one that is published.
        """
        holding = self.holdings[name]
        if table == holding.table:
            return
        for position, (mine, theirs, tag) in enumerate(
            zip(holding.table, table, holding.path, strict=False)
        ):
            is_copy = mine != theirs and theirs in self.copies.get(tag, ())
            if is_copy and (mine in holding.tags or not self.promises.frees_at_once):
                if mine not in holding.tags:
                    self.owner[mine] = LEFT
                holding.share(position, theirs, tag)
        why = "the table of {} is {}, not {}"
        require(table == holding.table, rules.R1, why, name, table, holding.table)

    def ends(self, name: str) -> None:
        """A request begins to end; private blocks that are freed until `ended` are its own."""
        self.actor, self.needed, self.ending = name, 0, True

    def ended(self, name: str) -> None:
        """A request has ended; for blocks without other users this may be the last use."""
        self.ending = False
        self.clock += 1
        holding = self.holdings.pop(name)
        self._leave(holding.private, "{} has ended and still has {}", name, holding.private)
        if self.promises.ages_from_release:
            for block in holding.tags.keys() - self.in_use():
                self.cached[block].last_use = self.clock

    def reset(self) -> None:
        """Forget everything."""
        self.owner.clear()
        self.cached.clear()
        self.copies.clear()
        self.holdings.clear()
        self.flights.clear()
        self.num_free, self.resetting = self.num_blocks, False

    # Steps in flight

    def begin_step(self) -> None:
        """A step begins; until it ends, it may read the block tables as they are now."""
        self.flights.append(self.in_use())

    def end_step(self) -> None:
        """The first step in flight ends; the call frees what no other one may read."""
        ended = self.flights.pop(0).difference(*self.flights)
        kept = [block for block in ended if self.owner.get(block) == IN_FLIGHT]
        self.owner.update(dict.fromkeys(kept, EVICTED))

    # Events

    def allocated(self, name: str, blocks: Sequence[int]) -> None:
        """Free blocks were allocated to a request."""
        for block in blocks:
            owner, why = self.owner.get(block, FREE), "block {} is given to {}, but belongs to {}"
            require(owner in (FREE, EVICTED), rules.A1, why, block, name, owner)
            self.num_free -= owner == FREE
            self.owner[block] = name
            for step in self.flights:  # of the former owner, which has ended
                step.discard(block)
            there, why = len(self.owner), "block {} is one more than the {} of the pool"
            require(there <= self.num_blocks, rules.A2, why, block, self.num_blocks)
        self.holdings[name].table += blocks

    def published(self, name: str, blocks: Sequence[int]) -> None:
        """Blocks of a request were published."""
        holding = self.holdings[name]
        self.clock += 1
        for block in blocks:
            owner, why = self.owner.get(block, FREE), "{} publishes block {}, which belongs to {}"
            is_own = owner == name and block in holding.table
            require(is_own, rules.P1, why, name, block, owner)
            depth, why = holding.table.index(block), "{} publishes its block {}, {} tokens computed"
            is_computed = (depth + 1) * self.block_size <= holding.computed
            require(is_computed, rules.P3, why, name, depth, holding.computed)
            tag, parent = holding.path[depth], holding.path[depth - 1] if depth else holding.root
            copies = self.copies.setdefault(tag, [])
            may_copy, why = not self.promises.one_copy, "{} publishes block {}, a copy of blocks {}"
            require(may_copy or not copies, rules.P2, why, name, block, copies)
            self.owner[block] = CACHED
            self.cached[block] = Published(tag, parent, depth, self.clock)
            copies.append(block)
            holding.share(depth, block, tag)

    def used(self, blocks: Sequence[int]) -> None:
        """Published blocks were used; they are the most recently used ones now."""
        self.clock += 1
        for block in blocks:
            require(block in self.cached, rules.H1, "block {} is used, but not published", block)
            self.cached[block].last_use = self.clock

    def evicted(self, blocks: Sequence[int]) -> None:
        """Blocks left the cache; the same call allocates or frees them."""
        for block in blocks:
            owner = self.owner.get(block, FREE)
            why = "block {} is evicted, but belongs to {}"
            require(owner == CACHED, rules.E1, why, block, owner)
        left = {block: self.cached[block] for block in blocks}
        parents = [entry.parent for entry in left.values()]
        require(len(left) == len(blocks), rules.E1, "blocks {} are evicted twice", blocks)
        self.counts["evicted_blocks"] += len(left)
        while left:  # a batch equals single evictions in eviction order, however it is reported
            block = self._coldest_leaf(left)
            self._check_victim(block, left.pop(block))
            self._withdraw(block)
        if parents:
            self._see_eviction(parents)

    def _check_victim(self, block: int, entry: Published) -> None:
        if self.resetting:
            return
        is_last, is_wanted = self.copies[entry.tag] == [block], entry.tag in self.wanted
        users = [name for name, holding in self.holdings.items() if block in holding.table]
        if self.promises.hits_all and is_last and is_wanted:
            users.append(self.actor)
        require(not users, rules.E2, "block {} is evicted, and {} use it", block, users)
        if self.promises.leaves_first and is_last:
            followed = self._is_followed(entry.tag)
            require(not followed, rules.E3, "block {} is evicted before what follows it", block)
        if self.promises.evicts_exactly:
            in_hand = self.num_free + sum(owner == EVICTED for owner in self.owner.values())
            why = "block {} is evicted with {} at hand and {} needed"
            require(in_hand < self.needed, rules.E5, why, block, in_hand, self.needed)
        if self.promises.lru and not is_wanted:
            unused = self.unused().items()
            rivals = {other: each for other, each in unused if each.tag not in self.wanted}
            coldest = self._coldest_leaf(rivals | {block: entry})
            is_oldest = entry.last_use <= self.cached[coldest].last_use
            why = "block {} is evicted, but block {} was used longer ago"
            require(is_oldest, rules.E4, why, block, coldest)

    def _see_eviction(self, parents: Sequence[Tag]) -> None:
        used, situations = self.in_use(), self.situations
        there = [block for tag in parents for block in self.copies.get(tag, ())]
        situations["evicted under pressure" if self.actor else "evicted when asked"] += 1
        situations["evicted several"] += len(parents) > 1
        situations["evicted next to a used block"] += any(block in used for block in there)
        situations["evicted the tail of a path"] += any(block not in used for block in there)

    def freed(self, blocks: Sequence[int]) -> None:
        """Blocks became free."""
        for block in blocks:
            owner = self.owner.get(block, FREE)
            if self.resetting and owner == CACHED:
                self._withdraw(block)
            elif owner == self.actor:
                is_read = not self.ending and any(block in step for step in self.flights)
                why = "{} gives back its block {}, and a step in flight may read it"
                require(not is_read, rules.F6, why, owner, block)
                self._give_back(block)
            else:
                of_all = self.resetting and not self.actor and owner != FREE
                may_free = owner in (EVICTED, LEFT) or of_all
                rule = rules.F6 if owner == IN_FLIGHT else rules.F1
                why = "block {} is freed by {!r}, but belongs to {}"
                require(may_free, rule, why, block, self.actor, owner)
            self.owner[block] = FREE
            self.num_free += 1

    def replaced(self, name: str, blocks: Sequence[int]) -> None:
        """Duplicates of a request were replaced; they are freed after the steps in flight."""
        for block in blocks:
            owner, why = self.owner.get(block, FREE), "{} gives up block {}, which belongs to {}"
            require(owner == name, rules.F1, why, name, block, owner)
            self._give_back(block)
            self.owner[block] = IN_FLIGHT if self.flights else EVICTED
            for step in self.flights[-1:]:  # the manager may not know which steps read it
                step.add(block)

    def _give_back(self, block: int) -> None:
        holding = self.holdings[self.actor]
        position = holding.table.index(block)
        if self.ending:
            del holding.table[position]
            return
        # A running request may only free a block that duplicates one already published.
        tags = [tag for tag in holding.path[position : position + 1] if tag in self.copies]
        require(tags, rules.F2, "{} runs, and gives back its block {}", self.actor, block)
        holding.share(position, self.copies[tags[0]][0], tags[0])
        self.counts["duplicate_blocks"] += 1

    def _withdraw(self, block: int) -> None:
        """A published block is no longer found."""
        tag = self.cached.pop(block).tag
        self.copies[tag].remove(block)
        if not self.copies[tag]:
            del self.copies[tag]
        self.owner[block] = EVICTED

    # After each call

    def settled(self) -> None:
        """Check the blocks after a call has returned."""
        lost = [block for block, owner in self.owner.items() if owner == EVICTED]
        self._leave(lost, "blocks {} belong to nobody, and are not free", lost)

    def _leave(self, blocks: Sequence[int], why: str, *details: object) -> None:
        """A manager that frees lazily leaves blocks for a later call."""
        is_free = not blocks or not self.promises.frees_at_once
        require(is_free, rules.S1, why, *details)
        self.owner.update(dict.fromkeys(blocks, LEFT))

    def check_available(self, found: int) -> None:
        """Check the available blocks; of those that are freed later, any number may be counted."""
        least = self.available()
        most = least + sum(owner == LEFT for owner in self.owner.values())
        require(least <= found <= most, rules.S2, "{} available, should be {}", found, least)

"""The model of a KV cache: the owner of each block, and guarded steps from owner to owner.

The model has no free list, reference count, heap or tree of nodes. It derives them from the owners,
so it cannot keep them wrongly::

    free blocks     = blocks whose owner is FREE
    users           = the requests whose shared path holds the prefix
    evictable       = published, without users, without a published continuation
    available       = free + published without users
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ..rules import cache as rules
from ..rules.rule import Violation, require
from .blocks import EVICTED, FREE, Holding, Owner, Published
from .ghost import Tag


class CacheModel:
    """The model of a cache manager. It receives `Events` and raises if one breaks a rule.

    Attributes:
        situations: how often each situation of interest occurred.
        needed: the blocks that the current call may need; it must not evict more.
        actor: the request of the current call.
    """

    def __init__(self, num_blocks: int, block_size: int, lru: bool, exactly: bool) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.lru = lru
        self.exactly = exactly
        self.owner: dict[int, Owner] = {}
        self.published_at: dict[Tag, Published] = {}
        self.holdings: dict[str, Holding] = {}
        self.clock = 0
        self.needed = 0
        self.actor = ""
        self.ending = False
        self.counts: Counter[str] = Counter()
        self.situations: Counter[str] = Counter()
        self.num_free = num_blocks

    # Derived state

    def longest_hit(self, path: Sequence[Tag]) -> int:
        """Number of leading blocks of a path that are published."""
        for num_blocks, tag in enumerate(path):
            if tag not in self.published_at:
                return num_blocks
        return len(path)

    def used(self) -> set[Tag]:
        """Prefixes that some request uses."""
        return {tag for holding in self.holdings.values() for tag in holding.shared}

    def num_unused(self, without: Sequence[Tag] = ()) -> int:
        """Number of published blocks without users, if `without` were used."""
        return len(self.published_at) - len(self.used().union(without))

    def available(self) -> int:
        """Number of free and unused blocks."""
        return self.num_free + self.num_unused()

    def table(self, name: str) -> list[int]:
        """The block table of a request."""
        holding = self.holdings[name]
        return [self.published_at[tag].block for tag in holding.shared] + holding.private

    def _is_followed(self, tag: Tag) -> bool:
        return any(entry.parent == tag for entry in self.published_at.values())

    def coldest_leaf(self) -> Tag:
        """The least recently used leaf without users; the deepest of equals."""
        used, parents = self.used(), {entry.parent for entry in self.published_at.values()}
        return min(
            (tag for tag in self.published_at if tag not in used and tag not in parents),
            key=lambda tag: (self.published_at[tag].last_use, -self.published_at[tag].depth),
        )

    # Requests

    def hit(self, name: str, holding: Holding, num_blocks: int, hits_all: bool) -> None:
        """Admit a request with the first `num_blocks` published blocks of its path."""
        longest = self.longest_hit(holding.path)
        require(
            num_blocks <= longest,
            rules.H1,
            "{} hit {} blocks, {} are published",
            name,
            num_blocks,
            longest,
        )
        require(
            num_blocks >= longest or not hits_all,
            rules.H2,
            "{} hit {} blocks, {} are published",
            name,
            num_blocks,
            longest,
        )
        if num_blocks and self._is_followed(holding.path[num_blocks - 1]):
            self.situations["hit that ends before a published block"] += 1
        holding.shared = holding.path[:num_blocks]
        holding.computed = num_blocks * self.block_size
        self.holdings[name] = holding

    def release(self, name: str) -> None:
        """End a request; the last use of blocks without other users is now."""
        self.clock += 1
        holding = self.holdings.pop(name)
        require(
            not holding.private, rules.S1, "{} has ended and still has {}", name, holding.private
        )
        used = self.used()
        for tag in holding.shared:
            if tag not in used:
                self.published_at[tag].last_use = self.clock

    def reset(self) -> None:
        """Forget everything."""
        self.owner.clear()
        self.published_at.clear()
        self.holdings.clear()
        self.num_free = self.num_blocks

    # Events

    def allocated(self, name: str, blocks: Sequence[int]) -> None:
        """Free blocks were allocated to a request."""
        for block in blocks:
            owner = self.owner.get(block, FREE)
            require(
                owner in (FREE, EVICTED),
                rules.A1,
                "block {} is given to {}, but belongs to {}",
                block,
                name,
                owner,
            )
            if owner == FREE:
                self.num_free -= 1
            self.owner[block] = name
            require(
                len(self.owner) <= self.num_blocks,
                rules.A2,
                "block {} is one more than the {} of the pool",
                block,
                self.num_blocks,
            )
        self.holdings[name].private += blocks

    def freed(self, blocks: Sequence[int]) -> None:
        """Blocks became free."""
        for block in blocks:
            owner = self.owner.get(block, FREE)
            if owner != EVICTED:
                require(
                    owner == self.actor != FREE,
                    rules.F1,
                    "block {} is freed by {}, but belongs to {}",
                    block,
                    self.actor or "nobody",
                    owner,
                )
                self._give_back(block)
            self.owner[block] = FREE
            self.num_free += 1

    def _give_back(self, block: int) -> None:
        holding = self.holdings[self.actor]
        if self.ending:
            holding.private.remove(block)
            return
        # A running request may only free a block that duplicates one already published.
        position = len(holding.shared)
        is_duplicate = (
            position < len(holding.path)
            and holding.path[position] in self.published_at
            and holding.private[:1] == [block]
        )
        require(is_duplicate, rules.F2, "{} runs, and gives back its block {}", self.actor, block)
        holding.shared.append(holding.path[position])
        del holding.private[0]
        self.counts["duplicate_blocks"] += 1

    def published(self, name: str, blocks: Sequence[int]) -> None:
        """The next blocks of a request were published."""
        holding = self.holdings[name]
        for block in blocks:
            depth = len(holding.shared)
            require(
                self.owner.get(block, FREE) == name and holding.private[:1] == [block],
                rules.P1,
                "{} publishes block {} as its block {}, which is not its own",
                name,
                block,
                depth,
            )
            require(
                (depth + 1) * self.block_size <= holding.computed,
                rules.P3,
                "{} publishes its block {} with {} tokens computed",
                name,
                depth,
                holding.computed,
            )
            tag = holding.path[depth]
            require(
                tag not in self.published_at,
                rules.P2,
                "{} publishes block {}, but block {} is published for its prefix",
                name,
                block,
                self.published_at[tag].block if tag in self.published_at else None,
            )
            parent = holding.shared[-1] if holding.shared else holding.root
            self.owner[block] = tag
            self.published_at[tag] = Published(block, parent, depth)
            holding.shared.append(tag)
            del holding.private[0]

    def evicted(self, blocks: Sequence[int]) -> None:
        """Blocks left the cache; the same call allocates or frees them."""
        victims: list[tuple[int, int, int, Tag]] = []
        for block in blocks:
            tag = self.owner.get(block, FREE)
            if isinstance(tag, str):
                raise Violation(rules.E1, f"block {block} is evicted, but belongs to {tag}")
            entry = self.published_at[tag]
            victims.append((entry.last_use, -entry.depth, block, tag))
        parents = [self.published_at[tag].parent for *_, tag in victims]
        # A batch equals single evictions in eviction order, in any order of the report.
        for _, _, block, tag in sorted(victims):
            require(
                self.owner[block] == tag, rules.E1, "block {} is evicted twice in a call", block
            )
            self._evict(block, tag)
            self.owner[block] = EVICTED
        self.counts["evicted_blocks"] += len(victims)
        self._see_eviction([tag for *_, tag in victims], parents)

    def _see_eviction(self, victims: Sequence[Tag], parents: Sequence[Tag]) -> None:
        if not victims:
            return
        used, situations = self.used(), self.situations
        situations["evicted under pressure" if self.actor else "evicted when asked"] += 1
        situations["evicted several"] += len(victims) > 1
        situations["evicted next to a used block"] += any(tag in used for tag in parents)
        situations["evicted the tail of a path"] += any(
            tag in self.published_at and tag not in used for tag in parents
        )

    def _evict(self, block: int, tag: Tag) -> None:
        users = [name for name, holding in self.holdings.items() if tag in holding.shared]
        require(not users, rules.E2, "block {} is evicted, and {} use it", block, users)
        require(
            not self._is_followed(tag),
            rules.E3,
            "block {} is evicted before what follows it",
            block,
        )
        if self.exactly:
            in_hand = self.num_free + sum(owner == EVICTED for owner in self.owner.values())
            require(
                in_hand < self.needed,
                rules.E5,
                "block {} is evicted with {} at hand and {} needed",
                block,
                in_hand,
                self.needed,
            )
        if self.lru:
            coldest = self.coldest_leaf()
            require(
                self.published_at[tag].last_use == self.published_at[coldest].last_use,
                rules.E4,
                "block {} is evicted, but block {} was used longer ago",
                block,
                self.published_at[coldest].block,
            )
        del self.published_at[tag]

    # After each call

    def settled(self) -> None:
        """Check the blocks after a call has returned."""
        lost = [block for block, owner in self.owner.items() if owner == EVICTED]
        require(not lost, rules.S1, "blocks {} belong to nobody, and are not free", lost)

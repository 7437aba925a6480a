"""A consumer of KV events: what a router knows of a manager by its events alone."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias

from ..rules.events import K2, K3, K4, K5, K6, K7
from ..rules.rule import Rule, Violation

Hash: TypeAlias = int | bytes
"""Name of a block in events."""

Prefix: TypeAlias = tuple[bytes, tuple[int, ...]]
"""Namespace and all tokens up to the end of a block."""

ANYTHING: Final = 1 << 62
"""A number of blocks that is never reached."""


@dataclass(frozen=True, slots=True)
class Stored:
    """Consecutive blocks of one path were stored in a tier."""

    medium: str
    hashes: Sequence[Hash]
    parent: Hash | None
    tokens: Sequence[int]
    block_size: int
    namespace: bytes = b""


@dataclass(frozen=True, slots=True)
class Removed:
    """Blocks were removed from a tier."""

    medium: str
    hashes: Sequence[Hash]


@dataclass(frozen=True, slots=True)
class Cleared:
    """All blocks of all tiers were removed."""


Event: TypeAlias = Stored | Removed | Cleared


class Batch(NamedTuple):
    """Events, and the number of their batch."""

    seq: int
    events: Sequence[Event]


class _Block(NamedTuple):
    """What a hash names: the tokens of the block, and what is before it."""

    parent: Hash | None
    namespace: bytes
    tokens: tuple[int, ...]


Found: TypeAlias = Callable[[Rule, str], None]
"""Takes a finding: the broken rule, and what was seen."""


def _raise(rule: Rule, why: str) -> None:
    raise Violation(rule, why)


class Consumer:
    """Applies events in order, and checks each of them.

    Attributes:
        held: the hashes of the blocks that each tier has.
        found: is called with each finding. What can be applied in spite of it is applied.
        joined_late: whether earlier events were missed. Then the parent of a block, and a block
            that is removed, may be unknown.
    """

    def __init__(self, found: Found = _raise, most_removed: int = ANYTHING) -> None:
        """Make a consumer of a manager that has nothing.

        Args:
            found: takes the findings; by default they are raised as a `Violation`.
            most_removed: number of removed blocks whose names are remembered.
        """
        self.held: dict[str, set[Hash]] = {}
        self.found = found
        self.joined_late = False
        self._blocks: dict[Hash, _Block] = {}
        # Those that no tier has, the oldest first; a dict would pass over what it has dropped.
        self._removed: OrderedDict[Hash, None] = OrderedDict()
        self._most_removed = most_removed
        self._block_sizes: dict[str, int] = {}

    def apply(self, event: Event) -> None:
        """Apply one event."""
        if isinstance(event, Stored):
            self._store(event)
        elif isinstance(event, Removed):
            self._remove(event)
        else:
            self.clear()
            self.joined_late = False

    def clear(self) -> None:
        """Forget every block."""
        self.held.clear()
        self._blocks.clear()
        self._removed.clear()

    def prefixes(self, medium: str) -> set[Prefix]:
        """Return the prefixes of the blocks that a tier has."""
        prefixes = map(self.prefix, self.held.get(medium, ()))
        return {prefix for prefix in prefixes if prefix is not None}

    def prefix(self, name: Hash) -> Prefix | None:
        """Return the prefix that a hash names, as far as it is known."""
        if name not in self._blocks:
            return None
        block = self._blocks[name]
        tokens = list(block.tokens[::-1])
        while block.parent is not None and block.parent in self._blocks:
            block = self._blocks[block.parent]
            tokens += block.tokens[::-1]
        return block.namespace, tuple(tokens[::-1])

    def _store(self, event: Stored) -> None:
        medium, size = event.medium, event.block_size
        if size < 1 or not event.hashes or len(event.tokens) != size * len(event.hashes):
            numbers = f"{len(event.tokens)} tokens in {len(event.hashes)} blocks of {size}"
            self.found(K6, f"{medium} stores {numbers}")
            return
        known = self._block_sizes.setdefault(medium, size)
        if known != size:
            self.found(K6, f"{medium} stores blocks of {size} tokens, after blocks of {known}")
            self._block_sizes[medium] = size
        parent, held = event.parent, self.held.setdefault(medium, set())
        if parent is not None and parent not in self._blocks and not self.joined_late:
            self.found(K3, f"{medium} stores {event.hashes[0]!r} after {parent!r}, not known")
        for place, name in enumerate(event.hashes):
            tokens = tuple(event.tokens[place * size : (place + 1) * size])
            block = _Block(parent, event.namespace, tokens)
            before = self._blocks.get(name, block)
            if before != block:
                self.found(K2, f"{name!r} names {_shown(before)}, and {_shown(block)}")
            if name in held:
                self.found(K4, f"{medium} stores {name!r}, which it has")
            self._blocks[name] = block
            self._removed.pop(name, None)
            held.add(name)
            parent = name

    def _remove(self, event: Removed) -> None:
        held = self.held.setdefault(event.medium, set())
        for name in event.hashes:
            if name not in held:
                if not self.joined_late:
                    self.found(K5, f"{event.medium} removes {name!r}, which it does not have")
                continue
            held.remove(name)
            if not any(name in tier for tier in self.held.values()):
                self._removed[name] = None
        while len(self._removed) > self._most_removed:
            oldest, _ = self._removed.popitem(last=False)
            del self._blocks[oldest]


def _shown(block: _Block) -> str:
    after = "at the start" if block.parent is None else f"after {block.parent!r}"
    return f"tokens {list(block.tokens)} {after} in namespace {block.namespace!r}"


class Receiver:
    """Applies numbered batches, in order, each once.

    Attributes:
        consumer: applies the events.
        next_seq: number of the next batch; None before the first one.
        num_batches: number of batches that were applied.
    """

    def __init__(self, consumer: Consumer, next_seq: int | None = 0) -> None:
        self.consumer = consumer
        self.next_seq = next_seq
        self.num_batches = 0

    def missing_before(self, seq: int) -> range:
        """Return the numbers of the batches that were missed if the next one has number seq."""
        return range(seq if self.next_seq is None else self.next_seq, seq)

    def receive(self, batch: Batch) -> bool:
        """Apply a batch that follows the last one; False if it was applied before.

        The consumer reports a batch after a gap as a finding. Close the gap by a replay before.
        """
        if self.next_seq is not None and batch.seq < self.next_seq:
            return False
        if self.missing_before(batch.seq):
            self.consumer.found(K7, f"batch {batch.seq} follows batch {(self.next_seq or 0) - 1}")
        self.next_seq = batch.seq + 1
        self.num_batches += 1
        for event in batch.events:
            self.consumer.apply(event)
        return True

"""Simulated copies between ghost memories of all tiers, scripted by a test.

The `Fate` of a copy says when it completes, which of its blocks are good, whether it is fenced, and
whether its completion is reported twice. Blocks that are not good hold garbage, and a copy that is
not fenced writes garbage once more before its fence.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from radixkv.kvcache import CacheManager
from radixkv.kvcache.tiers.operations import Operation, OpKind

GARBAGE = -1

Content = tuple[int, ...]
"""Content of a block: the tag in each slot."""


@dataclass
class Fate:
    """Result of a copy, `steps` deliveries after its dispatch; None: when the test ends it."""

    steps: int | None = 0
    good: float | Callable[[int], bool] = 1.0
    fenced: bool = True
    twice: bool = False

    def is_good(self, place: int, count: int) -> bool:
        """Tell whether a block is good; a number is the fraction of leading good blocks."""
        return self.good(place) if callable(self.good) else place < self.good * count


@dataclass
class Flight:
    """A copy in flight."""

    operation: Operation
    content: list[Content]
    fate: Fate
    age: int = 0
    ended: bool = False
    cancelled: bool = False


@dataclass
class Memories:
    """Contents of the blocks of each tier; a block that was not written holds garbage."""

    block_size: int
    device: dict[int, Content] = field(default_factory=dict)
    host: dict[int, Content] = field(default_factory=dict)
    storage: dict[bytes, Content] = field(default_factory=dict)

    def read(self, memory: dict[int, Content], block: int) -> Content:
        return memory.get(block, (GARBAGE,) * self.block_size)

    def write(self, block: int, offset: int, tag: int) -> None:
        content = self.read(self.device, block)
        self.device[block] = (*content[:offset], tag, *content[offset + 1 :])


class Copier:
    """Executes operations according to their fates."""

    def __init__(self, manager: CacheManager, memories: Memories) -> None:
        assert manager.tiers is not None
        self.tiers = manager.tiers
        self.memories = memories
        self.fate: Callable[[Operation], Fate] = lambda operation: Fate()
        self.flights: list[Flight] = []
        self.seen: Counter[OpKind] = Counter()

    def dispatch(self) -> None:
        """Start pending operations: read all sources before writing any destination."""
        cancelled = self.tiers.take_cancelled()
        for flight in self.flights:
            flight.cancelled |= flight.operation.id in cancelled
        memories = self.memories
        new = []
        for operation in self.tiers.take_operations():
            kind = operation.kind
            tier = memories.device if kind is OpKind.DEVICE_TO_HOST else memories.host
            content = [memories.read(tier, int(block)) for block in operation.sources]
            new.append(Flight(operation, content, self.fate(operation)))
            self.seen[kind] += 1
        for flight in new:
            self.spoil(flight)
        self.flights += new

    def spoil(self, flight: Flight, good: Sequence[bool] = ()) -> None:
        """Fill destinations with garbage: during the copy, and where it failed."""
        operation = flight.operation
        to_device = operation.kind is OpKind.HOST_TO_DEVICE
        memory = self.memories.device if to_device else self.memories.host
        for place, block in enumerate(operation.destinations):
            if not (good and good[place]):
                memory[int(block)] = (GARBAGE,) * self.memories.block_size

    def deliver(self) -> None:
        """Complete the copies that are due."""
        for flight in list(self.flights):
            flight.age += 1
            if flight.fate.steps is not None and flight.age > flight.fate.steps:
                self.end(flight)

    def end(self, flight: Flight) -> None:
        """Complete a copy, or fence it if it has completed."""
        operation, fate = flight.operation, flight.fate
        if flight.ended or flight.cancelled:
            if operation.kind is OpKind.HOST_TO_STORAGE:
                self.check_source(flight)
            self.spoil(flight, [] if flight.cancelled else self.good(flight))
            self.tiers.fence(operation.id)
            self.flights.remove(flight)
            return
        good = self.move(flight)
        if not self.tiers.complete(operation.id, good, fenced=fate.fenced):
            flight.cancelled = True  # since the last dispatch
        if fate.twice:
            assert not self.tiers.complete(operation.id, [True] * len(good), fenced=False)
        if fate.fenced:
            self.flights.remove(flight)
        flight.ended = True

    def good(self, flight: Flight) -> list[bool]:
        operation = flight.operation
        count = operation.num_blocks
        good = [flight.fate.is_good(place, count) for place in range(count)]
        if operation.kind in (OpKind.LOOKUP, OpKind.STORAGE_TO_HOST):
            storage = self.memories.storage
            good = [each and key in storage for each, key in zip(good, operation.keys, strict=True)]
        return good

    def move(self, flight: Flight) -> list[bool]:
        """Write good blocks, and garbage for the rest; return which blocks are good."""
        operation, memories, good = flight.operation, self.memories, self.good(flight)
        self.spoil(flight, good)
        if operation.kind is OpKind.HOST_TO_STORAGE:
            self.check_source(flight)
        for place in [place for place, each in enumerate(good) if each]:
            match operation.kind:
                case OpKind.DEVICE_TO_HOST:
                    memories.host[int(operation.destinations[place])] = flight.content[place]
                case OpKind.HOST_TO_DEVICE:
                    memories.device[int(operation.destinations[place])] = flight.content[place]
                case OpKind.HOST_TO_STORAGE:
                    memories.storage[operation.keys[place]] = flight.content[place]
                case OpKind.STORAGE_TO_HOST:
                    content = memories.storage[operation.keys[place]]
                    memories.host[int(operation.destinations[place])] = content
        return good

    def check_source(self, flight: Flight) -> None:
        """Check that a store's source is unchanged, because a thread may read it at any time."""
        for block, content in zip(flight.operation.sources, flight.content, strict=True):
            assert self.memories.host[int(block)] == content, "a stored block was written"

    def held(self, kind: OpKind) -> Flight:
        """Return the only copy of a kind in flight."""
        [flight] = [each for each in self.flights if each.operation.kind is kind]
        return flight


def held_when(*kinds: OpKind) -> Callable[[Operation], Fate]:
    """Return fates by which copies of these kinds wait for the test, and others end at once."""
    return lambda operation: Fate(None if operation.kind in kinds else 0)

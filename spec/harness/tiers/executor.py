"""The virtual executor: ghost memory of host and storage; the world decides when operations end.

The operations of one `take` are simultaneous: all sources are read first, then all destinations
hold garbage until their operation has a result. A copy to storage reads when it ends. A late write,
after its operation was cancelled, leaves garbage for the next owner of the block.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from ...adapters.tiers import Copy, CopyKind
from ...model.ghost import POISON, GhostMemory, Tag
from ...rules import tiers as rules
from ...rules.rule import require

Content: TypeAlias = list[Tag]
"""Tags of the tokens in a block."""

MOVES: Final = ("out", "in", "fork")
FROM_DEVICE: Final = ("out", "fork")
TO_DEVICE: Final = ("in", "fork")
UNANSWERED: Final = -1
"""In place of a bad block: storage does not answer a lookup."""


def leading(ok: Sequence[bool | None]) -> int:
    """Number of good results before the first bad one."""
    return next((place for place, good in enumerate(ok) if not good), len(ok))


def results(copy: Copy, bad: Sequence[int]) -> list[bool | None]:
    """The result of an operation of which some blocks fail."""
    if copy.kind == "lookup" and UNANSWERED in bad:
        return [None] * copy.num_blocks
    return [place not in bad for place in range(copy.num_blocks)]


@dataclass(slots=True)
class Flight:
    """An operation in flight.

    Attributes:
        read: contents of its sources when it began.
        has_result: whether it has a result that counts.
        cancelled: whether it was cancelled before; then its writes do not count.
        owner: its request, or "".
        is_detached: whether its request has ended.
        old: whether there was a reset since it began.
        ok: its result.
        evicted: prefixes that left the device since the previous `take`, copied by it or not.
    """

    copy: Copy
    read: list[Content]
    has_result: bool = False
    cancelled: bool = False
    owner: str = ""
    is_detached: bool = False
    old: bool = False
    ok: list[bool | None] = field(default_factory=list)
    evicted: set[Tag] = field(default_factory=set)

    @property
    def op(self) -> str:
        """Name of the operation in the model."""
        return f"op {self.copy.id}"

    @property
    def kind(self) -> CopyKind:
        """Kind of the operation."""
        return self.copy.kind

    @property
    def is_open(self) -> bool:
        """Whether it has no result, and was not cancelled."""
        return not (self.has_result or self.cancelled)

    @property
    def tags(self) -> list[Tag]:
        """The prefixes in its sources."""
        return [read[-1] for read in self.read]

    def bad_blocks(self) -> list[int]:
        """Destinations that may still be written."""
        blocks = self.copy.destinations
        ok = self.ok if self.has_result else [None] * len(blocks)
        return [block for block, good in zip(blocks, ok, strict=False) if not good]


class Executor:
    """Runs the operations on tags.

    Attributes:
        host: contents of each host block.
        storage: contents stored under each key.
        flights: operations without a fence, in the order in which they were taken.
        ended: the latest ids of fenced operations.
    """

    def __init__(self, device: GhostMemory) -> None:
        self.device = device
        self.host = GhostMemory(device.block_size)
        self.storage: dict[bytes, Content] = {}
        self.flights: list[Flight] = []
        self.ended: list[Copy] = []
        self.seen: set[int] = set()

    def content(self, tier: str, block: int) -> Content:
        """Contents of a block."""
        return list((self.device if tier == "device" else self.host).content(block))

    def _put(self, tier: str, block: int, content: Sequence[Tag]) -> None:
        (self.device if tier == "device" else self.host).blocks[block] = list(content)

    def begin(self, copies: Sequence[Copy]) -> list[Flight]:
        """Begin the operations of one `take`, after all launched steps."""
        flights = []
        for copy in copies:
            require(copy.id not in self.seen, rules.T13, "operation {} is taken again", copy.id)
            self.seen.add(copy.id)
            places = [each for each in (copy.sources, copy.destinations, copy.keys) if each]
            wanted = 1 if copy.kind == "lookup" else 2
            require(len(places) == wanted and len({len(each) for each in places}) == 1, rules.T9,
                    "operation {} names {} sources, {} destinations and {} keys", copy.id,
                    len(copy.sources), len(copy.destinations), len(copy.keys))  # fmt: skip
            tier = "device" if copy.kind in FROM_DEVICE else "host"
            flights.append(Flight(copy, [self.content(tier, block) for block in copy.sources]))
        for flight in flights:
            self._spoil(flight.kind, flight.copy.destinations)
        self.flights += flights
        return flights

    def _spoil(self, kind: str, blocks: Sequence[int]) -> None:
        tier = "device" if kind in TO_DEVICE else "host"
        for block in blocks:
            self._put(tier, block, [POISON] * self.device.block_size)

    def find(self, name: str) -> Flight | None:
        """Return an operation by kind and index among those of the kind, such as ``"out1"``."""
        kind, place = name.rstrip("0123456789"), name.lstrip("abcdefghijklmnopqrstuvwxyz")
        same = [flight for flight in self.flights if flight.kind == kind]
        index = int(place) if place else 0
        return same[index - 1] if 0 < index <= len(same) else None

    def names(self) -> list[str]:
        """Return the names of all operations in flight."""
        numbers: Counter[str] = Counter()
        found = []
        for flight in self.flights:
            numbers[flight.kind] += 1
            found.append(f"{flight.kind}{numbers[flight.kind]}")
        return found

    def end(self, flight: Flight, bad: Sequence[int]) -> list[bool | None]:
        """Let an operation take effect except for some blocks; return its results."""
        copy = flight.copy
        ok = results(copy, bad)
        if copy.kind in ("lookup", "fetch"):
            ok = [good and key in self.storage for good, key in zip(ok, copy.keys, strict=True)]
        flight.ok = ok
        if flight.cancelled:
            self.finish_late_writes(flight)  # a late write, which must not matter
            return ok
        for place, good in enumerate(ok):
            if not good:
                continue
            if copy.kind in MOVES:
                tier = "device" if copy.kind in TO_DEVICE else "host"
                self._put(tier, copy.destinations[place], flight.read[place])
            elif copy.kind == "fetch":
                self._put("host", copy.destinations[place], self.storage[copy.keys[place]])
            elif copy.kind == "store":
                self.storage[copy.keys[place]] = self.content("host", copy.sources[place])
        flight.has_result = True
        return ok

    def finish_late_writes(self, flight: Flight) -> None:
        """Do the last late writes of an operation."""
        self._spoil(flight.kind, flight.bad_blocks())

    def fenced(self, flight: Flight) -> None:
        """Remove a fenced operation."""
        self.flights.remove(flight)
        self.ended = [*self.ended[-3:], flight.copy]

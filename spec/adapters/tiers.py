"""What the specification asks of a cache manager with a host tier and storage below the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias

from .cache import Events, Manager

CopyKind: TypeAlias = Literal["out", "in", "store", "fetch", "lookup", "fork"]
"""From device to host, back, from host to storage, back; a question to storage; on the device."""

Prefix: TypeAlias = tuple[bytes, tuple[int, ...]]
"""A namespace, and all tokens up to the end of a block."""


@dataclass(frozen=True, slots=True)
class Copy:
    """An operation that the manager wants done: `sources` and `destinations` are block ids of their
    tiers, `keys` those of storage; what a kind does not have is empty.
    """

    id: int
    kind: CopyKind
    sources: tuple[int, ...]
    destinations: tuple[int, ...]
    keys: tuple[bytes, ...]

    @property
    def num_blocks(self) -> int:
        """How many results it has."""
        return max(len(self.sources), len(self.destinations), len(self.keys))


@dataclass(frozen=True)
class TierSnapshot:
    """All that a manager keeps below the device.

    Attributes:
        free: the ids in the host's pool.
        host: the host block of each prefix that can be found there.
        landing: of each that is being written.
        leaving: the prefixes that are on their way to the device, and were moved, not copied.
        idle: the host blocks that can be dropped, the next to be dropped first.
        counts: counters that are reported, by name.
    """

    free: Sequence[int]
    host: dict[Prefix, int]
    landing: dict[Prefix, int]
    leaving: set[Prefix]
    idle: Sequence[int]
    counts: Mapping[str, int] = field(default_factory=dict)


class TierEvents(Events, Protocol):
    """Where a manager with tiers reports what it does, besides what every manager does."""

    def ends(self, name: str) -> None:
        """The lease of a request ends here: what is freed now was its."""

    def ended(self, name: str) -> None:
        """It has ended."""

    def forgotten(self, name: str) -> None:
        """An operation that has outlived its request shares nothing any more, in a reset."""

    def host_allocated(self, blocks: Sequence[int]) -> None:
        """Host blocks that were free are taken."""

    def host_freed(self, blocks: Sequence[int]) -> None:
        """Host blocks are free."""


class TierManager(Manager, Protocol):
    """A cache manager with tiers. It names a request that was parked as it did before.

    An operation that goes on to load blocks when its request has ended is their owner from then on:
    it reports as ``"op 5"``.
    """

    def take(self) -> Sequence[Copy]:
        """Hand out the operations that were decided since the last call."""

    def take_cancelled(self) -> Sequence[int]:
        """Hand out which operations, of those taken, nobody wants any more."""

    def used(self) -> Sequence[bytes]:
        """Hand out the keys that storage is to be told of as used since the last call."""

    def complete(self, copy: int, ok: Sequence[bool], fenced: bool) -> bool:
        """Take in the result of an operation; False if it had one."""

    def fence(self, copy: int) -> bool:
        """Hear that nobody writes the blocks of an operation any more; False if that is known."""

    def tier_match(self, tokens: Sequence[int], namespace: bytes) -> tuple[int, int]:
        """Return how many blocks the device has, and how many that follow the host has."""

    def loading(self, name: str) -> int | None:
        """Return the operation that loads a request, while it does."""

    def ready(self, name: str) -> int:
        """Return how many tokens of a request need not be computed."""

    def promoted(self, name: str) -> int:
        """Return how many blocks of a request came from the host in its last admission."""

    def park(self, name: str, tokens: Sequence[int], where: str) -> bool:
        """Preempt a request and keep its KV; False if there is no room. `admit` resumes it."""

    def parked(self, name: str) -> tuple[int | None, bool, bool]:
        """Return the operation that saves a parked request, if one does; whether it is saved, and
        whether that failed in part.
        """

    def fork(self, name: str, of: str, tokens: Sequence[int]) -> None:
        """Let the next admission of a name go on from where another request is."""

    def unpark(self, name: str) -> None:
        """Give up what a parked request keeps."""

    def prefetch(self, name: str, tokens: Sequence[int], namespace: bytes) -> int | None:
        """Bring what storage has to the host: from which block on; None if there is none to ask
        for.
        """

    def prefetched(self, name: str) -> int | None:
        """Return how many blocks a prefetch has brought; None while it goes on."""

    def asking(self, name: str) -> int:
        """Return the last operation of a prefetch."""

    def cancel(self, name: str) -> None:
        """End a prefetch."""

    def keys(self, tokens: Sequence[int], namespace: bytes) -> Sequence[bytes]:
        """Return the storage keys of the whole blocks of tokens."""

    def reset_but(self, keep: Sequence[bytes]) -> None:
        """Forget everything but what is published in some namespaces."""

    def tier_snapshot(self) -> TierSnapshot:
        """Return all that is kept below the device."""

    def wrong_result(self, copy: int, num_results: int) -> bool:
        """Give an operation a wrong number of results; True if that is refused by type."""

    def early(self) -> tuple[int, int]:
        """Give a result to each operation that was not taken; return their number, and how many
        were believed.
        """

    def park_misuse(self, name: str) -> bool:
        """Use what a parked request kept once more; True if that is refused by type."""


TierFactory: TypeAlias = Callable[[dict[str, Any]], Any]
"""Makes an adapter from a configuration: ``num_blocks``, ``block_size``, ``host_blocks``, ``write``
(``"exclusive"``, ``"back"`` or ``"through"``), ``hits`` and ``storage`` (0 or 1)."""

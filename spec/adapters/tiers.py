"""Protocol of a cache manager under test that has a host tier and storage."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias

from .cache import Events, Manager

CopyKind: TypeAlias = Literal["out", "in", "store", "fetch", "lookup", "fork"]
"""Device to host, host to device, host to storage, storage to host, lookup in storage, device to
device."""

Prefix: TypeAlias = tuple[bytes, tuple[int, ...]]
"""Namespace and all tokens up to the end of a block."""


@dataclass(frozen=True, slots=True)
class Copy:
    """An operation that the manager requests.

    ``sources`` and ``destinations`` are block ids of their tiers, ``keys`` are storage keys; those
    that a kind does not have are empty.
    """

    id: int
    kind: CopyKind
    sources: tuple[int, ...]
    destinations: tuple[int, ...]
    keys: tuple[bytes, ...]

    @property
    def num_blocks(self) -> int:
        """Number of results of the operation."""
        return max(len(self.sources), len(self.destinations), len(self.keys))


@dataclass(frozen=True)
class TierSnapshot:
    """The state of the tiers below the device.

    Attributes:
        free: block ids in the host's pool.
        host: host block of each prefix that can be found on the host.
        offloading: host block of each prefix that is being written.
        promoting: prefixes in flight to the device that were moved, not copied.
        idle: host blocks that can be dropped, in eviction order.
        counts: reported counters, by name.
    """

    free: Sequence[int]
    host: dict[Prefix, int]
    offloading: dict[Prefix, int]
    promoting: set[Prefix]
    idle: Sequence[int]
    counts: Mapping[str, int] = field(default_factory=dict)


class TierEvents(Events, Protocol):
    """Receives the additional events of a manager with tiers."""

    def ends(self, name: str) -> None:
        """The lease of a request begins to end; blocks freed until `ended` belong to it."""

    def ended(self, name: str) -> None:
        """The lease of a request has ended."""

    def forgotten(self, name: str) -> None:
        """A reset dropped the shared blocks of an operation that continues without its request."""

    def host_allocated(self, blocks: Sequence[int]) -> None:
        """Free host blocks were allocated."""

    def host_freed(self, blocks: Sequence[int]) -> None:
        """Host blocks became free."""


class TierManager(Manager, Protocol):
    """A cache manager with tiers. A parked request keeps its name.

    If a request ends while an operation loads its blocks, the operation owns them from then on and
    is reported as ``"op 5"``.
    """

    def take(self) -> Sequence[Copy]:
        """Return the operations requested since the last call."""

    def take_cancelled(self) -> Sequence[int]:
        """Return the ids of taken operations that were cancelled."""

    def used(self) -> Sequence[bytes]:
        """Return the storage keys used since the last call, to refresh their recency."""

    def complete(self, copy: int, ok: Sequence[bool | None], fenced: bool) -> bool:
        """Report the result of an operation; False if it has one already.

        A lookup that storage has not answered has the result None for each block. It is a miss,
        but what was known of storage stays known.
        """

    def fence(self, copy: int) -> bool:
        """Report that an operation can no longer touch its blocks; False if that is known."""

    def tier_match(self, tokens: Sequence[int], namespace: bytes) -> tuple[int, int]:
        """Return the number of blocks hit on the device, and of those that follow on the host."""

    def loading(self, name: str) -> int | None:
        """Return the operation that loads a request, or None."""

    def ready(self, name: str) -> int:
        """Return the number of tokens of a request that need not be computed."""

    def promoted(self, name: str) -> int:
        """Return the number of blocks that the last admission of a request loads from the host."""

    def park(self, name: str, tokens: Sequence[int], where: str) -> bool:
        """Preempt a request and keep its KV; False if there is no room. ``admit`` resumes it."""

    def parked(self, name: str) -> tuple[int | None, bool, bool]:
        """Return the operation that saves a parked request (or None), whether it is saved, and
        whether saving failed in part.
        """

    def fork(self, name: str, of: str, tokens: Sequence[int]) -> None:
        """Let the next admission of ``name`` continue from the state of request ``of``."""

    def unpark(self, name: str) -> None:
        """Drop the saved KV of a parked request."""

    def prefetch(self, name: str, tokens: Sequence[int], namespace: bytes) -> int | None:
        """Fetch blocks from storage to the host; return the index of the first one, or None if all
        are cached.
        """

    def prefetched(self, name: str) -> int | None:
        """Return the number of blocks that a prefetch has fetched; None while it is in flight."""

    def asking(self, name: str) -> int:
        """Return the latest operation of a prefetch."""

    def cancel(self, name: str) -> None:
        """Cancel a prefetch."""

    def keys(self, tokens: Sequence[int], namespace: bytes) -> Sequence[bytes]:
        """Return the storage keys of the whole blocks of ``tokens``."""

    def reset_but(self, keep: Sequence[bytes]) -> None:
        """Drop everything except the published blocks of the namespaces ``keep``."""

    def tier_snapshot(self) -> TierSnapshot:
        """Return the state of the tiers below the device."""

    def wrong_result(self, copy: int, num_results: int) -> bool:
        """Report a wrong number of results; True if that raises the right error."""

    def early(self) -> tuple[int, int]:
        """Report a result of each operation that was not taken; return their number, and how many
        results were accepted.
        """

    def park_misuse(self, name: str) -> bool:
        """Use a parked request a second time; True if that raises the right error."""


TierFactory: TypeAlias = Callable[[dict[str, Any]], Any]
"""Makes an adapter from a configuration: ``num_blocks``, ``block_size``, ``host_blocks``, ``write``
(``"exclusive"``, ``"back"`` or ``"through"``), ``hits`` and ``storage`` (0 or 1).

The adapter may also have ``most_told() -> int``: of storage, its KV events name at most so many
blocks, those that the manager learned of last. Without it, they name all that it knows of.
"""

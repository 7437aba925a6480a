"""Leases of requests: how blocks are reserved, published and released."""

from __future__ import annotations

from typing import Protocol

from ...kvcache import CacheManager, Lease, Match
from ..request import Request, lease_of


class Leases(Protocol):
    """The owner of the blocks of requests.

    Mixed and decode schedulers use their cache manager (`ManagerLeases`). On a prefill node the
    hand-offs own the blocks.
    """

    def reserve(self, request: Request, match: Match) -> Lease:
        """Pin the blocks of a match, and reserve the rest."""

    def is_ready(self, request: Request) -> bool:
        """Tell whether a request that holds blocks can be computed."""

    def publish(self, request: Request) -> None:
        """Publish the blocks that a request has computed, unless the hand-off publishes them."""

    def release(self, request: Request) -> None:
        """Release the blocks of a request, if it holds any."""


class ManagerLeases:
    """Leases straight from a cache manager."""

    def __init__(self, manager: CacheManager, prefix_cache: bool) -> None:
        self._manager = manager
        self._prefix_cache = prefix_cache

    def reserve(self, request: Request, match: Match) -> Lease:
        """See `Leases`."""
        return self._manager.admit(match, request.parked)

    def is_ready(self, request: Request) -> bool:
        """See `Leases`."""
        return lease_of(request).loading is None

    def publish(self, request: Request) -> None:
        """See `Leases`."""
        if self._prefix_cache:
            self._manager.publish(lease_of(request), request.tokens[: request.num_computed])

    def release(self, request: Request) -> None:
        """See `Leases`."""
        if request.lease is not None:
            self._manager.release(request.lease)
            request.lease = None

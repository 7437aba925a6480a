"""Transfers of requests in the host and storage tiers: prefetches, copies in flight, parked KV."""

from __future__ import annotations

from dataclasses import replace

from ...kvcache import CacheManager, Prefetch, Tiers
from ..request import Request, lease_of
from ..step_plan import SchedulerStats


class RequestTransfers:
    """Prefetches the KV of waiting requests, and tells which requests must wait for a copy.

    Nothing here blocks. The manager learns of completions between two steps; until then the
    scheduler passes over a request that needs the copy.

    Attributes:
        tiers: tiers of the manager.
    """

    def __init__(self, manager: CacheManager, tiers: Tiers, stats: SchedulerStats) -> None:
        self.tiers = tiers
        self._manager = manager
        self._stats = stats
        # Prefetches in flight, by namespace and tokens up to the first block they fetch.
        self._fetching: dict[tuple[bytes, bytes], Prefetch] = {}
        # Blocks prefetched for requests that wait, by request id.
        self._ahead: dict[str, int] = {}
        # The latest prefetch that replaces blocks the host has dropped again.
        self._again: Prefetch | None = None

    @property
    def is_busy(self) -> bool:
        """Whether any copy is in flight."""
        return self.tiers.num_open_operations > 0

    # Before a request has blocks

    def prefetch(self, request: Request) -> None:
        """Prefetch from storage what the cache lacks of a request, as far as hits are allowed.

        If another request already fetches the same block, this one waits for that prefetch: many
        requests with a common prefix fetch it once. Requests that have not begun prefetch at most
        as many blocks as the host holds, because the last prefetch would drop what the first ones
        need. A prefetch over that limit is put off until the request could be admitted. The limit
        does not apply to a parked request.
        """
        request.prefetch_is_put_off = False
        request.fetches_after = None
        if self.tiers.storage is None:
            return
        self._fetching = {path: one for path, one in self._fetching.items() if not one.done}
        tokens = request.tokens[: request.max_hit_tokens]
        match = self._manager.match(tokens, request.namespace)
        first = match.num_blocks + match.num_host_blocks
        wanted = tokens[: (first + 1) * self._manager.block_size].tobytes()
        path = request.namespace, wanted
        request.fetches_after = self._fetching.get(path)
        if request.fetches_after is not None:
            return
        num_blocks = len(tokens) // self._manager.block_size - first
        ahead = 0 if request.parked is not None else sum(self._ahead.values())
        if ahead and ahead + num_blocks > self.tiers.config.num_blocks:
            request.prefetch_is_put_off = True
            self._stats.prefetches_put_off += 1
            return
        request.prefetch = self.tiers.prefetch(tokens, request.namespace)
        if request.prefetch is not None:
            self._fetching[path] = request.prefetch
            self._ahead[request.request_id] = num_blocks

    def is_held_up(self, request: Request) -> bool:
        """Tell whether a request cannot be admitted before a copy has ended."""
        follows = request.fetches_after is not None and request.fetches_after.done
        if follows or request.prefetch_is_put_off:
            self.prefetch(request)
        fetching = request.prefetch is not None and not request.prefetch.done
        saving = request.parked is not None and not request.parked.saved
        return fetching or saving or request.fetches_after is not None

    def fetch_parked(self, request: Request) -> bool:
        """Prefetch the KV that a request parked in storage, where the host has dropped it.

        Call it only when the request could be admitted, because the host may drop again what is
        fetched too early. Such blocks are fetched again, for one request at a time: two requests
        might drop each other's blocks forever.

        Returns:
            Whether the request must wait.
        """
        parked, again = request.parked, request.prefetch is not None
        if parked is None or parked.where != "storage" or (again and not _is_lost(request)):
            return False
        if again and self._again is not None and not self._again.done:
            return True
        self.prefetch(request)
        if again:
            self._again = request.prefetch
        return self.is_held_up(request)

    def forget(self, request: Request) -> None:
        """Cancel the prefetch of a request and drop its parked KV."""
        if request.prefetch is not None:
            self.tiers.cancel(request.prefetch)
        self.drop_prefetch(request)
        request.prefetch_is_put_off = False
        if request.parked is not None:
            self.tiers.unpark(request.parked)
            request.parked = None

    def drop_prefetch(self, request: Request) -> None:
        """Detach a request from its prefetch, which continues."""
        self._ahead.pop(request.request_id, None)
        request.prefetch = request.fetches_after = None

    # When it begins to compute

    def admits(self, request: Request) -> None:
        """Let others prefetch in place of a request that waits no more, even if its own is late."""
        self._ahead.pop(request.request_id, None)
        request.fetches_after = None
        if request.prefetch is not None and not request.prefetch.done:
            request.prefetch = None

    def count_hits(self, request: Request, num_hit: int) -> None:
        """Count which of the first num_hit tokens came from the host, and which from storage.

        ::

            prompt  | device | host | by its prefetch | computed |
        """
        self.admits(request)
        prefetch, block_size = request.prefetch, self._manager.block_size
        on_device = min(lease_of(request).num_hit_blocks * block_size, num_hit)
        below, storage = num_hit - on_device, 0
        if prefetch is not None:
            first = max(prefetch.first_block * block_size, on_device)
            last = (prefetch.first_block + prefetch.num_blocks) * block_size
            storage = max(min(num_hit, last) - first, 0)
        request.num_host_hit_tokens, request.num_storage_hit_tokens = below - storage, storage
        self._stats.host_hit_tokens += below - storage
        self._stats.storage_hit_tokens += storage

    def rename_weights(self, weights_revision: str) -> None:
        """Use the storage keys of other weights from now on, if there is storage."""
        if self.tiers.storage is not None:
            self.tiers.storage = replace(self.tiers.storage, weights_revision=weights_revision)


def _is_lost(request: Request) -> bool:
    """Tell whether the host has dropped blocks that were fetched for a request, or their prefix."""
    fetched, match = request.prefetch, request.match
    assert fetched is not None and match is not None, f"{request!r} has fetched nothing"
    return match.num_blocks + match.num_host_blocks < fetched.first_block + fetched.num_blocks

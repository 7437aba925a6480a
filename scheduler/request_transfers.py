"""What requests have below the device: prefetches, copies on their way, and what they parked."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ..kvcache import (
    CacheManager,
    Prefetch,
    Tiers,
)
from ..kvcache.prefix.lease import count_held
from .errors import ConfigError
from .preemption import PREEMPT_MODES, PreemptMode
from .request import Request, lease_of
from .step_plan import SchedulerStats


class RequestTransfers:
    """The part of a scheduler that deals with the tiers of its manager.

    Nothing here waits. A copy ends when the manager is told so, between two steps; until then the
    request that needs it is passed over.
    """

    def __init__(
        self, manager: CacheManager, tiers: Tiers, preempt: PreemptMode, stats: SchedulerStats
    ) -> None:
        self._manager = manager
        self._tiers = tiers
        self._preempt = preempt
        self._stats = stats
        self._fetching: dict[tuple[bytes, bytes], Prefetch] = {}  # by the first path they ask for
        self._ahead: dict[str, int] = {}  # blocks that were asked for, by who has yet to begin
        self._again: Prefetch | None = None  # the last of what the host had dropped again

    @property
    def is_busy(self) -> bool:
        """Whether any copy has not ended."""
        return self._tiers.num_open_operations > 0

    # Before a request has blocks

    def prefetch(self, request: Request) -> None:
        """Ask storage, if there is one, for what the cache lacks of a request.

        If another has asked for the same block first, its answer is waited for: many requests with
        one prefix fetch it once. What those who have yet to begin have asked for is no more than
        the host holds: the last to come would drop what the first wait for. One that is put off
        asks when it would be admitted, if it can then. A parked one comes before them all.
        """
        request.prefetch_is_put_off = False
        if self._tiers.storage is None:
            return
        self._fetching = {path: one for path, one in self._fetching.items() if not one.done}
        match = self._manager.match(request.tokens, request.namespace)
        first = match.num_blocks + match.num_host_blocks
        wanted = request.tokens[: (first + 1) * self._manager.block_size].tobytes()
        path = request.namespace, wanted
        request.fetches_after = self._fetching.get(path)
        if request.fetches_after is not None:
            return
        num_blocks = len(request.tokens) // self._manager.block_size - first
        ahead = 0 if request.parked is not None else sum(self._ahead.values())
        if ahead and ahead + num_blocks > self._tiers.config.num_blocks:
            request.prefetch_is_put_off = True
            self._stats.prefetches_put_off += 1
            return
        request.prefetch = self._tiers.prefetch(request.tokens, request.namespace)
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
        """Ask storage for what a request parked there has no more on the host.

        Only when it could be admitted: the host may drop again what comes too early. If it does,
        that is asked for again, for one request at a time: two might drop each other's for ever.

        Returns:
            Whether there is something to wait for.
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
        """Give up what a request has below the device."""
        self._ahead.pop(request.request_id, None)
        request.fetches_after, request.prefetch_is_put_off = None, False
        if request.prefetch is not None:
            self._tiers.cancel(request.prefetch)
            request.prefetch = None
        if request.parked is not None:
            self._tiers.unpark(request.parked)
            request.parked = None

    # When it begins to compute

    def count_hits(self, request: Request, num_hit: int) -> None:
        """Count from where its first num_hit tokens came that were not on the device.

        ::

            prompt  | device | host | by its prefetch | computed |
        """
        assert request.lease is not None, f"{request!r} begins without a lease"
        self._ahead.pop(request.request_id, None)
        prefetch, block_size = request.prefetch, self._manager.block_size
        on_device = min(request.lease.num_hit_blocks * block_size, num_hit)
        below, storage = num_hit - on_device, 0
        if prefetch is not None:
            first = max(prefetch.first_block * block_size, on_device)
            last = (prefetch.first_block + prefetch.num_blocks) * block_size
            storage = max(min(num_hit, last) - first, 0)
        request.num_host_hit_tokens, request.num_storage_hit_tokens = below - storage, storage
        self._stats.host_hit_tokens += below - storage
        self._stats.storage_hit_tokens += storage

    # When blocks are short

    def park(self, victim: Request) -> None:
        """Keep the KV of a request that is preempted, if that is the policy and there is room.

        Its lease is given up then: it ends when the copy has been made.
        """
        self._ahead.pop(victim.request_id, None)
        victim.prefetch = victim.fetches_after = None  # parked in storage, it asks once more
        if self._preempt == "recompute" or victim.num_computed == 0:
            return
        assert victim.lease is not None, f"{victim!r} is preempted without a lease"
        computed = victim.tokens[: victim.num_computed]
        victim.parked = self._tiers.park(victim.lease, computed, self._preempt)
        if victim.parked is not None:
            victim.lease = None
            self._stats.parked += 1

    def will_have(self, needed: int, running: Iterable[Request]) -> bool:
        """Tell whether blocks that are being copied will do, with those that are available.

        Whatever is neither available nor held by a request that runs comes free with a copy: of a
        request that is parked, or into one that was aborted.
        """
        held = count_held(map(lease_of, running))
        return needed <= self._manager.num_blocks - held

    # As a whole

    def rename_weights(self, weights_revision: str) -> None:
        """Read and write other keys in storage from now on, if there is one."""
        if self._tiers.storage is not None:
            self._tiers.storage = replace(self._tiers.storage, weights_revision=weights_revision)


def _is_lost(request: Request) -> bool:
    """Whether the host has dropped what was fetched for a request, or what that follows."""
    fetched, match = request.prefetch, request.match
    assert fetched is not None and match is not None, f"{request!r} has fetched nothing"
    return match.num_blocks + match.num_host_blocks < fetched.first_block + fetched.num_blocks


def make_request_transfers(
    manager: CacheManager, preempt: PreemptMode, prefix_cache: bool, stats: SchedulerStats
) -> RequestTransfers | None:
    """Return what deals with the tiers of a manager; None if it has none.

    Raises:
        ConfigError: if there is no such policy of preemption, or it cannot be followed.
    """
    if preempt not in PREEMPT_MODES:
        raise ConfigError(f"preempt must be one of {PREEMPT_MODES}, got {preempt!r}")
    tiers = manager.tiers
    if preempt != "recompute":
        if tiers is None or (preempt == "storage" and tiers.storage is None):
            raise ConfigError(f"preempt={preempt!r} needs a {preempt} tier")
        if not prefix_cache:
            raise ConfigError(f"preempt={preempt!r} keeps KV in the prefix cache, which is off")
    if tiers is None or not prefix_cache:
        return None
    return RequestTransfers(manager, tiers, preempt, stats)

"""The requests of a scheduler that have not ended: in which queue each is, and what it holds."""

from __future__ import annotations

from bisect import insort
from collections.abc import Collection, Sequence
from dataclasses import replace

from ..kvcache import CacheManager, RequestTooLargeError
from ..kvcache.tokens import check_namespaces
from .errors import RequestError, StepOrderError
from .policy import Policy
from .request import (
    FinishReason,
    Request,
    RequestStatus,
)
from .request_transfers import RequestTransfers
from .step_plan import SchedulerStats, StepPlan


class RequestQueues:
    """Requests come in, and leave from any state; whatever one holds goes with it."""

    def __init__(
        self,
        manager: CacheManager,
        policy: Policy,
        tiers: RequestTransfers | None,
        stats: SchedulerStats,
    ) -> None:
        self.manager = manager
        self.policy = policy
        self._tiers = tiers
        self._stats = stats
        self._running: list[Request] = []
        self._parked: list[Request] = []
        self._waiting: list[Request] = []
        self._requests: dict[str, Request] = {}
        self._in_flight: StepPlan | None = None
        self._arrivals = 0

    @property
    def has_work(self) -> bool:
        """Whether any request has yet to end."""
        return bool(self._requests)

    @property
    def running(self) -> Sequence[Request]:
        """Requests that hold blocks, in order of admission; some may be loading still."""
        return tuple(self._running)

    @property
    def waiting(self) -> Sequence[Request]:
        """Requests that hold none, in the order they will be tried: preempted ones first."""
        return (*self._parked, *self._waiting)

    def _add(self, request: Request) -> None:
        """See `MixedScheduler.add`."""
        if request.request_id in self._requests:
            raise RequestError(f"request {request.request_id!r} is live already")
        if request.status is not RequestStatus.WAITING or request.output_tokens:
            raise RequestError(f"request {request.request_id!r} was added before")
        self._require_fit(request)
        self._arrive(request)
        self._requests[request.request_id] = request
        insort(self._waiting, request, key=self.policy.order)
        if self._tiers is not None:
            self._tiers.prefetch(request)

    def _require_fit(self, request: Request) -> None:
        block_size, num_blocks = self.manager.block_size, self.manager.num_blocks
        needed = -(-request.max_kv_tokens // block_size)
        if needed > num_blocks:
            raise RequestTooLargeError(request.max_kv_tokens, needed, num_blocks)

    def _arrive(self, request: Request) -> None:
        request.arrival = self._arrivals
        self._arrivals += 1

    def abort(self, request_id: str) -> bool:
        """End a request in any state; False if no live one has this id.

        In the middle of a step, its blocks come free with the `update` of that step. Blocks that
        are being copied for it come free when that has ended.
        """
        request = self._requests.get(request_id)
        if request is None:
            return False
        queue = {
            RequestStatus.LOADING: self._running,
            RequestStatus.RUNNING: self._running,
            RequestStatus.PREEMPTED: self._parked,
            RequestStatus.WAITING: self._waiting,
        }[request.status]
        queue.remove(request)
        in_flight = self._in_flight.chunks if self._in_flight is not None else ()
        held_by_step = any(chunk.request is request for chunk in in_flight)
        self._end(request, "abort", keep_lease=held_by_step)
        return True

    def _end(self, request: Request, reason: FinishReason, keep_lease: bool = False) -> None:
        request.status = RequestStatus.ABORTED if reason == "abort" else RequestStatus.FINISHED
        request.finish_reason = reason
        request.match = None
        del self._requests[request.request_id]
        if self._tiers is not None:
            self._tiers.forget(request)
        if not keep_lease:
            self._release(request)

    def _release(self, request: Request) -> None:
        if request.lease is not None:
            self.manager.release(request.lease)
            request.lease = None

    def _suspend(self, victim: Request) -> None:
        """Queue a request that ran, without what it still holds."""
        self._release(victim)
        victim.status = RequestStatus.PREEMPTED
        victim.num_preemptions += 1
        victim.num_lost_tokens = max(victim.num_lost_tokens, victim.num_computed)
        victim.num_computed = 0
        victim.match = None
        insort(self._parked, victim, key=self.policy.order)
        self._stats.preemptions += 1

    def reset_cache(self, keep: Collection[bytes] = (), weights_revision: str = "") -> None:
        """Forget all KV, as the weights have changed; requests live on, and compute theirs again.

        Those that run are preempted. Abort first those that shall not go on with other weights.

        Args:
            keep: namespaces whose published KV stays.
            weights_revision: of the new weights, for the keys of what is stored; "": storage is
                used with the old keys.

        Raises:
            StepOrderError: in the middle of a step.
            NamespaceError: if keep is not a collection of bytes.
        """
        if self._in_flight is not None:
            raise StepOrderError("reset_cache was called before update")
        check_namespaces("keep", keep)
        lost, self._running = self._running, []
        for request in (*lost, *self.waiting):
            if self._tiers is not None:
                self._tiers.forget(request)
        for request in lost:
            self._suspend(request)
        self.manager.reset(keep)
        if self._tiers is not None:
            if weights_revision:
                self._tiers.rename_weights(weights_revision)
            for request in self._waiting:
                self._tiers.prefetch(request)

    def stats(self) -> SchedulerStats:
        """Return a copy of the counts."""
        return replace(self._stats)

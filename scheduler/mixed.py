"""The mixed scheduler: prefill and decode in one batch, under one token budget."""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ..kvcache import (
    CacheManager,
    Lease,
    Match,
    NextBlock,
    OutOfBlocksError,
    RequestTooLargeError,
)
from .errors import ConfigError, RequestError, StepOrderError
from .plan import Chunk, SchedulerStats, StepPlan
from .policy import Fcfs, Policy
from .request import FinishReason, Request, RequestStatus
from .reservation import Reservation


class MixedScheduler:
    """Decides, step by step, which tokens of which requests are computed.

    A step has `token_budget` tokens. Running requests come first: a token for each that decodes,
    then prefill chunks in order of admission, then new ones while the reservation allows (see
    `reservation`). A whole prompt gets its blocks at admission, or nothing. When blocks run out,
    the last in the policy's order is preempted: it gives up its blocks and is resumed, before new
    requests, by computing again what the cache has lost.

    Requests that need a block which another is about to compute wait for it, instead of
    computing it twice.

    It does no I/O and knows no clock: call `schedule`, run the plan, call `update`.
    """

    def __init__(
        self,
        manager: CacheManager,
        *,
        token_budget: int,
        max_running: int,
        policy: Policy | None = None,
        reserve_tokens: int | None = 512,
        prefix_cache: bool = True,
    ) -> None:
        """Make a scheduler over a manager that nobody else uses.

        Args:
            manager: holds the blocks.
            token_budget: tokens of a step, at least max_running.
            max_running: requests that hold blocks at a time.
            policy: order of admission and preemption; default `Fcfs`.
            reserve_tokens: horizon of the reservation; None: to the end of each request, so that
                none is ever preempted.
            prefix_cache: whether requests share blocks.

        Raises:
            ConfigError: for sizes that cannot work.
        """
        if not 1 <= max_running <= token_budget:
            raise ConfigError(
                f"max_running must be at least 1 and at most token_budget {token_budget}, "
                f"got {max_running}"
            )
        if reserve_tokens is not None and reserve_tokens < 0:
            raise ConfigError(f"reserve_tokens must be at least 0 or None, got {reserve_tokens}")
        self.manager = manager
        self.token_budget = token_budget
        self.max_running = max_running
        self.policy: Policy = Fcfs() if policy is None else policy
        self.reserve_tokens = reserve_tokens
        self.prefix_cache = prefix_cache
        self._stats = SchedulerStats()
        self._running: list[Request] = []
        self._parked: list[Request] = []
        self._waiting: list[Request] = []
        self._requests: dict[str, Request] = {}
        self._in_flight: StepPlan | None = None
        self._arrivals = 0

    # Requests in and out

    @property
    def has_work(self) -> bool:
        """Whether any request has yet to end."""
        return bool(self._requests)

    @property
    def running(self) -> Sequence[Request]:
        """Requests that hold blocks, in order of admission."""
        return tuple(self._running)

    @property
    def waiting(self) -> Sequence[Request]:
        """Requests that hold none, in the order they will be tried: preempted ones first."""
        return (*self._parked, *self._waiting)

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            RequestError: if it was added before, or a live one has its id.
            RequestTooLargeError: if it could not run to its limit even alone.
        """
        if request.request_id in self._requests:
            raise RequestError(f"request {request.request_id!r} is live already")
        if request.status is not RequestStatus.WAITING or request.output_tokens:
            raise RequestError(f"request {request.request_id!r} was added before")
        block_size, num_blocks = self.manager.block_size, self.manager.num_blocks
        needed = -(-request.max_kv_tokens // block_size)
        if needed > num_blocks:
            raise RequestTooLargeError(request.max_kv_tokens, needed, num_blocks)
        request.arrival = self._arrivals
        self._arrivals += 1
        self._requests[request.request_id] = request
        insort(self._waiting, request, key=self.policy.order)

    def abort(self, request_id: str) -> bool:
        """End a request in any state; False if no live one has this id.

        In the middle of a step, its blocks come free with the `update` of that step.
        """
        request = self._requests.get(request_id)
        if request is None:
            return False
        queue = {
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
        if not keep_lease:
            self._release(request)

    def _release(self, request: Request) -> None:
        if request.lease is not None:
            self.manager.release(request.lease)
            request.lease = None

    # A step

    def schedule(self) -> StepPlan:
        """Plan the next step; the plan is empty only if there is no work.

        Raises:
            StepOrderError: if the plan before was not updated.
        """
        if self._in_flight is not None:
            raise StepOrderError("schedule was called again before update")
        plan = StepPlan()
        self._plan_decode(plan)
        for request in self._running:
            if request.is_prefilling:
                self._plan_prefill(plan, request)
        if not plan.preempted:
            self._admit(plan)
        self._stats.steps += bool(plan.chunks)
        self._in_flight = plan if plan.chunks else None
        assert plan.chunks or not self.has_work, "there is work, but nothing can be scheduled"
        return plan

    def _plan_decode(self, plan: StepPlan) -> None:
        """Plan a token for every request that decodes, preempting as long as blocks are short."""
        while True:
            decoding = [request for request in self._running if not request.is_prefilling]
            rows = np.fromiter((r.lease.row for r in decoding if r.lease), np.int32, len(decoding))
            try:
                self.manager.extend_batch(rows)
                break
            except OutOfBlocksError:
                self._preempt(plan)
        for request in decoding:
            plan.add(Chunk(request, request.num_computed, 1))
        plan.num_decode = len(decoding)
        self._stats.decode_tokens += len(decoding)

    def _preempt(self, plan: StepPlan) -> None:
        victim = max(self._running, key=self.policy.order)
        assert len(self._running) > 1, f"{victim!r} does not fit alone"
        self._running.remove(victim)
        self._release(victim)
        victim.status = RequestStatus.PREEMPTED
        victim.num_preemptions += 1
        victim.num_lost_tokens = max(victim.num_lost_tokens, victim.num_computed)
        victim.num_computed = 0
        victim.match = None
        insort(self._parked, victim, key=self.policy.order)
        plan.preempted.append(victim)
        self._stats.preemptions += 1

    def _plan_prefill(self, plan: StepPlan, request: Request) -> None:
        """Plan as much of a prompt as the budget leaves."""
        start = request.num_computed
        length = min(request.num_tokens - start, self.token_budget - plan.num_tokens)
        if length > 0:
            plan.add(Chunk(request, start, length))
            self._stats.prefill_tokens += length
            lost = min(start + length, request.num_lost_tokens) - start
            self._stats.recomputed_tokens += max(lost, 0)

    def _admit(self, plan: StepPlan) -> None:
        """Admit requests in order while slots, budget and blocks last: parked ones first."""
        if not (self._parked or self._waiting):
            return
        reservation = Reservation(self._running, self.manager.block_size, self.reserve_tokens)
        in_progress = {self._next_block(request) for request in self._running} - {None}
        for queue in (self._parked, self._waiting):
            place = 0
            while place < len(queue):
                if len(self._running) == self.max_running or plan.num_tokens == self.token_budget:
                    return
                request = queue[place]
                if self._must_wait(request, in_progress):
                    place += 1
                    continue
                match = request.match
                assert match is not None, "a request is admitted without a match"
                available = self.manager.available_after(match)
                if not reservation.allows(request, match.num_blocks, available):
                    return
                del queue[place]
                lease = self._start(plan, request, match)
                private = lease.num_blocks - lease.num_shared_blocks
                reservation.add(request, lease.num_blocks, private)
                in_progress |= {self._next_block(request)} - {None}
            if queue:
                return  # nobody new while a preempted request waits

    def _must_wait(self, request: Request, in_progress: set[NextBlock | None]) -> bool:
        """Match a request; tell whether another is about to compute the block it needs next."""
        # Matched anew each time: what follows an older match may be another prefix by now, as the
        # node where it ended has grown.
        match = request.match = self.manager.match(request.tokens, request.namespace)
        waits = match.next_block in in_progress
        self._stats.waits_for_leader += waits
        return waits

    def _start(self, plan: StepPlan, request: Request, match: Match) -> Lease:
        """Give a request its blocks and plan its first chunk."""
        lease = request.lease = self.manager.admit(match)
        request.match = None
        # The last token is computed even if it hit: its logits are wanted.
        hit_tokens = min(match.num_tokens, request.num_tokens - 1)
        if request.status is RequestStatus.WAITING:
            request.num_hit_tokens = match.num_tokens
            self._stats.admitted += 1
            self._stats.hit_tokens += hit_tokens
        else:
            self._stats.resumed += 1
            self._stats.resumed_hit_tokens += hit_tokens
        request.status = RequestStatus.RUNNING
        request.num_computed = hit_tokens
        request.num_prefill_tokens = request.num_tokens
        self._running.append(request)
        plan.admitted.append(request)
        self._plan_prefill(plan, request)
        return lease

    def _next_block(self, request: Request) -> NextBlock | None:
        """Identify the block that a prefilling request is about to compute and publish."""
        if not (self.prefix_cache and request.is_prefilling):
            return None
        assert request.lease is not None, f"{request!r} runs without a lease"
        return self.manager.next_block(request.lease, request.tokens)

    def update(self, plan: StepPlan, next_tokens: Sequence[int]) -> list[Request]:
        """Take in the results of the last plan: publish, add tokens, end requests.

        Args:
            plan: the plan that `schedule` returned last.
            next_tokens: the token sampled after each chunk; used where the chunk was the last
                one of its request.

        Returns:
            The requests that ended in this step.

        Raises:
            StepOrderError: for another plan, or results that are not one per chunk.
        """
        if plan is not self._in_flight:
            raise StepOrderError("update was called with a plan that is not in flight")
        if len(next_tokens) != len(plan.chunks):
            raise StepOrderError(
                f"update got {len(next_tokens)} tokens for {len(plan.chunks)} chunks"
            )
        self._in_flight = None
        finished = []
        for chunk, token in zip(plan.chunks, next_tokens, strict=True):
            request = chunk.request
            if request.status is not RequestStatus.RUNNING:  # aborted during the step
                self._release(request)
                continue
            request.num_computed = chunk.start + chunk.length
            self._publish(request)
            if request.num_computed == request.num_tokens:
                reason = request.append(int(token))
                if reason is not None:
                    self._running.remove(request)
                    self._end(request, reason)
                    finished.append(request)
        return finished

    def _publish(self, request: Request) -> None:
        lease = request.lease
        assert lease is not None, f"{request!r} was computed without a lease"
        published = lease.num_shared_blocks * self.manager.block_size
        if self.prefix_cache and request.num_computed - published >= self.manager.block_size:
            self.manager.publish(lease, request.tokens[: request.num_computed])

    def stats(self) -> SchedulerStats:
        """Return a copy of the counts."""
        return replace(self._stats)

"""What all schedulers share: prefill and decode in one batch, under one token budget."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..kvcache import (
    CacheManager,
    Lease,
    Match,
    NextBlock,
    OutOfBlocksError,
)
from ..kvcache.tokens import as_count
from .errors import ConfigError, StepOrderError
from .policy import Policy, as_policy
from .preemption import PreemptMode
from .request import Request, RequestStatus
from .request_queues import RequestQueues
from .request_transfers import make_request_transfers
from .reservation import Reservation
from .step_plan import (
    Chunk,
    SchedulerStats,
    StepPlan,
)


class BatchScheduler(RequestQueues):
    """Decides, step by step, which tokens of which requests are computed.

    The base of `MixedScheduler`, `PrefillScheduler` and `DecodeScheduler`, which differ in where
    requests come from, what they hold, and what others hold beside them.
    """

    def __init__(
        self,
        manager: CacheManager,
        *,
        token_budget: int,
        max_running: int,
        policy: Policy | None,
        reserve_tokens: int | None,
        prefix_cache: bool,
        preempt: PreemptMode,
    ) -> None:
        """Make a scheduler; see `MixedScheduler`."""
        token_budget = as_count("token_budget", token_budget, minimum=1)
        max_running = as_count("max_running", max_running, minimum=1)
        if max_running > token_budget:
            raise ConfigError(
                f"max_running must be at most token_budget {token_budget}, got {max_running}"
            )
        if reserve_tokens is not None:
            reserve_tokens = as_count("reserve_tokens", reserve_tokens)
        stats = SchedulerStats()
        tiers = make_request_transfers(manager, preempt, prefix_cache, stats)
        super().__init__(manager, as_policy(policy), tiers, stats)
        self.token_budget = token_budget
        self.max_running = max_running
        self.reserve_tokens = reserve_tokens
        self.prefix_cache = prefix_cache
        self.preempt = preempt
        self._may_load = self._tiers is not None

    # Where a role differs

    def _receiving(self) -> list[Request]:
        """Requests that hold blocks, cannot be preempted, and will run."""
        return []

    def _fenced_off(self) -> list[Request]:
        """Requests that hold blocks, and will not run."""
        return []

    def _waits_for_others(self) -> bool:
        """Whether something may happen without a step after which there is more to do."""
        return self._tiers is not None and self._tiers.is_busy

    def _take_blocks(self, request: Request, match: Match) -> Lease:
        """Pin what was matched, and reserve the rest."""
        return self.manager.admit(match, request.parked)

    def _may_begin(self, request: Request) -> bool:
        """Whether a request that has blocks can be computed."""
        return request.lease is not None and request.lease.loading is None

    # A step

    def schedule(self) -> StepPlan:
        """Plan the next step; it is empty only if there is no work, or all of it waits for copies.

        An empty plan is not updated: call again when a copy has ended.

        Raises:
            StepOrderError: if the plan before was not updated.
        """
        if self._in_flight is not None:
            raise StepOrderError("schedule was called again before update")
        plan = StepPlan()
        if self._may_load:
            self._begin_loaded()
        self._plan_decode(plan)
        for request in self._running:
            if request.is_prefilling:
                self._plan_prefill(plan, request)
        if not plan.preempted:
            self._admit(plan)
        self._stats.steps += bool(plan.chunks)
        self._in_flight = plan if plan.chunks else None
        assert plan.chunks or not self.has_work or self._waits_for_others(), (
            "there is work, but nothing can be scheduled"
        )
        return plan

    def _plan_decode(self, plan: StepPlan) -> None:
        """Plan a token for every request that decodes, preempting as long as blocks are short."""
        held_up: set[Request] = set()
        while True:
            decoding = [
                request
                for request in self._running
                if not request.is_prefilling and request not in held_up
            ]
            if not decoding:
                break
            rows = np.fromiter((r.lease.row for r in decoding if r.lease), np.int32, len(decoding))
            try:
                self.manager.extend_batch(rows)
                break
            except OutOfBlocksError as short:
                if self._tiers is None or not self._tiers.will_have(short.needed, self._holders()):
                    self._preempt(plan)
                else:
                    held_up = self._last_to_grow(decoding, short.needed - short.available)
        for request in decoding:
            plan.add(Chunk(request, request.num_computed, 1))
        plan.num_decode = len(decoding)
        self._stats.decode_tokens += len(decoding)

    def _holders(self) -> list[Request]:
        return [*self._running, *self._receiving(), *self._fenced_off()]

    def _last_to_grow(self, decoding: Sequence[Request], count: int) -> set[Request]:
        """Choose count requests that need a block and wait for one: the policy's last."""
        block_size = self.manager.block_size
        growing = [request for request in decoding if request.num_computed % block_size == 0]
        growing.sort(key=self.policy.order)
        self._stats.waits_for_blocks += count
        return set(growing[-count:])

    def _preempt(self, plan: StepPlan) -> None:
        victim = max(self._running, key=self.policy.order)
        assert len(self._running) > 1, f"{victim!r} does not fit alone"
        self._running.remove(victim)
        if self._tiers is not None:
            self._tiers.park(victim)
        self._suspend(victim)
        plan.preempted.append(victim)

    def _plan_prefill(self, plan: StepPlan, request: Request) -> None:
        """Plan as much of a prompt as the budget leaves."""
        if request.status is RequestStatus.LOADING:
            return
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
        reservation = self._reservation()
        num_receiving = len(self._receiving())
        in_progress = {self._next_block(request) for request in self._running} - {None}
        for queue in (self._parked, self._waiting):
            place = 0
            while place < len(queue):
                num_taken = len(self._running) + num_receiving
                if num_taken == self.max_running or plan.num_tokens == self.token_budget:
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
                if self._tiers is not None and self._tiers.fetch_parked(request):
                    place += 1
                    continue
                del queue[place]
                lease = self._start(plan, request, match)
                private = lease.num_blocks - lease.num_shared_blocks
                reservation.add(request, lease.num_blocks, private)
                in_progress |= {self._next_block(request)} - {None}
            if queue:
                return  # nobody new while a preempted request waits

    def _reservation(self) -> Reservation:
        """Count what must be kept for those that have been admitted."""
        return Reservation(
            self._running, self.manager.block_size, self.reserve_tokens, self._receiving()
        )

    def _must_wait(self, request: Request, in_progress: set[NextBlock | None]) -> bool:
        """Match a request; tell whether what it needs is on its way, or about to be computed."""
        if self._tiers is not None and self._tiers.is_held_up(request):
            return True
        # Matched anew each time: what follows an older match may be another prefix by now, as the
        # node where it ended has grown.
        match = request.match = self.manager.match(request.tokens, request.namespace)
        waits = match.next_block in in_progress
        self._stats.waits_for_leader += waits
        return waits

    def _start(self, plan: StepPlan, request: Request, match: Match) -> Lease:
        """Give a request its blocks, and plan its first chunk if nothing is copied into them."""
        lease = request.lease = self._take_blocks(request, match)
        request.match = None
        if request.status is not RequestStatus.WAITING:
            self._stats.resumed += 1
            self._stats.resumed_parked += request.parked is not None
            request.parked = None
        request.num_prefill_tokens = request.num_tokens
        self._running.append(request)
        plan.admitted.append(request)
        if self._may_begin(request):
            self._begin(request)
        else:
            request.status = RequestStatus.LOADING
        self._plan_prefill(plan, request)
        return lease

    def _begin_loaded(self) -> None:
        for request in self._running:
            if request.status is RequestStatus.LOADING and self._may_begin(request):
                self._begin(request)

    def _begin(self, request: Request) -> None:
        """Let a request compute on from what its blocks hold."""
        lease = request.lease
        assert lease is not None, f"{request!r} begins without a lease"
        # The last token is computed even if it hit: its logits are wanted.
        hit_tokens = min(lease.num_ready_tokens, request.num_tokens - 1)
        if not request.has_begun:
            request.has_begun = True
            self._stats.admitted += 1
            on_device = lease.num_hit_blocks * self.manager.block_size
            request.num_hit_tokens = on_device
            self._stats.hit_tokens += min(on_device, hit_tokens)
            if self._tiers is not None:
                self._tiers.count_hits(request, hit_tokens)
        else:
            self._stats.resumed_hit_tokens += hit_tokens
        request.status = RequestStatus.RUNNING
        request.num_computed = hit_tokens

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
        self._check_results(plan, next_tokens)
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

    def _check_results(self, plan: StepPlan, next_tokens: Sequence[int]) -> None:
        if plan is not self._in_flight:
            raise StepOrderError("update was called with a plan that is not in flight")
        if len(next_tokens) != len(plan.chunks):
            raise StepOrderError(
                f"update got {len(next_tokens)} tokens for {len(plan.chunks)} chunks"
            )

    def _publish(self, request: Request) -> None:
        lease = request.lease
        assert lease is not None, f"{request!r} was computed without a lease"
        published = lease.num_shared_blocks * self.manager.block_size
        if self.prefix_cache and request.num_computed - published >= self.manager.block_size:
            self.manager.publish(lease, request.tokens[: request.num_computed])

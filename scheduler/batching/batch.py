"""Continuous batching: prefill and decode tokens of many requests in one step, under a budget."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from ...kvcache import CacheManager, Lease, Match, NextBlock, OutOfBlocksError, RequestTooLargeError
from ...kvcache.tokens import as_count, check_namespaces
from ..errors import ConfigError, RequestError, StepOrderError
from ..policy import Policy, as_policy
from ..request import FinishReason, Request, RequestStatus, lease_of
from ..reservation import Reservation
from ..step_plan import BlockCopy, Chunk, SchedulerStats, StepPlan
from .leases import Leases, ManagerLeases
from .preemption import Preemption, PreemptMode, check_preempt_mode
from .queues import RequestQueues
from .transfers import RequestTransfers


class BatchScheduler:
    """Decides, step by step, which tokens of which requests are computed.

    The mixed, prefill and decode schedulers each hold one. They differ in where requests come from,
    who owns the blocks, and which blocks other requests hold.

    Attributes:
        queues: requests that have not ended.
        in_flight: plans that were scheduled and not yet updated, in order; at most `depth`.
        is_paused: admit no request.
    """

    def __init__(
        self,
        manager: CacheManager,
        *,
        token_budget: int,
        max_running: int,
        policy: Policy | None,
        reserve_tokens: int | None,
        prefix_cache: bool = True,
        preempt: PreemptMode = "recompute",
        depth: int = 1,
        leases: Leases | None = None,
        receiving: Callable[[], Sequence[Request]] = lambda: (),
        quarantined: Callable[[], Sequence[Request]] = lambda: (),
        has_handoffs: Callable[[], bool] = lambda: False,
    ) -> None:
        """Check the options; see `MixedScheduler` for those that are not described here.

        Args:
            leases: owner of the blocks; default: the manager.
            receiving: returns requests in no queue that hold blocks and will run here.
            quarantined: returns requests in no queue that hold blocks and will not run.
            has_handoffs: tells whether hand-offs hold blocks, and may release them without a step.
        """
        self.token_budget = as_count("token_budget", token_budget, minimum=1)
        self.max_running = as_count("max_running", max_running, minimum=1)
        if self.max_running > self.token_budget:
            raise ConfigError(
                f"max_running must be at most token_budget {token_budget}, got {max_running}"
            )
        if reserve_tokens is not None:
            reserve_tokens = as_count("reserve_tokens", reserve_tokens)
        check_preempt_mode(preempt, manager, prefix_cache)
        self.manager = manager
        self.reserve_tokens = reserve_tokens
        self.prefix_cache = prefix_cache
        self.preempt = preempt
        self.queues = RequestQueues(as_policy(policy))
        self.depth = as_count("depth", depth, minimum=1)
        self.in_flight: deque[StepPlan] = deque()
        self.is_paused = False
        self._last_reservation = 0, Reservation((), manager.block_size, reserve_tokens)
        self._stats = SchedulerStats()
        self._leases = leases if leases is not None else ManagerLeases(manager, prefix_cache)
        self._receiving = receiving
        self._quarantined = quarantined
        self._has_handoffs = has_handoffs
        self._transfers: RequestTransfers | None = None
        if manager.tiers is not None and prefix_cache:
            self._transfers = RequestTransfers(manager, manager.tiers, self._stats)
        self._may_load = self._transfers is not None or leases is not None
        self.preemption = Preemption(
            manager,
            self.queues,
            self._leases,
            self._transfers,
            lambda: (*receiving(), *quarantined()),
            preempt,
            self._stats,
        )

    def stats(self) -> SchedulerStats:
        """Return a copy of the counts."""
        return replace(self._stats)

    # How a request begins and ends

    def add(self, request: Request) -> None:
        """See `MixedScheduler.add`."""
        if self.queues.find(request.request_id) is not None:
            raise RequestError(f"request {request.request_id!r} is already active")
        if request.status is not RequestStatus.WAITING or request.output_tokens:
            raise RequestError(f"request {request.request_id!r} was added before")
        self.check_fits(request)
        self.queues.number(request)
        self.queues.add(request)
        if self._transfers is not None:
            self._transfers.prefetch(request)

    def check_fits(self, request: Request) -> None:
        """Check that a request can run to its limit when it runs alone.

        Raises:
            RequestTooLargeError: if the manager has too few blocks.
        """
        num_blocks = self.manager.num_blocks
        needed = request.max_blocks(self.manager.block_size)
        if needed > num_blocks:
            raise RequestTooLargeError(request.max_kv_tokens, needed, num_blocks)

    def is_fetching(self, request: Request) -> bool:
        """Tell whether a request in no queue must wait for blocks from storage.

        The first call asks storage for the blocks that the cache lacks.
        """
        transfers = self._transfers
        if transfers is None:
            return False
        if request.prefetch is None and request.fetches_after is None:
            transfers.prefetch(request)
        return transfers.is_held_up(request)

    def forget_fetch(self, request: Request) -> None:
        """Give up a request in no queue that waited for blocks from storage."""
        if self._transfers is not None:
            self._transfers.forget(request)

    def admits(self, request: Request) -> None:
        """Note that a request in no queue waits no more for blocks from storage."""
        if self._transfers is not None:
            self._transfers.admits(request)

    def add_decoding(self, request: Request, num_cached: int) -> None:
        """Add a request that holds blocks, and whose prompt was computed by another node.

        Args:
            request: the request.
            num_cached: number of tokens that this node had, in all tiers.
        """
        on_device = min(lease_of(request).num_hit_blocks * self.manager.block_size, num_cached)
        self._stats.hit_tokens += on_device
        if self._transfers is not None:
            self._transfers.count_hits(request, num_cached)
        self._stats.received_tokens += request.num_prompt_tokens - num_cached
        request.has_begun = True  # its hits are counted
        request.status = RequestStatus.RUNNING
        request.num_prefill_tokens = request.num_prompt_tokens
        request.num_computed = request.num_scheduled = request.num_prompt_tokens
        self.queues.add_running(request)
        self._stats.admitted += 1

    def abort(self, request_id: str) -> bool:
        """See `MixedScheduler.abort`."""
        request = self.queues.find(request_id)
        if request is None:
            return False
        self.end(request, "abort")
        return True

    def end(self, request: Request, reason: FinishReason) -> None:
        """End a request in any state; steps in flight keep its blocks until their `update`."""
        self.queues.remove(request)
        request.status = RequestStatus.ABORTED if reason == "abort" else RequestStatus.FINISHED
        request.finish_reason = reason
        request.match = None
        if self._transfers is not None:
            self._transfers.forget(request)
        self._release_ended(request)

    def reset_cache(self, keep: Collection[bytes], weights_revision: str) -> None:
        """See `MixedScheduler.reset_cache`."""
        if self.in_flight:
            raise StepOrderError("reset_cache was called before update")
        check_namespaces("keep", keep)
        queues, transfers = self.queues, self._transfers
        running = list(queues.running)
        if transfers is not None:
            for request in (*running, *queues.preempted, *queues.waiting):
                transfers.forget(request)
        for request in running:
            self.preemption.suspend(request)
        self.manager.reset(keep)
        if transfers is not None:
            if weights_revision:
                transfers.rename_weights(weights_revision)
            for request in queues.waiting:
                transfers.prefetch(request)

    # A step: schedule

    def schedule(self) -> StepPlan:
        """See `Scheduler.schedule`."""
        if len(self.in_flight) == self.depth:
            raise StepOrderError(
                f"schedule was called with {self.depth} steps in flight of {self.depth}"
            )
        plan = StepPlan()
        if self._may_load:
            self._begin_loaded()
        if not self._plan_decode(plan):
            return plan
        if plan.num_decode < len(self.queues.running):
            for request in self.queues.running:
                if request.num_scheduled < request.num_prefill_tokens:
                    self._plan_prefill(plan, request)
        if not (plan.preempted or self.is_paused):
            self._admit(plan)
        if plan.num_chunks:
            self._stats.steps += 1
            self.in_flight.append(plan)
            self.manager.begin_step()
        assert plan.num_chunks or not self.queues or self._is_waiting(), (
            "there is work, but nothing can be scheduled"
        )
        return plan

    def _is_waiting(self) -> bool:
        """Tell whether an event outside a step can make a request runnable."""
        has_copies = self._transfers is not None and self._transfers.is_busy
        return bool(self.in_flight) or has_copies or self.is_paused or self._has_handoffs()

    def _plan_decode(self, plan: StepPlan) -> bool:
        """Plan a token of each decoding request; False if that must wait for steps in flight."""
        try:
            rows = self.preemption.extend_decoding(plan, is_ahead=bool(self.in_flight))
        except OutOfBlocksError:
            return False
        plan.add_decode(rows)
        self._stats.decode_tokens += plan.num_decode
        return True

    def _plan_prefill(self, plan: StepPlan, request: Request) -> None:
        """Plan as many tokens of a prompt as the budget allows."""
        if request.status is RequestStatus.LOADING:
            return
        start = request.num_scheduled
        length = min(request.num_tokens - start, self.token_budget - plan.num_tokens)
        if length > 0:
            plan.add_prefill(Chunk(request, start, length))
            self._stats.prefill_tokens += length
            lost = min(start + length, request.num_lost_tokens) - start
            self._stats.recomputed_tokens += max(lost, 0)

    def _admit(self, plan: StepPlan) -> None:
        """Admit requests in order while slots, budget and blocks last: preempted ones first."""
        queues = self.queues
        if not (queues.preempted or queues.waiting) or self._is_full(plan):
            return
        reservation = None
        prefilling = [
            each for each in queues.running if each.num_computed < each.num_prefill_tokens
        ]
        in_progress = {self._next_block(request) for request in prefilling} - {None}
        for queue in (queues.preempted, queues.waiting):
            place = 0
            while place < len(queue):
                if self._is_full(plan):
                    return
                request = queue[place]
                if self._must_wait(request, in_progress):
                    place += 1
                    continue
                match = request.match
                assert match is not None, "a request is admitted without a match"
                available = self.manager.available_after(match)
                if reservation is None:
                    if self._is_surely_refused(request, match, available):
                        return
                    reservation = self.reservation()
                    self._last_reservation = queues.num_departures, reservation
                if not reservation.allows(request, match.num_blocks, available):
                    return
                if self._transfers is not None and self._transfers.fetch_parked(request):
                    place += 1
                    continue
                del queue[place]
                lease = self._start(plan, request, match)
                private = lease.num_blocks - lease.num_shared_blocks
                reservation.add(request, lease.num_blocks, private)
                in_progress |= {self._next_block(request)} - {None}
            if queue:
                return  # no new request while a preempted one waits

    def _is_full(self, plan: StepPlan) -> bool:
        """Tell whether all slots are taken, or the plan has used up its budget."""
        num_taken = len(self.queues.running) + len(self._receiving())
        return num_taken == self.max_running or plan.num_tokens == self.token_budget

    def reservation(self) -> Reservation:
        """Return the blocks to reserve for the requests that were admitted."""
        block_size, receiving = self.manager.block_size, self._receiving()
        return Reservation(self.queues.running, block_size, self.reserve_tokens, receiving)

    def _is_surely_refused(self, request: Request, match: Match, available: int) -> bool:
        """Tell, without a walk over the running requests, that they leave no room for another.

        Until one of them leaves, they grow at least to what the last reservation counted.
        """
        num_departures, reservation = self._last_reservation
        if num_departures != self.queues.num_departures:
            return False
        least_growth = reservation.num_target_blocks - self.manager.tables.num_held
        private = -(-request.num_tokens // self.manager.block_size) - match.num_blocks
        return available - private < least_growth

    def _must_wait(self, request: Request, in_progress: set[NextBlock | None]) -> bool:
        """Match a request; tell whether a block it needs is being copied or computed."""
        if self._transfers is not None and self._transfers.is_held_up(request):
            return True
        # An older match may be stale: the node where it ended may have grown by another prefix.
        match = request.match = self.manager.match(
            request.tokens, request.namespace, max_hit_tokens=request.max_hit_tokens
        )
        waits = match.next_block in in_progress
        self._stats.waits_for_leader += waits
        return waits

    def _start(self, plan: StepPlan, request: Request, match: Match) -> Lease:
        """Reserve the blocks of a request, and plan its first chunk unless they are loading."""
        lease = request.lease = self._leases.reserve(request, match)
        request.match = None
        if request.status is not RequestStatus.WAITING:
            self._stats.resumed += 1
            self._stats.resumed_parked += request.parked is not None
            request.parked = None
        request.num_prefill_tokens = request.num_tokens
        self.queues.running.append(request)
        plan.admitted.append(request)
        if not self._leases.is_ready(request):
            request.status = RequestStatus.LOADING
        elif request.sample_of is None:
            self._begin(request)
        else:
            self._begin(request, self._copy_last_block(plan, request, lease, request.sample_of))
        self._plan_prefill(plan, request)
        return lease

    def _begin_loaded(self) -> None:
        for request in self.queues.running:
            if request.status is RequestStatus.LOADING and self._leases.is_ready(request):
                self._begin(request)

    def _copy_last_block(
        self, plan: StepPlan, request: Request, lease: Lease, first: Request
    ) -> int:
        """Plan a copy of the prompt's last block from the first sample, if that has computed it.

        Returns:
            The number of tokens in it; 0 if it is whole, and thus shared, or not copied.
        """
        num_blocks, num_tokens = divmod(request.num_prompt_tokens, self.manager.block_size)
        is_due = (
            self.prefix_cache
            and num_tokens > 1  # the last one is computed in any case
            and not request.has_begun
            and request.prompt_logprobs is None  # then the prompt is computed
            and lease.num_hit_blocks == num_blocks
            and first.num_computed >= request.num_prompt_tokens
            and first.status is RequestStatus.RUNNING
        )
        if not is_due:
            return 0
        source = lease_of(first).block_table.item(num_blocks)
        plan.copies.append(BlockCopy(first, source, lease.block_table.item(num_blocks)))
        first.num_copies += 1
        return num_tokens

    def _begin(self, request: Request, num_copied: int = 0) -> None:
        """Let a request compute what follows the tokens in its blocks, and count its hits."""
        lease = lease_of(request)
        # The last token is computed even on a hit, because its logits are needed.
        hit_tokens = min(lease.num_ready_tokens + num_copied, request.num_tokens - 1)
        if not request.has_begun:
            request.has_begun = True
            self._stats.admitted += 1
            on_device = lease.num_hit_blocks * self.manager.block_size + num_copied
            request.num_hit_tokens = min(on_device, hit_tokens)
            self._stats.hit_tokens += request.num_hit_tokens
            if self._transfers is not None:
                self._transfers.count_hits(request, hit_tokens - num_copied)
        else:
            self._stats.resumed_hit_tokens += hit_tokens
            self.admits(request)
        request.status = RequestStatus.RUNNING
        request.num_computed = request.num_scheduled = hit_tokens

    def _next_block(self, request: Request) -> NextBlock | None:
        """Identify the block that a prefilling request is about to compute and publish."""
        if not (self.prefix_cache and request.is_prefilling):
            return None
        return self.manager.next_block(lease_of(request), request.tokens)

    # A step: update

    def update(self, plan: StepPlan, next_tokens: Sequence[int]) -> list[Request]:
        """See `MixedScheduler.update`."""
        self.check_results(plan, next_tokens)
        tokens = list(map(int, next_tokens))
        self.in_flight.popleft()
        self.manager.end_step()
        for copy in plan.copies:
            copy.owner.num_copies -= 1
            if copy.owner.finish_reason is not None:
                self._release_ended(copy.owner)
        finished: list[Request] = []
        decode, prefill = plan.decode, plan.prefill
        block_size, running = self.manager.block_size, RequestStatus.RUNNING
        # The first loop runs once per token of the output of all requests.
        stops = (decode.starts + 1).tolist()
        for request, stop, token in zip(decode.requests, stops, tokens, strict=False):
            request.num_computed = stop
            if request.status is not running:
                self._release_ended(request)
                continue
            if stop % block_size == 0:
                self._leases.publish(request)
            if (reason := request.append(token)) is not None:
                self.end(request, reason)
                finished.append(request)
        for (request, start, length), token in zip(prefill, tokens[len(stops) :], strict=True):
            request.num_computed = start + length
            if request.status is not running:
                self._release_ended(request)
                continue
            if request.num_computed // block_size > lease_of(request).num_shared_blocks:
                self._leases.publish(request)
            is_whole = request.num_computed == request.num_tokens
            if is_whole and (reason := request.append(token)) is not None:
                self.end(request, reason)
                finished.append(request)
        return finished

    def _release_ended(self, request: Request) -> None:
        """Release the blocks of a request that ended in flight, with the last of its steps."""
        if not request.is_in_flight:
            self._leases.release(request)

    def is_next(self, plan: StepPlan) -> bool:
        """Tell whether a plan is the one to update next."""
        return bool(self.in_flight) and plan is self.in_flight[0]

    def check_results(self, plan: StepPlan, next_tokens: Sequence[int]) -> None:
        """Check that results belong to the plan in flight, one per chunk.

        Raises:
            StepOrderError: if they do not.
        """
        if not self.is_next(plan):
            raise StepOrderError("update was called with a plan that is not in flight")
        if len(next_tokens) != plan.num_chunks:
            raise StepOrderError(
                f"update got {len(next_tokens)} tokens for {plan.num_chunks} chunks"
            )

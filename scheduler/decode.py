"""The decode scheduler: takes requests over from prefill nodes, and generates their tokens."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

from ..kvcache import CacheManager, Lease, Match, OutOfBlocksError
from .batching.batch import BatchScheduler
from .batching.preemption import PreemptMode
from .errors import HandoffsOpenError, RefusedError
from .fairness import MAX_OVERTAKEN, AdmissionFairness
from .handoff import (
    AttemptKey,
    CancelPull,
    DecodeAction,
    DecodeFailed,
    DecodeSide,
    Finished,
    Message,
    NodeId,
    PartId,
    Post,
    Preempted,
    Pull,
    Start,
    Started,
    Stop,
    Timing,
)
from .handoff.records import unpack_records
from .interface import Scheduler
from .policy import Policy
from .request import Request
from .reservation import Reservation, needed_to_finish
from .step_plan import StepPlan


class DecodeScheduler(Scheduler):
    """Decides which requests generate a token in each step, and which prefill nodes may send KV.

    A prefill node asks for blocks. D matches its own tree first, asks storage for the blocks after
    the match, and grants what it lacks then, if the reservation allows: it counts running requests
    and those being received, and leaves enough blocks for one request to finish (see
    ``reservation``). While a preempted request waits, D grants nothing. A request is published once
    all of its KV has arrived, and decodes in the next step.

    Preemption and resumption need no prefill node: KV that the cache has lost is recomputed here in
    chunks, or copied back from the tier where it was parked. With storage, ``Preempted`` reports
    the request, so that the gateway may let another decode node continue it.

    The scheduler does no I/O: call ``schedule``, run the plan, call `update`, and carry out
    `take_actions` after every call.
    """

    def __init__(
        self,
        manager: CacheManager,
        *,
        epoch: int,
        timing: Timing,
        token_budget: int,
        max_running: int,
        policy: Policy | None = None,
        reserve_tokens: int | None = 512,
        preempt: PreemptMode = "recompute",
        check_request: Callable[[Request], None] | None = None,
        vocab_size: int | None = None,
        max_overtaken: int = MAX_OVERTAKEN,
        depth: int = 1,
    ) -> None:
        """Make a scheduler. Nothing else may use its manager.

        Args:
            manager: holds the blocks.
            epoch, timing: see `DecodeSide`.
            token_budget: most tokens of a step; at least max_running. Only resumed requests need
                more.
            max_running: most requests that hold blocks at a time.
            policy, reserve_tokens, preempt: see `MixedScheduler`.
            check_request: raises a RequestError for a request that the model cannot take.
            vocab_size: of the model; see `DecodeSide`.
            max_overtaken: most later requests that are admitted before one that was refused for
                lack of room and keeps asking, unless they leave room for it.
            depth: most steps in flight; see `MixedScheduler`. A request that ends during steps in
                flight is reported when the last of them has ended.

        Raises:
            ConfigError, CountError: for an invalid policy, sizes that do not fit together, or a
                tier that the manager does not have.
        """
        self._side = side = DecodeSide(
            manager,
            epoch=epoch,
            timing=timing,
            admit=self._grant,
            is_fetching=lambda request: self._batch.is_fetching(request),
            forget=lambda request: self._batch.forget_fetch(request),
            vocab_size=vocab_size,
        )
        super().__init__(
            BatchScheduler(
                manager,
                token_budget=token_budget,
                max_running=max_running,
                policy=policy,
                reserve_tokens=reserve_tokens,
                preempt=preempt,
                depth=depth,
                receiving=lambda: side.receiving,
                quarantined=lambda: side.quarantined,
                has_handoffs=lambda: self.num_receiving > 0,
            )
        )
        # By request, not by id: a request that ends during steps in flight stays here until the
        # last of them has ended, possibly beside a newer attempt.
        self._keys: dict[Request, AttemptKey] = {}
        self._reasons: dict[Request, str] = {}
        self._offered: dict[Request, int] = {}  # number of the preemption that was reported last
        self._actions: list[
            Post | Pull | CancelPull | Started | Preempted | Finished | DecodeFailed
        ] = []
        self._is_draining = False
        self._check_request = check_request
        self._now = 0.0
        self._fairness = AdmissionFairness(timing.silence_s, max_overtaken)

    @property
    def num_open(self) -> int:
        """Number of attempts that hold blocks, or have started and not ended."""
        return self._side.num_open

    @property
    def num_receiving(self) -> int:
        """Number of attempts that hold blocks and have not started, including quarantined ones."""
        return len(self._side.receiving) + len(self._side.quarantined)

    # Admission

    def _grant(self, request: Request, may_wait: bool) -> Lease | None:
        """Reserve blocks for a request that is to be received.

        Returns:
            None if it must wait for blocks from storage, which it may only with `may_wait`.

        Raises:
            RequestError: if the model cannot take it.
            RefusedError, OutOfBlocksError: if there is no room now.
        """
        if self._is_draining:
            raise RefusedError("draining", 0, 0)
        if self._check_request is not None:
            self._check_request(request)
        try:
            match = self._check_room(request)
        except (RefusedError, OutOfBlocksError):
            num_blocks = request.max_blocks(self.manager.block_size)
            self._fairness.refused(request.request_id, num_blocks, self._now)
            raise
        if may_wait and self._batch.is_fetching(request):
            return None
        self._batch.admits(request)
        self._fairness.admitted(request.request_id)
        self._queues.number(request)
        return self.manager.admit(match)

    def _check_room(self, request: Request) -> Match:
        """Match a request for which there is room.

        Raises:
            RefusedError, OutOfBlocksError: if there is none now.
        """
        queues, side, manager = self._queues, self._side, self.manager
        if queues.preempted:
            raise RefusedError("others wait", len(queues.preempted), 0)
        receiving = side.receiving
        num_taken = len(queues.running) + len(receiving)
        if num_taken >= self.max_running:
            raise RefusedError("out of slots", num_taken + 1, self.max_running)
        match = manager.match(request.prompt, request.namespace)
        guard = needed_to_finish(
            request, match, queues.running, receiving, side.quarantined, manager.block_size
        )
        growth = self._batch.reservation().needed_to_receive(request, match.num_blocks)
        available = manager.available_after(match)
        if max(growth, guard) > available:
            raise OutOfBlocksError(max(growth, guard), available)
        set_aside = self._fairness.set_aside(request.request_id, self._now)
        if set_aside:
            # Reserved to the end, because what runs may not grow into the room for others.
            full = Reservation(queues.running, manager.block_size, None, receiving)
            growth = full.needed_to_receive(request, match.num_blocks)
            is_room = max(growth, guard) + sum(set_aside) <= available
            if not is_room or num_taken + len(set_aside) >= self.max_running:
                raise RefusedError("others wait", len(set_aside), 0)
        return match

    def _start_decoding(self, start: Start) -> None:
        request, commit = start.request, start.commit
        request.sampling = commit.sampling
        request.stop_token_ids = frozenset(commit.stop_token_ids)
        request.late_token_ids = request.stop_token_ids
        for record in unpack_records(commit.first_record, [commit.first_token]):
            request.logprobs = len(record.top)
            request.output_logprobs.append(record)
        self._batch.add_decoding(request, start.num_cached_tokens)
        request.num_hit_tokens = commit.hits.device
        request.num_host_hit_tokens = commit.hits.host
        request.num_storage_hit_tokens = commit.hits.storage
        self._keys[request] = start.key
        self._actions.append(Started(start.key, request, start.num_cached_tokens))
        reason = request.append(commit.first_token)
        if reason is not None:
            self._batch.end(request, reason)
            self._report_end(request)

    # The end of a request

    def abort(self, request_id: str) -> bool:
        """Give up all attempts of a request, in any state; return False if there is none."""
        keys = self._side.keys_of(request_id)
        for key in keys:
            self.give_up(key, "aborted")
        return bool(keys)

    def give_up(self, key: AttemptKey, reason: str) -> None:
        """End an attempt in any state; ignored if it is not known."""
        self._side.abort(key, reason)
        self._apply_actions()

    def _stop(self, key: AttemptKey, reason: str) -> None:
        request = self._queues.find(key.request_id)
        if request is None or self._keys[request] != key:
            return
        self._reasons[request] = reason
        self._batch.abort(key.request_id)
        if request.lease is None:  # otherwise steps in flight use its blocks
            self._report_end(request)

    def _report_end(self, request: Request) -> None:
        """Report a request that has ended and released its blocks."""
        key = self._keys.pop(request)
        reason = self._reasons.pop(request, "")
        self._offered.pop(request, None)
        self._side.finished(key)
        if request.finish_reason == "abort":
            self._actions.append(DecodeFailed(key, reason))
        else:
            self._actions.append(Finished(key, request))

    def drain(self, reason: str) -> None:
        """Give up what is being received, and grant nothing before `reset_cache`."""
        self._is_draining = True
        self._side.abort_receiving(reason)
        self._apply_actions()

    def resume(self) -> None:
        """Grant again after `drain`, without a reset."""
        self._is_draining = False

    def reset_cache(self, keep: Collection[bytes] = (), weights_revision: str = "") -> None:
        """Drop all KV because the weights have changed; decoding requests recompute theirs.

        Call `drain` first, and continue until `num_receiving` is 0, because pulls may still write.
        For the arguments, see `MixedScheduler.reset_cache`.

        Raises:
            HandoffsOpenError: if attempts that have not started hold blocks; nothing is changed.
            StepOrderError: while steps are in flight.
        """
        if self.num_receiving:
            raise HandoffsOpenError(self.num_receiving)
        self._batch.reset_cache(keep, weights_revision)
        self._offered |= {each: each.num_preemptions for each in self._queues.preempted}
        self._is_draining = False

    # A step

    def update(
        self,
        plan: StepPlan,
        next_tokens: Sequence[int],
        append_logprobs: Callable[[], object] = lambda: None,
    ) -> list[Request]:
        """Apply the results of the last plan; see `PrefillScheduler.update`."""
        finished = self._batch.update(plan, next_tokens)
        append_logprobs()
        for request in plan.requests:
            # One that ended may be in later steps in flight, which use its blocks.
            if request.finish_reason is not None and request.lease is None:
                self._report_end(request)
        return finished

    # Events of the network, the transport and the clock

    def receive(self, peer: NodeId, message: Message) -> None:
        """Process a message of a prefill node."""
        self._side.receive(peer, message)
        self._apply_actions()

    def pulled(self, part_id: PartId) -> None:
        """Report that a part is complete in its blocks, and nothing writes there any more."""
        self._side.pulled(part_id)
        self._apply_actions()

    def pull_failed(self, part_id: PartId, *, fenced: bool, reason: str) -> None:
        """Report that a part will not arrive; see `DecodeSide.pull_failed`."""
        self._side.pull_failed(part_id, fenced=fenced, reason=reason)
        self._apply_actions()

    def pull_fenced(self, part_id: PartId) -> None:
        """Report that a failed or cancelled pull writes no more."""
        self._side.pull_fenced(part_id)
        self._apply_actions()

    def set_time(self, now: float) -> None:
        """Advance the clock for what is received next; `tick` checks the deadlines."""
        self._now = now
        self._side.set_time(now)

    def tick(self, now: float) -> None:
        """Advance the clock: grant blocks that are loaded, and end attempts that time out."""
        self._now = now
        self._side.tick(now)
        self._apply_actions()

    def take_actions(
        self,
    ) -> list[Post | Pull | CancelPull | Started | Preempted | Finished | DecodeFailed]:
        """Return the actions since the last call, in the order in which to carry them out."""
        self._apply_actions()
        self._offer_preempted()
        actions, self._actions = self._actions, []
        return actions

    def _offer_preempted(self) -> None:
        """Report each preempted request once its KV is in storage, where other nodes find it."""
        tiers = self.manager.tiers
        if tiers is None or tiers.storage is None:
            return
        for request in self._queues.preempted:
            is_saved = request.parked is None or request.parked.saved
            if is_saved and self._offered.get(request) != request.num_preemptions:
                self._offered[request] = request.num_preemptions
                self._actions.append(Preempted(self._keys[request], request))

    def _apply_actions(self) -> None:
        """Start and stop requests as the side decides, and keep the actions for the caller."""
        self._apply(self._side.take_actions())
        self._side.answer_deferred()
        self._apply(self._side.take_actions())

    def _apply(self, actions: Iterable[DecodeAction]) -> None:
        for action in actions:
            match action:
                case Start():
                    self._start_decoding(action)
                case Stop(key, reason):
                    self._stop(key, reason)
                case _:
                    self._actions.append(action)

"""The decode scheduler: takes requests over from prefill nodes, and generates."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from ..kvcache import (
    CacheManager,
    Lease,
    OutOfBlocksError,
)
from .batch import BatchScheduler
from .errors import HandoffsOpenError, RefusedError
from .fairness import AdmissionFairness
from .handoff import (
    AttemptKey,
    CancelPull,
    DecodeAction,
    DecodeSide,
    Finished,
    Message,
    NodeId,
    Post,
    Pull,
    Start,
    Started,
    Stop,
    Stopped,
    Ticket,
    Timing,
)
from .policy import Policy
from .preemption import PreemptMode
from .request import Request, RequestStatus
from .reservation import needed_to_finish


class DecodeScheduler(BatchScheduler):
    """Decides which requests generate a token in each step, and who may send another.

    A prefill node asks for blocks. D matches its own tree first and grants what it lacks, if the
    reservation allows: it counts requests that run and those that are received, and leaves room
    for one to finish (see `reservation`). While a preempted request waits, nobody is let in. What
    was received whole is published, and decodes with the next step.

    Preemption and resumption need no prefill node: what the cache has lost is computed here, in
    chunks, or comes back from where it was parked.

    It does no I/O: call `schedule`, run the plan, call `update`, and carry out `take_actions` after
    every call.
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
    ) -> None:
        """Make a scheduler over a manager that nobody else uses.

        Args:
            manager: holds the blocks.
            epoch, timing: of `DecodeSide`.
            token_budget: tokens of a step, at least max_running; only requests that are resumed
                need more.
            max_running: requests that hold blocks at a time.
            policy, reserve_tokens, preempt: of `MixedScheduler`.
            check_request: raises a RequestError for what the model cannot take.
            vocab_size: of the model; see `DecodeSide`.

        Raises:
            ConfigError, CountError: for what is no policy, sizes that cannot work, or a tier that
                the manager has not.
        """
        super().__init__(
            manager,
            token_budget=token_budget,
            max_running=max_running,
            policy=policy,
            reserve_tokens=reserve_tokens,
            prefix_cache=True,
            preempt=preempt,
        )
        self._side = DecodeSide(
            manager, epoch=epoch, timing=timing, admit=self._grant, vocab_size=vocab_size
        )
        # By request and not by its id: one that was stopped in the middle of a step is here until
        # the step has ended, maybe beside a newer attempt.
        self._keys: dict[Request, AttemptKey] = {}
        self._reasons: dict[Request, str] = {}
        self._actions: list[Post | Pull | CancelPull | Started | Finished | Stopped] = []
        self._is_draining = False
        self._check_request = check_request
        self._now = 0.0
        self._fairness = AdmissionFairness(timing.silence_s)

    @property
    def num_open(self) -> int:
        """Attempts that hold blocks, or have started and not ended."""
        return self._side.num_open

    @property
    def num_receiving(self) -> int:
        """Attempts that hold blocks and have not started, with those in quarantine."""
        return len(self._side.receiving) + len(self._side.quarantined)

    # Who is let in

    def _grant(self, request: Request) -> Lease:
        """Reserve blocks for a request that is to be received.

        Raises:
            RequestError: if the model cannot take it.
            RefusedError, OutOfBlocksError: if there is no room now.
        """
        if self._is_draining:
            raise RefusedError("draining", 0, 0)
        if self._check_request is not None:
            self._check_request(request)
        try:
            lease = self._take_in(request)
        except (RefusedError, OutOfBlocksError):
            self._fairness.refused(request.request_id, self._now)
            raise
        self._fairness.admitted(request.request_id)
        self._arrive(request)
        return lease

    def _take_in(self, request: Request) -> Lease:
        num_before = len(self._parked) or self._fairness.num_before(request.request_id, self._now)
        if num_before:
            raise RefusedError("others wait", num_before, 0)
        receiving = self._side.receiving
        num_taken = len(self._running) + len(receiving)
        if num_taken >= self.max_running:
            raise RefusedError("out of slots", num_taken + 1, self.max_running)
        match = self.manager.match(request.prompt, request.namespace)
        fenced_off, block_size = self._side.quarantined, self.manager.block_size
        needed = max(
            self._reservation().needed_to_receive(request, match.num_blocks),
            needed_to_finish(request, match, self._running, receiving, fenced_off, block_size),
        )
        available = self.manager.available_after(match)
        if needed > available:
            raise OutOfBlocksError(needed, available)
        return self.manager.admit(match)

    def _start_decoding(self, start: Start) -> None:
        request, commit = start.request, start.commit
        assert request.request_id not in self._requests, f"{request!r} starts twice"
        request.sampling = commit.sampling
        request.stop_token_ids = frozenset(commit.stop_token_ids)
        request.num_hit_tokens = commit.hits.device
        request.num_host_hit_tokens = commit.hits.host
        request.num_storage_hit_tokens = commit.hits.storage
        request.has_begun = True  # its hits were counted by P
        request.status = RequestStatus.RUNNING
        request.num_prefill_tokens = request.num_computed = request.num_prompt_tokens
        self._requests[request.request_id] = request
        self._keys[request] = start.key
        self._stats.admitted += 1
        self._actions.append(Started(start.key, request, start.num_cached_tokens))
        reason = request.append(commit.first_token)
        if reason is None:
            self._running.append(request)
        else:
            self._end(request, reason)

    # How one ends

    def abort(self, request_id: str) -> bool:
        """Give up all attempts of a request, in any state; False if there is none."""
        keys = self._side.keys_of(request_id)
        for key in keys:
            self.give_up(key, "aborted")
        return bool(keys)

    def give_up(self, key: AttemptKey, reason: str) -> None:
        """End an attempt in any state; nothing happens if it is not known."""
        self._side.abort(key, reason)
        self._follow()

    def _release(self, request: Request) -> None:
        super()._release(request)
        if request.finish_reason is None:
            return  # it is preempted
        key = self._keys.pop(request)
        reason = self._reasons.pop(request, "")
        self._side.finished(key)
        if request.finish_reason == "abort":
            self._actions.append(Stopped(key, reason))
        else:
            self._actions.append(Finished(key, request))

    def drain(self, reason: str) -> None:
        """Give up what is being received, and let nothing in before `reset_cache`."""
        self._is_draining = True
        self._side.abort_receiving(reason)
        self._follow()

    def reset_cache(self, keep: Collection[bytes] = (), weights_revision: str = "") -> None:
        """Forget all KV, as the weights have changed; requests that decode compute theirs again.

        Call `drain` first, and go on until `num_receiving` is 0: pulls may still write.

        Raises:
            HandoffsOpenError: if attempts that have not started hold blocks; nothing is changed.
            StepOrderError: in the middle of a step.
        """
        if self.num_receiving:
            raise HandoffsOpenError(self.num_receiving)
        super().reset_cache(keep, weights_revision)
        self._is_draining = False

    # What the network, the transport and the clock say

    def receive(self, peer: NodeId, message: Message) -> None:
        """Take in a message of a prefill node."""
        self._side.receive(peer, message)
        self._follow()

    def pulled(self, ticket: Ticket) -> None:
        """Say that all of a part is in its blocks, and nothing is written there any more."""
        self._side.pulled(ticket)
        self._follow()

    def pull_failed(self, ticket: Ticket, *, fenced: bool, reason: str) -> None:
        """Say that a part will not arrive; see `DecodeSide.pull_failed`."""
        self._side.pull_failed(ticket, fenced=fenced, reason=reason)
        self._follow()

    def pull_fenced(self, ticket: Ticket) -> None:
        """Say that nothing is written any more by a pull that failed or was cancelled."""
        self._side.pull_fenced(ticket)
        self._follow()

    def tick(self, now: float) -> None:
        """Let time pass: grant what has been loaded, and give up what has waited too long."""
        self._now = now
        self._side.tick(now)
        self._follow()

    def take_actions(self) -> list[Post | Pull | CancelPull | Started | Finished | Stopped]:
        """Hand out what is to be done since the last call, in order."""
        self._follow()
        actions, self._actions = self._actions, []
        return actions

    def _follow(self) -> None:
        """Begin to decode what has arrived, and stop what the side wants stopped."""
        self._carry_out(self._side.take_actions())
        self._side.answer_deferred()
        self._carry_out(self._side.take_actions())

    def _carry_out(self, actions: Iterable[DecodeAction]) -> None:
        for action in actions:
            match action:
                case Start():
                    self._start_decoding(action)
                case Stop(key, reason):
                    request = self._requests.get(key.request_id)
                    if request is not None and self._keys[request] == key:
                        self._reasons[request] = reason
                        super().abort(key.request_id)
                case _:
                    self._actions.append(action)

    # Where it differs from other schedulers

    def _receiving(self) -> list[Request]:
        return self._side.receiving

    def _fenced_off(self) -> list[Request]:
        return self._side.quarantined

    def _waits_for_others(self) -> bool:
        return self.num_receiving > 0 or super()._waits_for_others()

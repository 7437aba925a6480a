"""The prefill scheduler: computes prompts, and hands each over to a decode node."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from ..kvcache import CacheManager, Lease, Match
from .batching.batch import BatchScheduler
from .errors import HandoffsOpenError, RequestError, StepOrderError
from .handoff import (
    AttemptKey,
    Compute,
    Hits,
    Message,
    NodeId,
    Offer,
    Order,
    Post,
    PrefillFailed,
    PrefillSide,
    Timing,
    Withdraw,
)
from .handoff.records import pack_records
from .interface import Scheduler
from .policy import Policy
from .request import Request, lease_of
from .step_plan import StepPlan


class _Prompt(Request):
    """The prompt of an attempt, as a request for one token.

    Attributes:
        key: the attempt.
        peer: the decode node.
        whole: the request of the caller.
    """

    def __init__(self, request: Request, key: AttemptKey, peer: NodeId) -> None:
        super().__init__(
            request.request_id,
            request.prompt,
            1,
            priority=request.priority,
            sampling=request.sampling,
            namespace=request.namespace,
            logprobs=request.logprobs,
        )
        self.key = key
        self.peer = peer
        self.whole = request
        self.late_token_ids = request.late_token_ids


def _as_prompt(request: Request) -> _Prompt:
    assert isinstance(request, _Prompt), f"{request!r} is not the prompt of an attempt"
    return request


class _HandoffLeases:
    """Leases that the hand-offs own; see `Leases`."""

    def __init__(self, side: PrefillSide) -> None:
        self._side = side

    def reserve(self, request: Request, match: Match) -> Lease:
        prompt = _as_prompt(request)
        return self._side.begin(prompt.key, prompt.peer, prompt.whole)

    def is_ready(self, request: Request) -> bool:
        key = _as_prompt(request).key
        return self._side.may_compute(key) and lease_of(request).loading is None

    def publish(self, request: Request) -> None:
        """Do nothing: the side publishes when the last group of layers is written."""

    def release(self, request: Request) -> None:
        request.lease = None


class PrefillScheduler(Scheduler):
    """Decides which tokens of which prompts are computed, and hands the KV to decode nodes.

    A step has ``token_budget`` tokens: prefill chunks in order of admission. Admission reserves
    blocks for the whole prompt, or refuses. In the early order, a prompt is computed once its
    decode node has granted blocks; each chunk is published and offered when it is computed. After
    its first token a prompt leaves the scheduler, but its blocks stay pinned until the decode node
    has read them.

    A request that needs a block which another one is about to compute waits for it. Blocks in lower
    tiers are copied or prefetched first, as in `MixedScheduler`. Nothing is preempted, because no
    request grows.

    The scheduler does no I/O: call `MixedScheduler.schedule`, run the plan, call `update`, and
    carry out `take_actions` after every call. Calls during a step take effect when it has ended,
    because the step uses the blocks; only the clock advances at once.
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
        order: Order = "early",
        num_groups: int = 1,
    ) -> None:
        """Make a scheduler. Nothing else may use its manager.

        Args:
            manager: holds the blocks.
            epoch, timing, order, num_groups: see `PrefillSide`.
            token_budget: most tokens of a step; at least max_running.
            max_running: most prompts that wait for a grant or are computed at a time.
            policy: order of admission; default `Fcfs`.

        Raises:
            ConfigError, CountError: for an invalid policy or order, or sizes that do not fit
                together.
        """
        self._side = side = PrefillSide(
            manager, epoch=epoch, timing=timing, num_groups=num_groups, order=order
        )
        super().__init__(
            BatchScheduler(
                manager,
                token_budget=token_budget,
                max_running=max_running,
                policy=policy,
                reserve_tokens=0,
                leases=_HandoffLeases(side),
                has_handoffs=lambda: side.num_open > 0,
            )
        )
        self._num_groups = num_groups
        self._num_written = 0  # groups of layers that the step in flight has written
        self._newest: dict[str, _Prompt] = {}  # by request id, until computed
        self._deferred: list[Callable[[], None]] = []  # calls during the step in flight
        self._actions: list[Post | Offer | Withdraw | PrefillFailed] = []

    @property
    def num_open(self) -> int:
        """Number of attempts that hold blocks, including those that D has yet to read."""
        return self._side.num_open

    # Requests

    def begin(self, request: Request, peer: NodeId, attempt: int = 1) -> None:
        """Queue the prompt of a request for a hand-off; an older attempt of the request ends.

        Args:
            request: not changed.
            peer: the decode node.
            attempt: number of the attempt, higher than any before of this request.

        Raises:
            RequestError: if this attempt, or a newer one, is open.
            RequestTooLargeError: if the prompt does not fit even alone.
        """
        key = AttemptKey(request.request_id, attempt)
        older = self._newest.get(key.request_id)
        open_keys = self._side.keys_of(key.request_id)
        for open_key in open_keys if older is None else (*open_keys, older.key):
            if open_key >= key:
                raise RequestError(f"{open_key} is open")
        prompt = _Prompt(request, key, peer)
        self._batch.check_fits(prompt)
        if older is not None:
            self.give_up(older.key, "a newer attempt has begun")
        self._newest[key.request_id] = prompt
        self._call(lambda: self._batch.add(prompt))

    def abort(self, request_id: str) -> bool:
        """Give up all attempts of a request; return False if there is none."""
        keys = self._side.keys_of(request_id)
        newest = self._newest.get(request_id)
        if newest is not None and newest.key not in keys:
            keys.append(newest.key)
        for key in keys:
            self.give_up(key, "aborted")
        return bool(keys)

    def give_up(self, key: AttemptKey, reason: str) -> None:
        """End an attempt in any state, with the action `PrefillFailed`; ignored if it has ended."""
        self._call(lambda: self._give_up(key, reason))

    def _give_up(self, key: AttemptKey, reason: str) -> None:
        request = self._queues.find(key.request_id)
        if request is not None and request.lease is None and _as_prompt(request).key == key:
            self._drop(key)
            self._actions.append(PrefillFailed(key, reason))
        else:
            self._side.abort(key, reason)

    def drain(self, reason: str) -> None:
        """Give up every attempt that holds blocks, and admit no other before `reset_cache`."""
        self._batch.is_paused = True
        self._call(lambda: self._side.abort_all(reason))

    def resume(self) -> None:
        """Admit attempts again after `drain`, without a reset."""
        self._batch.is_paused = False

    def reset_cache(self, keep: Collection[bytes] = (), weights_revision: str = "") -> None:
        """Drop all KV because the weights have changed; waiting prompts use the new weights.

        Call `drain` first, and continue until `num_open` is 0, because other nodes may read the
        blocks. For the arguments, see `MixedScheduler.reset_cache`.

        Raises:
            HandoffsOpenError: if attempts hold blocks; nothing is changed.
            StepOrderError: during a step.
        """
        if self._side.num_open:
            raise HandoffsOpenError(self._side.num_open)
        self._batch.reset_cache(keep, weights_revision)
        self._batch.is_paused = False

    # Events of the network, the transport and the clock

    def receive(self, peer: NodeId, message: Message) -> None:
        """Process a message of a decode node."""
        self._call(lambda: self._side.receive(peer, message))

    def fenced(self, key: AttemptKey) -> None:
        """Report that nothing can read the offers of a withdrawn attempt any more."""
        self._call(lambda: self._side.fenced(key))

    def set_time(self, now: float) -> None:
        """Advance the clock for what is received next; `tick` checks the deadlines."""
        self._side.set_time(now)

    def tick(self, now: float) -> None:
        """Advance the clock, and check the deadlines, except during a step."""
        self._side.set_time(now)
        if not self._batch.in_flight:
            self._side.tick(now)
            self._apply_actions()

    def take_actions(self) -> list[Post | Offer | Withdraw | PrefillFailed]:
        """Return the actions since the last call, in the order in which to carry them out."""
        self._apply_actions()
        actions, self._actions = self._actions, []
        return actions

    def _call(self, call: Callable[[], None]) -> None:
        """Run a call now, or after the step in flight, which uses the blocks."""
        if self._batch.in_flight:
            self._deferred.append(call)
            return
        call()
        self._apply_actions()

    def _apply_actions(self) -> None:
        """Drop requests whose attempts have ended, and keep the actions for the caller."""
        for action in self._side.take_actions():
            if isinstance(action, PrefillFailed):
                self._drop(action.key)
            if not isinstance(action, Compute):  # `_HandoffLeases.is_ready` checks for it
                self._actions.append(action)

    def _drop(self, key: AttemptKey) -> None:
        request = self._queues.find(key.request_id)
        if request is not None and _as_prompt(request).key == key:
            self._batch.abort(key.request_id)
            self._forget(_as_prompt(request))

    def _forget(self, prompt: _Prompt) -> None:
        if self._newest.get(prompt.request_id) is prompt:
            del self._newest[prompt.request_id]

    # A step

    def wrote(self, plan: StepPlan, group: int) -> None:
        """Report that a step in flight has written the KV of one group of layers; optional.

        Report groups in order. `update` reports those that were left out.

        Raises:
            StepOrderError: for another plan, or if it is not the next group.
        """
        if not self._batch.is_next(plan) or group != self._num_written:
            raise StepOrderError(f"group {group} was written, expected {self._num_written}")
        for chunk in plan.chunks:
            key = _as_prompt(chunk.request).key
            self._side.computed(key, chunk.start + chunk.length, group)
        self._num_written += 1

    def update(
        self,
        plan: StepPlan,
        next_tokens: Sequence[int],
        append_logprobs: Callable[[], object] = lambda: None,
    ) -> list[Request]:
        """Apply the results of the last plan: publish, offer, and commit computed prompts.

        Args:
            plan, next_tokens: see `MixedScheduler.update`.
            append_logprobs: gives prompts the records of their tokens, before they are committed.

        Returns:
            The prompts that are computed, each with its first token; their hand-offs continue.

        Raises:
            StepOrderError: for another plan, or if the results are not one per chunk.
        """
        self._batch.check_results(plan, next_tokens)
        while self._num_written < self._num_groups:
            self.wrote(plan, self._num_written)
        finished = self._batch.update(plan, next_tokens)
        append_logprobs()
        self._num_written = 0
        for request in finished:
            prompt = _as_prompt(request)
            self._forget(prompt)
            record = pack_records(request.output_logprobs)
            self._side.sampled(prompt.key, request.output_tokens[0], Hits.of(request), record)
        self._apply_actions()
        deferred, self._deferred = self._deferred, []
        for call in deferred:
            self._call(call)
        return finished

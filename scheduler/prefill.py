"""The prefill scheduler: computes prompts, and hands each over to a decode node."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from ..kvcache import (
    CacheManager,
    Lease,
    Match,
)
from .batch import BatchScheduler
from .errors import (
    HandoffsOpenError,
    RequestError,
    StepOrderError,
)
from .handoff import (
    AttemptKey,
    Compute,
    Failed,
    Hits,
    Message,
    NodeId,
    Offer,
    Order,
    Post,
    PrefillSide,
    Timing,
    Withdraw,
)
from .policy import Policy
from .request import Request
from .step_plan import StepPlan


class _Prompt(Request):
    """A prompt that this scheduler computes, as a request for one token: whose, and for whom."""

    def __init__(self, request: Request, key: AttemptKey, peer: NodeId) -> None:
        super().__init__(
            request.request_id,
            request.prompt,
            1,
            priority=request.priority,
            sampling=request.sampling,
            namespace=request.namespace,
        )
        self.key = key
        self.peer = peer
        self.whole = request


def _as_prompt(request: Request) -> _Prompt:
    assert isinstance(request, _Prompt), f"{request!r} is no prompt of a hand-off"
    return request


class PrefillScheduler(BatchScheduler):
    """Decides which tokens of which prompts are computed, and says so to decode nodes.

    A step has `token_budget` tokens: prefill chunks in order of admission. A whole prompt gets its
    blocks or waits. In the early order it is computed when its decode node has granted blocks;
    each chunk is published and offered when it is computed. With its first token a prompt leaves
    the scheduler, but its blocks stay pinned until the decode node has read them.

    Requests that need a block which another is about to compute wait for it. What the tiers have
    is copied or fetched first, as in `MixedScheduler`. Nothing is preempted: nothing grows.

    It does no I/O: call `schedule`, run the plan, call `update`, and carry out `take_actions` after
    every call. What it is told in the middle of a step counts when the step has ended, as the step
    uses the blocks.
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
        """Make a scheduler over a manager that nobody else uses.

        Args:
            manager: holds the blocks.
            epoch, timing, order, num_groups: of `PrefillSide`.
            token_budget: tokens of a step, at least max_running.
            max_running: prompts that are asked for or computed at a time.
            policy: order of admission; default `Fcfs`.

        Raises:
            ConfigError, CountError: for what is no policy or order, or sizes that cannot work.
        """
        super().__init__(
            manager,
            token_budget=token_budget,
            max_running=max_running,
            policy=policy,
            reserve_tokens=0,
            prefix_cache=True,
            preempt="recompute",
        )
        self._side = PrefillSide(
            manager, epoch=epoch, timing=timing, num_groups=num_groups, order=order
        )
        self._num_groups = num_groups
        self._num_written = 0  # groups of layers of the step in flight
        self._newest: dict[str, _Prompt] = {}  # by request, until it is computed
        self._told: list[Callable[[], None]] = []
        self._actions: list[Post | Offer | Withdraw | Failed] = []
        self._is_draining = False
        self._may_load = True

    @property
    def num_open(self) -> int:
        """Attempts that hold blocks, with those that D has yet to read."""
        return self._side.num_open

    # What is asked of it

    def begin(self, request: Request, peer: NodeId, attempt: int = 1) -> None:
        """Queue the prompt of a request, to be handed over; it ends an older attempt of the same.

        Args:
            request: not changed.
            peer: the decode node.
            attempt: higher than any before of this request.

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
        self._require_fit(prompt)
        if older is not None:
            self.give_up(older.key, "a newer attempt has begun")
        self._newest[key.request_id] = prompt
        self._tell(lambda: self._add(prompt))

    def abort(self, request_id: str) -> bool:
        """Give all attempts of a request up; False if there is none."""
        keys = self._side.keys_of(request_id)
        newest = self._newest.get(request_id)
        if newest is not None and newest.key not in keys:
            keys.append(newest.key)
        for key in keys:
            self.give_up(key, "aborted")
        return bool(keys)

    def give_up(self, key: AttemptKey, reason: str) -> None:
        """End an attempt in any state; nothing happens if it has ended, and `Failed` if not."""
        self._tell(lambda: self._give_up(key, reason))

    def _give_up(self, key: AttemptKey, reason: str) -> None:
        request = self._requests.get(key.request_id)
        if request is not None and request.lease is None and _as_prompt(request).key == key:
            self._drop(key)
            self._actions.append(Failed(key, reason))
        else:
            self._side.abort(key, reason)

    def drain(self, reason: str) -> None:
        """Give every attempt up that holds blocks, and begin no other before `reset_cache`."""
        self._is_draining = True
        self._tell(lambda: self._side.abort_all(reason))

    def reset_cache(self, keep: Collection[bytes] = (), weights_revision: str = "") -> None:
        """Forget all KV, as the weights have changed; prompts that wait are computed with them.

        Call `drain` first, and go on until `num_open` is 0: other nodes may read the blocks.

        Raises:
            HandoffsOpenError: if attempts hold blocks; nothing is changed.
            StepOrderError: in the middle of a step.
        """
        if self._side.num_open:
            raise HandoffsOpenError(self._side.num_open)
        super().reset_cache(keep, weights_revision)
        self._is_draining = False

    # What the network, the transport and the clock say

    def receive(self, peer: NodeId, message: Message) -> None:
        """Take in a message of a decode node."""
        self._tell(lambda: self._side.receive(peer, message))

    def fenced(self, key: AttemptKey) -> None:
        """Say that nobody can read any more what was offered for a withdrawn attempt."""
        self._tell(lambda: self._side.fenced(key))

    def tick(self, now: float) -> None:
        """Let time pass."""
        self._tell(lambda: self._side.tick(now))

    def take_actions(self) -> list[Post | Offer | Withdraw | Failed]:
        """Hand out what is to be done since the last call, in order."""
        self._follow()
        actions, self._actions = self._actions, []
        return actions

    def _tell(self, call: Callable[[], None]) -> None:
        """Do something now, or when the step in flight has ended: it uses the blocks."""
        if self._in_flight is not None:
            self._told.append(call)
            return
        call()
        self._follow()

    def _follow(self) -> None:
        """Drop the requests whose attempts have ended."""
        for action in self._side.take_actions():
            if isinstance(action, Failed):
                self._drop(action.key)
            if not isinstance(action, Compute):  # _may_begin asks for it
                self._actions.append(action)

    def _drop(self, key: AttemptKey) -> None:
        request = self._requests.get(key.request_id)
        if request is not None and _as_prompt(request).key == key:
            super().abort(key.request_id)
            self._forget(_as_prompt(request))

    def _forget(self, prompt: _Prompt) -> None:
        if self._newest.get(prompt.request_id) is prompt:
            del self._newest[prompt.request_id]

    # A step

    def wrote(self, plan: StepPlan, group: int) -> None:
        """Say that a step in flight has written the KV of one group of layers; optional.

        In order of the groups. `update` says so of those that were left out.

        Raises:
            StepOrderError: for another plan, or another group than the next.
        """
        if plan is not self._in_flight or group != self._num_written:
            raise StepOrderError(f"group {group} was written, expected {self._num_written}")
        for chunk in plan.chunks:
            key = _as_prompt(chunk.request).key
            self._side.computed(key, chunk.start + chunk.length, group)
        self._num_written += 1

    def update(self, plan: StepPlan, next_tokens: Sequence[int]) -> list[Request]:
        """Take in the results of the last plan: publish, offer, and commit what is computed.

        Returns:
            The prompts that are computed, each with its first token; their hand-offs go on.

        Raises:
            StepOrderError: for another plan, or results that are not one per chunk.
        """
        self._check_results(plan, next_tokens)
        while self._num_written < self._num_groups:
            self.wrote(plan, self._num_written)
        finished = super().update(plan, next_tokens)
        self._num_written = 0
        for request in finished:
            prompt = _as_prompt(request)
            self._forget(prompt)
            device = min(request.num_hit_tokens, request.num_prompt_tokens - 1)
            hits = Hits(device, request.num_host_hit_tokens, request.num_storage_hit_tokens)
            self._side.sampled(prompt.key, request.output_tokens[0], hits)
        self._follow()
        told, self._told = self._told, []
        for call in told:
            self._tell(call)
        return finished

    def _admit(self, plan: StepPlan) -> None:
        if not self._is_draining:
            super()._admit(plan)

    # Where it differs from other schedulers

    def _waits_for_others(self) -> bool:
        return self._side.num_open > 0 or self._is_draining or super()._waits_for_others()

    def _take_blocks(self, request: Request, match: Match) -> Lease:
        prompt = _as_prompt(request)
        return self._side.begin(prompt.key, prompt.peer, prompt.whole)

    def _may_begin(self, request: Request) -> bool:
        return self._side.may_compute(_as_prompt(request).key) and super()._may_begin(request)

    def _publish(self, request: Request) -> None:
        """The side has done so when the last group of layers was written."""

    def _release(self, request: Request) -> None:
        request.lease = None  # it is the side's

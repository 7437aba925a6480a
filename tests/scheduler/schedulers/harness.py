"""Drives a `MixedScheduler` with a fake model, and checks every step from outside.

The next token of the model is a function of the namespace and all earlier tokens, so the expected
output is known without a scheduler. A ghost memory stands for the block arrays.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from itertools import pairwise
from typing import Any

from radixkv.kvcache import CacheManager
from radixkv.scheduler.mixed import MixedScheduler
from radixkv.scheduler.policy import Policy
from radixkv.scheduler.request import FinishReason, Request, RequestStatus
from radixkv.scheduler.step_plan import Chunk, StepPlan
from radixkv.spec import GhostMemory, prefix_tags

VOCABULARY = 3
"""A small vocabulary, so that requests share generated text as well."""


def next_token(namespace: bytes, tokens: Sequence[int]) -> int:
    """The model: return the next token."""
    return prefix_tags(namespace, tokens)[-1] % VOCABULARY


def alone(request: Request) -> tuple[list[int], FinishReason]:
    """Return the expected output of a request and its finish reason."""
    tokens = request.prompt.tolist()
    outputs: list[int] = []
    while len(outputs) < request.max_new_tokens:
        outputs.append(next_token(request.namespace, [*tokens, *outputs]))
        if outputs[-1] in request.stop_token_ids:
            return outputs, "stop"
    return outputs, "length"


class Harness:
    """A scheduler, a ghost memory, and independent counts."""

    def __init__(
        self,
        num_blocks: int = 32,
        block_size: int = 4,
        *,
        token_budget: int = 8,
        max_running: int = 4,
        policy: Policy | None = None,
        reserve_tokens: int | None = 0,
        prefix_cache: bool = True,
    ) -> None:
        self.manager = CacheManager(num_blocks, block_size)
        self.scheduler = MixedScheduler(
            self.manager,
            token_budget=token_budget,
            max_running=max_running,
            policy=policy,
            reserve_tokens=reserve_tokens,
            prefix_cache=prefix_cache,
        )
        self.ghost = GhostMemory(block_size)
        self.requests: list[Request] = []
        self.finished: list[Request] = []
        self.plans: list[StepPlan] = []
        self.books: Counter[str] = Counter()
        self.seen: Counter[str] = Counter()
        self.hits: dict[Request, int] = {}
        self.computed: dict[Request, int] = {}
        self.decoded: dict[Request, int] = {}
        self.reached: dict[Request, int] = {}

    # Calls

    def add(self, request: Request) -> Request:
        """Submit a request."""
        self.scheduler.add(request)
        self.requests.append(request)
        self.computed[request] = self.decoded[request] = self.reached[request] = 0
        return request

    def submit(
        self, prompt: Sequence[int], max_new_tokens: int = 1, *, name: str = "", priority: int = 0
    ) -> Request:
        """Submit a request with a unique name."""
        name = name or str(len(self.requests))
        return self.add(Request(name, prompt, max_new_tokens, priority=priority))

    def abort(self, request: Request) -> bool:
        """Abort a request, and check the immediate effects."""
        was_live = request.status not in (RequestStatus.FINISHED, RequestStatus.ABORTED)
        assert self.scheduler.abort(request.request_id) == was_live
        if was_live:
            assert request.status is RequestStatus.ABORTED
            assert request.finish_reason == "abort"
        return was_live

    def step(self, during: Callable[[StepPlan], object] = lambda plan: None) -> StepPlan:
        """Run one step; `during` is called between `schedule` and `update`."""
        states = {request: (request.status, request.num_computed) for request in self.requests}
        evicted_blocks = self.manager.stats().evicted_blocks
        plan = self.scheduler.schedule()
        self._check_plan(plan)
        self._count(plan, states)
        during(plan)
        self._compute(plan.chunks)
        in_flight = {chunk.request for chunk in plan.chunks}
        held = sum(request.lease is not None for request in in_flight)
        assert held == len(in_flight), "an abort took the blocks of a running step away"
        if plan.chunks:
            self._update(plan)
        self.plans.append(plan)
        self.seen["evicted"] += self.manager.stats().evicted_blocks > evicted_blocks
        self.settle()
        return plan

    def run(self, max_steps: int = 1000) -> None:
        """Run until every request has ended."""
        steps = 0
        while self.scheduler.has_work:
            assert steps < max_steps, f"work is left after {max_steps} steps"
            self.step()
            steps += 1

    def drain(self) -> None:
        """Run to the end within a bound, then check results, counts and that nothing leaked."""
        # The first in policy order is never preempted: at worst requests run one by one.
        live = [r for r in self.requests if r.finish_reason is None]
        work = sum(r.num_prompt_tokens + r.max_new_tokens for r in live)
        self.run(max_steps=(len(live) + 1) * work)
        for request in self.requests:
            outputs, reason = alone(request)
            if request.finish_reason == "abort":
                count = len(request.output_tokens)
                assert request.output_tokens == outputs[:count], request
                continue
            assert (request.output_tokens, request.finish_reason) == (outputs, reason), request
            if request.num_preemptions == 0:
                num_hit = request.num_hit_tokens
                assert num_hit + self.computed[request] == request.num_prompt_tokens, request
                assert self.decoded[request] == len(outputs) - 1, request
        num_hit = sum(request.num_hit_tokens for request in self.requests)
        assert self.scheduler.stats().hit_tokens == num_hit
        stats = self.manager.stats()
        assert stats.live_leases == stats.private_blocks == 0, stats
        assert stats.free_blocks + stats.idle_blocks == stats.num_blocks, stats
        ended = [r for r in self.requests if r.finish_reason != "abort"]
        assert sorted(map(id, self.finished)) == sorted(map(id, ended))

    # One step, seen from outside

    def _check_plan(self, plan: StepPlan) -> None:
        scheduler = self.scheduler
        chunks = plan.chunks
        assert bool(chunks) == scheduler.has_work
        assert plan.num_tokens == sum(chunk.length for chunk in chunks) <= scheduler.token_budget
        # Every request that holds blocks advances in every step.
        in_plan = {chunk.request for chunk in chunks}
        assert in_plan == set(scheduler.running)
        assert len(in_plan) == len(chunks) <= scheduler.max_running
        for index, chunk in enumerate(chunks):
            request = chunk.request
            assert request.status is RequestStatus.RUNNING
            assert chunk.start == request.num_computed
            assert 1 <= chunk.length <= request.num_tokens - chunk.start
            if index < plan.num_decode:
                assert chunk.length == 1 and chunk.start == request.num_tokens - 1
            assert request.lease is not None
            assert request.lease.num_tokens == request.num_tokens, "a prompt is not whole"
        # A chunk is cut short only by the budget, and then nothing follows it.
        for chunk, _ in pairwise(chunks):
            assert chunk.start + chunk.length == chunk.request.num_tokens
        if chunks and chunks[-1].start + chunks[-1].length < chunks[-1].request.num_tokens:
            assert plan.num_tokens == scheduler.token_budget
        assert not (plan.preempted and plan.admitted), "admitted in a step that preempted"
        for request in plan.preempted:
            assert request.status is RequestStatus.PREEMPTED and request.lease is None
            order = scheduler.policy.order
            assert all(order(request) > order(other) for other in scheduler.running)
        parked = any(r.status is RequestStatus.PREEMPTED for r in scheduler.waiting)
        assert not (parked and any(r.num_preemptions == 0 for r in plan.admitted))

    def _count(self, plan: StepPlan, states: dict[Request, tuple[RequestStatus, int]]) -> None:
        self.books["steps"] += bool(plan.chunks)
        self.books["preemptions"] += len(plan.preempted)
        for request in plan.preempted:
            prefilling = states[request][1] < request.num_prefill_tokens
            self.seen["preempted in prefill" if prefilling else "preempted in decode"] += 1
            self.seen["preempted twice"] += request.num_preemptions == 2
        for request in plan.admitted:
            hit = request.num_computed
            assert request.lease is not None
            assert hit == min(
                request.lease.num_hit_blocks * self.manager.block_size, request.num_tokens - 1
            )
            first = states[request][0] is RequestStatus.WAITING
            self.books["admitted" if first else "resumed"] += 1
            self.books["hit_tokens" if first else "resumed_hit_tokens"] += hit
            self.seen["resumed with a hit"] += bool(hit and not first)
            self.seen["whole hit"] += hit < request.lease.num_hit_blocks * self.manager.block_size
        for index, chunk in enumerate(plan.chunks):
            decodes = index < plan.num_decode
            self.books["decode_tokens" if decodes else "prefill_tokens"] += chunk.length
            end, reached = chunk.start + chunk.length, self.reached[chunk.request]
            if decodes:
                self.decoded[chunk.request] += 1
            else:
                self.computed[chunk.request] += chunk.length
                self.books["recomputed_tokens"] += max(min(end, reached) - chunk.start, 0)
            self.reached[chunk.request] = max(reached, end)

    def _compute(self, chunks: Sequence[Chunk]) -> None:
        """Simulate the device: check the KV before each chunk, then write the chunk."""
        for chunk in chunks:
            table, tags = self._table_and_tags(chunk.request, chunk.start)
            self.ghost.read_sequence(table, tags)
        for chunk in chunks:
            end = chunk.start + chunk.length
            table, tags = self._table_and_tags(chunk.request, end)
            assert chunk.request.lease is not None
            shared = chunk.request.lease.num_shared_blocks * self.manager.block_size
            self.ghost.write_sequence(table, tags, start=max(chunk.start, shared))
        for chunk in chunks:
            end = chunk.start + chunk.length
            self.ghost.read_sequence(*self._table_and_tags(chunk.request, end))

    def _table_and_tags(self, request: Request, end: int) -> tuple[list[int], list[int]]:
        assert request.lease is not None, f"{request!r} is computed without blocks"
        tags = prefix_tags(request.namespace, request.tokens[:end].tolist())
        return request.lease.block_table.tolist(), tags

    def _update(self, plan: StepPlan) -> None:
        tokens = [
            next_token(chunk.request.namespace, chunk.request.tokens.tolist())
            if chunk.start + chunk.length == chunk.request.num_tokens
            else -1  # after a partial prompt: must not be used
            for chunk in plan.chunks
        ]
        finished = self.scheduler.update(plan, tokens)
        assert all(request.status is RequestStatus.FINISHED for request in finished)
        self.finished += finished

    def settle(self) -> None:
        """Check invariants between calls."""
        self.manager.check()
        running, waiting = self.scheduler.running, self.scheduler.waiting
        order = self.scheduler.policy.order
        tried = [(r.status is not RequestStatus.PREEMPTED, order(r)) for r in waiting]
        assert tried == sorted(tried), "preempted ones first, then in the policy's order"
        for request in self.requests:
            holds_blocks = request.status is RequestStatus.RUNNING
            assert (request.lease is not None) == holds_blocks, request
            assert (request in running) == holds_blocks
            queued = request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)
            assert (request in waiting) == queued
            assert request.match is None or queued, "a match keeps nodes of the tree alive"
            if holds_blocks:
                self.ghost.read_sequence(*self._table_and_tags(request, request.num_computed))
        stats = asdict(self.scheduler.stats())
        self.seen["waited for a leader"] = stats.pop("waits_for_leader")
        expected = {name: self.books[name] for name in stats}
        assert stats == expected
        assert self.manager.stats().live_leases == len(running)


# Helpers

PREFIX = list(range(100, 112))
"""Three blocks of 4."""


def chunks(plan: StepPlan) -> list[tuple[str, int, int]]:
    """Return id, start and length of each chunk."""
    return [(chunk.request.request_id, chunk.start, chunk.length) for chunk in plan.chunks]


def names(requests: Iterable[Request]) -> list[str]:
    """Return the ids of requests."""
    return [request.request_id for request in requests]


def pressed(**options: Any) -> Harness:
    """Return a harness with six blocks for three requests that need three each in the end."""
    sizes: dict[str, Any] = {"num_blocks": 6, "block_size": 2, "token_budget": 8}
    harness = Harness(**{**sizes, **options})
    for name in "abc":
        harness.submit([ord(name), 1, 2], 4, name=name)
    return harness

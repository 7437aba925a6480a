"""Drives a `MixedScheduler` over tiers with a fake model, and checks every step from outside."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from radixkv.kvcache import CacheManager
from radixkv.kvcache.storage.keys import StorageNamespace
from radixkv.kvcache.tiers.host_tier import HostConfig
from radixkv.kvcache.tiers.operations import OpKind
from radixkv.scheduler.mixed import MixedScheduler
from radixkv.scheduler.request import Request, RequestStatus
from radixkv.scheduler.step_plan import Chunk, StepPlan
from radixkv.spec import prefix_tags

from .copier import Copier, Fate, Memories, held_when

VOCABULARY = 3


def storage_namespace(block_size: int, revision: str = "0") -> StorageNamespace:
    return StorageNamespace("made up", revision, "float32", block_size, (0, 1), (0, 1))


class TierHarness:
    """A scheduler over tiers; each step is checked against the memories."""

    def __init__(
        self,
        num_blocks: int = 6,
        block_size: int = 2,
        *,
        host: HostConfig | None = None,
        storage: bool = False,
        memories: Memories | None = None,
        **options: Any,
    ) -> None:
        self.manager = CacheManager(
            num_blocks,
            block_size,
            host=host or HostConfig(32, "back"),
            storage=storage_namespace(block_size) if storage else None,
        )
        sizes = {"token_budget": 8, "max_running": 4, "reserve_tokens": 0}
        self.scheduler = MixedScheduler(self.manager, **{**sizes, **options})
        self.memories = memories or Memories(block_size)
        self.copier = Copier(self.manager, self.memories)
        self.requests: list[Request] = []
        self.weights = b""
        self._tags: dict[Request, tuple[bytes, list[int]]] = {}

    # Calls

    def add(self, request: Request) -> Request:
        self.scheduler.add(request)
        self.requests.append(request)
        return request

    def submit(self, prompt: Sequence[int], max_new_tokens: int = 1, *, name: str = "") -> Request:
        return self.add(Request(name or str(len(self.requests)), list(prompt), max_new_tokens))

    def reset(self, weights: bytes, keep: Collection[bytes] = ()) -> None:
        self.weights = weights
        self.scheduler.reset_cache(keep, weights.decode())

    def step(
        self,
        during: Callable[[StepPlan], object] = lambda plan: None,
        before: Callable[[StepPlan], object] = lambda plan: None,
    ) -> StepPlan:
        """Deliver, schedule, dispatch, compute, update; with hooks before the dispatch and during
        the computation.
        """
        self.copier.deliver()
        plan = self.scheduler.schedule()
        self.check_plan(plan)
        before(plan)
        self.copier.dispatch()
        during(plan)
        if plan.chunks:
            tokens = [self.compute(chunk) for chunk in plan.chunks]
            self.scheduler.update(plan, tokens)
        return plan

    def run(self, max_steps: int = 2000) -> None:
        """Run until every request has ended; complete a held copy when all requests wait."""
        for _ in range(max_steps):
            if not self.scheduler.has_work:
                return
            plan = self.step()
            self.manager.check()
            if not plan.chunks and self.copier.flights:
                self.copier.end(self.copier.flights[0])
        raise AssertionError(f"work is left after {max_steps} steps: {self.requests}")

    def drain(self) -> None:
        """Run to the end, complete every copy, and check for leaks."""
        self.run()
        for _ in range(100):
            self.copier.dispatch()
            for flight in list(self.copier.flights):
                self.copier.end(flight)
        self.manager.check()
        stats = self.manager.stats()
        assert stats.tiers is not None
        assert stats.live_leases == stats.private_blocks == 0, stats
        assert stats.free_blocks + stats.idle_blocks == stats.num_blocks, stats
        assert stats.tiers.open_operations == stats.tiers.quarantined_operations == 0, stats
        assert stats.tiers.parked == 0, stats
        below = stats.tiers.host_free_blocks + stats.tiers.host_cached_blocks
        assert below == stats.tiers.host_blocks, stats

    # One step, seen from outside

    def check_plan(self, plan: StepPlan) -> None:
        scheduler = self.scheduler
        assert plan.num_tokens <= scheduler.token_budget
        assert len(scheduler.running) <= scheduler.max_running
        planned = {chunk.request for chunk in plan.chunks}
        assert len(planned) == len(plan.chunks)
        for request in self.requests:
            holds = request.status in (RequestStatus.RUNNING, RequestStatus.LOADING)
            assert (request.lease is not None) == holds == (request in scheduler.running), request
            loads = request.lease is not None and request.lease.loading is not None
            assert loads == (request.status is RequestStatus.LOADING), request
            assert not (loads and request in planned), "computed while it is loaded"
            if request.parked is not None:
                assert request.status is RequestStatus.PREEMPTED, request
        if (transfers := scheduler._batch._transfers) is not None:
            running = [each for each in self.requests if each.status is RequestStatus.RUNNING]
            ahead = transfers._ahead.keys() & {each.request_id for each in running}
            assert not ahead, f"blocks count as prefetched ahead for {ahead}, which run"
        if not plan.chunks and scheduler.has_work:
            assert self.manager.tiers is not None and self.manager.tiers.num_open_operations

    def tags(self, request: Request) -> list[int]:
        """Return the tags of its tokens under the current weights."""
        weights, tags = self._tags.get(request, (self.weights, []))
        if weights != self.weights or len(tags) != request.num_tokens:
            tags = prefix_tags(self.weights + request.namespace, request.tokens.tolist())
            self._tags[request] = self.weights, tags
        return tags

    def compute(self, chunk: Chunk) -> int:
        """Write the KV of a chunk, check all KV up to its end, and return the next token."""
        request, end, size = chunk.request, chunk.start + chunk.length, self.manager.block_size
        assert request.lease is not None, "a step computes a request without blocks"
        table, tags = request.lease.block_table.tolist(), self.tags(request)
        first = max(chunk.start, request.lease.num_shared_blocks * size)
        for position in range(first, end):
            self.memories.write(table[position // size], position % size, tags[position])
        for index, block in enumerate(table[: -(-end // size)]):
            part = tuple(tags[index * size : min((index + 1) * size, end)])
            found = self.memories.device.get(block, ())[: len(part)]
            assert found == part, f"wrong KV in block {index} of {request!r}"
        return tags[end - 1] % VOCABULARY if end == request.num_tokens else -1


def alone(harness: TierHarness, request: Request) -> list[int]:
    """Return the expected output of a request without stop tokens."""
    tokens = request.prompt.tolist()
    for _ in range(request.max_new_tokens):
        tokens.append(prefix_tags(harness.weights + request.namespace, tokens)[-1] % VOCABULARY)
    return tokens[request.num_prompt_tokens :]


# Helpers


def pressed(num_blocks: int = 6, **options) -> TierHarness:
    """Return a harness with six blocks for three requests that need three each in the end.

    Copies to the host end when the test says so.
    """
    harness = TierHarness(num_blocks, **{"preempt": "host", **options})
    harness.copier.fate = held_when(OpKind.DEVICE_TO_HOST)
    for name in "abc":
        harness.submit([ord(name), 1, 2], 4, name=name)
    return harness


def preempted(harness: TierHarness) -> Request:
    """Run until a request is preempted, and return it."""
    while not (plan := harness.step()).preempted:
        pass
    [victim] = plan.preempted
    return victim


def end_all(harness: TierHarness) -> None:
    """Complete all copies in flight and all later ones."""
    for flight in list(harness.copier.flights):
        harness.copier.end(flight)
    harness.copier.fate = lambda operation: Fate()

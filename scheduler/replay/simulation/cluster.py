"""Simulation of a cluster of prefill and decode nodes: everything but the clock is real.

Gateway, router, hand-off protocol, schedulers and managers are those of production::

    arrival ─► gateway ─► router ─► P: steps ── messages ──► D: transfers ─► steps ─► answer
                  ▲                                          │
                  └──────────── retry ◄── no room ◄──────────┘

A step takes what the cost model predicts, a message `message_s`, and a transfer the bytes that D
lacks over the bandwidth between nodes. A node takes part in one transfer at a time. Each chunk is
sent while the next is computed. Nothing fails here: the specification of the hand-off (`radixkv
fuzz --what handoff`) has the failures.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from typing import Any, Literal, TypeAlias

from ....kvcache.errors import RequestTooLargeError
from ....kvcache.manager import CacheManager
from ...decode import DecodeScheduler
from ...gateway.retries import Answer, Begin, RequestRetrier
from ...gateway.router import CacheSize, Route, Router
from ...handoff import (
    AttemptKey,
    Finished,
    Message,
    Order,
    Post,
    PrefillFailed,
    Pull,
    Started,
    Timing,
    Withdraw,
)
from ...prefill import PrefillScheduler
from ...request import Request
from ..checks import Check
from ..progress import Progress, no_progress
from ..trace import Trace, tokens
from .accounting import ClusterAccounts
from .cost_model import CostModel
from .latency import Latencies, summarize_latencies
from .simulated_node import RoleResult, SimulatedNode, summarize_role
from .single_node import FIRST_OUTPUT_TOKEN, SimulationConfig

_BACKOFF_S = 0.25
_NEVER_S = 1e12
_Node: TypeAlias = SimulatedNode[PrefillScheduler | DecodeScheduler]
_TIMING = Timing(retry_s=10.0, silence_s=100.0, transfer_s=1e6, remember_s=10.0)
"""Long timeouts: no message is lost here, and a transfer may queue behind many others."""

_NODE = SimulationConfig()


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """Number and configuration of the nodes.

    Attributes:
        num_prefill: Number of prefill nodes.
        num_decode: Number of decode nodes.
        node: Configuration of every node, without a host tier; ``reserve_tokens`` applies to the
            decode nodes.
        order: Whether a decode node grants blocks before the prompt is computed; see
            `PrefillSide`.
    """

    num_prefill: int
    num_decode: int
    node: SimulationConfig = _NODE
    order: Order = "early"


@dataclass(frozen=True, slots=True)
class ClusterResult:
    """Result of a cluster simulation.

    Attributes:
        finished: Requests answered in full.
        refused: Requests that need more blocks than a pool has.
        prompt_tokens: Prompt tokens of the finished requests.
        hit_tokens: The part of these found on the prefill nodes.
        own_tokens: Prompt tokens found on the decode nodes, and not sent.
        sent_blocks, sent_bytes: Transfers from prefill to decode nodes.
        busy_refusals: Times that a decode node had no room and the request was retried.
        preemptions: Preemptions on the decode nodes, for lack of blocks.
        recomputed_tokens: Tokens computed again after these.
        num_blocks: Pool size of each node.
        prefill, decode: Counts by role.
        simulated_s: Simulated time from the first arrival to the last token.
        latencies: Latency distributions and goodput. The first token counts once a decode node has
            the whole prompt.
        scheduler_us_per_step: Real CPU time of schedule and update; differs from run to run.
        wall_s: Real time of the simulation; differs from run to run.
        checks: Checks of the accounts.
    """

    finished: int
    refused: int
    prompt_tokens: int
    hit_tokens: int
    own_tokens: int
    sent_blocks: int
    sent_bytes: float
    busy_refusals: int
    preemptions: int
    recomputed_tokens: int
    num_blocks: int
    prefill: RoleResult
    decode: RoleResult
    simulated_s: float
    latencies: Latencies
    scheduler_us_per_step: float
    wall_s: float
    checks: tuple[Check, ...]


def simulate_cluster(
    trace: Trace,
    costs: CostModel,
    config: ClusterConfig,
    progress: Progress = no_progress,
    stage: str = "prefill and decode apart",
) -> ClusterResult:
    """Replay a trace over prefill and decode nodes in simulated time.

    Raises:
        CostError: If the model leaves no room for KV blocks.
    """
    started = time.perf_counter()
    cluster = _Cluster(trace, costs, config)
    num_requests = len(trace.requests)
    while cluster.advance():
        progress(stage, cluster.accounts.answers.num_answered, num_requests)
    progress(stage, num_requests, num_requests)
    cluster.drain()
    return cluster.result(time.perf_counter() - started)


class _Cluster:
    """State of a simulation between two events."""

    def __init__(self, trace: Trace, costs: CostModel, config: ClusterConfig) -> None:
        self.costs, self.config = costs, config
        block_size = config.node.block_size
        self.bytes_per_block = costs.model.kv_bytes_per_token * block_size
        self.num_blocks = config.node.num_blocks or costs.num_blocks(block_size)
        prefill = {f"p{i}": self._make_node("prefill") for i in range(config.num_prefill)}
        decode = {f"d{i}": self._make_node("decode") for i in range(config.num_decode)}
        self.nodes: dict[str, _Node] = {**prefill, **decode}
        size = CacheSize(self.num_blocks, block_size)
        self.router = Router(
            prefill=dict.fromkeys(prefill, size), decode=dict.fromkeys(decode, size)
        )
        self.retrier = RequestRetrier(max_attempts=1, backoff_s=_BACKOFF_S, request_s=_NEVER_S)
        self.accounts = ClusterAccounts(block_size)
        self.requests: dict[str, Request] = {}
        self.routes: dict[AttemptKey, Route] = {}
        self.refused_by: dict[str, str] = {}
        self.changed: set[str] = set()
        self.busy_refusals = 0
        self.next_token = FIRST_OUTPUT_TOKEN
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._num_events = count()
        # A stable sort: equal timestamps keep the file's order.
        self.arrivals = sorted(enumerate(trace.requests), key=lambda item: item[1].timestamp_ms)
        self.next_arrival = 0
        self.first_arrival_s = self.clock_s = self.arrivals[0][1].timestamp_ms / 1e3
        self.last_answer_s = self.first_arrival_s
        self._is_ticking = False
        self._at(self.clock_s, self._arrive)

    def _make_node(self, role: Literal["prefill", "decode"]) -> _Node:
        node = self.config.node
        manager = CacheManager(self.num_blocks, node.block_size)
        options: dict[str, Any] = {
            "epoch": 1,
            "timing": _TIMING,
            "token_budget": node.token_budget,
            "max_running": node.max_running,
        }
        if role == "prefill":
            return _Node(PrefillScheduler(manager, order=self.config.order, **options))
        return _Node(DecodeScheduler(manager, reserve_tokens=node.reserve_tokens, **options))

    # The clock

    def _at(self, when_s: float, event: Callable[[], None]) -> None:
        heappush(self._events, (when_s, next(self._num_events), event))

    def advance(self) -> bool:
        """Process the next event and its effects; False when every request is answered."""
        if self.is_answered:
            return False
        assert self._events, "requests are pending, but no event is"
        self._next_event()
        return True

    @property
    def is_answered(self) -> bool:
        """Whether every request is answered."""
        return self.accounts.answers.num_answered == len(self.arrivals)

    def drain(self) -> None:
        """Process the remaining events: the last answer is not the last message."""
        self.last_answer_s = self.clock_s
        while self._events:
            self._next_event()

    def _next_event(self) -> None:
        self.clock_s, _, event = heappop(self._events)
        event()
        self._settle()

    def _tick(self) -> None:
        for name, node in self.nodes.items():
            node.scheduler.tick(self.clock_s)
            self.changed.add(name)
        self._is_ticking = self.retrier.num_open > 0
        if self._is_ticking:
            self._at(self.clock_s + _TIMING.retry_s, self._tick)

    def _arrive(self) -> None:
        index, line = self.arrivals[self.next_arrival]
        request = Request(str(index), tokens(line), line.output_length)
        self.requests[request.request_id] = request
        self.accounts.answers.arrive(request, self.clock_s)
        self.retrier.tick(self.clock_s)
        self.retrier.submit(request.request_id)
        self.retrier.tick(self.clock_s)
        if not self._is_ticking:  # nothing has happened since, however long ago that was
            self._tick()
        self.next_arrival += 1
        if self.next_arrival < len(self.arrivals):
            self._at(self.arrivals[self.next_arrival][1].timestamp_ms / 1e3, self._arrive)

    # Effects of an event

    def _settle(self) -> None:
        """Carry out the actions of retrier and schedulers, and begin every step that can begin."""
        while True:
            while actions := self.retrier.take_actions():  # a refused one is answered by another
                for action in actions:
                    match action:
                        case Begin(key):
                            self._begin(key)
                        case Answer(request_id, tokens=None):
                            self.accounts.answers.refuse(request_id)
            if not self.changed:
                return
            name = min(self.changed)
            self.changed.remove(name)
            node = self.nodes[name]
            if not node.is_busy:
                self._begin_step(name, node)
            for node_action in node.scheduler.take_actions():
                self._act(name, node_action)

    def _begin_step(self, name: str, node: _Node) -> None:
        plan = node.schedule()
        if not plan.num_chunks:
            return
        step_s = self.costs.plan_s(plan)
        node.begin_step(step_s)

        def end() -> None:
            num_chunks = plan.num_chunks
            node.end_step(plan, range(self.next_token, self.next_token + num_chunks))
            self.next_token += num_chunks
            self.changed.add(name)

        self._at(self.clock_s + step_s, end)

    def _begin(self, key: AttemptKey) -> None:
        request = self.requests[key.request_id]
        avoid = [self.refused_by[key.request_id]] if key.request_id in self.refused_by else []
        try:
            route = self.router.route(key, request.prompt, avoid=avoid)
            scheduler = self.nodes[route.prefill].scheduler
            assert isinstance(scheduler, PrefillScheduler), f"{route.prefill} is not a prefill node"
            scheduler.begin(request, route.decode, key.attempt)
        except RequestTooLargeError as large:
            self.retrier.prefill_failed(key, str(large), is_final=True)
            return
        self.routes[key] = route
        self.changed.add(route.prefill)

    def _act(self, name: str, action: object) -> None:
        match action:
            case Post(peer, message):
                self._at(
                    self.clock_s + self.costs.step.message_s,
                    lambda: self._deliver(name, peer, message),
                )
            case Pull():
                self._pull(name, action)
            case Withdraw(key):
                scheduler = self.nodes[name].scheduler
                assert isinstance(scheduler, PrefillScheduler), f"{name} is not a prefill node"
                scheduler.fenced(key)
                self.changed.add(name)
            case PrefillFailed():
                self._fail(action)
            case Started(key, request, num_cached_tokens):
                self.router.computed(key)
                self.accounts.start(request, num_cached_tokens, self.clock_s)
                self.retrier.started(key)
            case Finished(key, request):
                self.router.finished(key, request.tokens[:-1])
                del self.routes[key]
                self.accounts.finish(request, self.clock_s)
                self.retrier.finished(key, tuple(request.output_tokens))

    def _deliver(self, name: str, peer: str, message: Message) -> None:
        self.nodes[peer].scheduler.receive(name, message)
        self.changed.add(peer)

    def _pull(self, name: str, pull: Pull) -> None:
        ends = (self.nodes[name], self.nodes[pull.peer])
        begins_s = max(self.clock_s, *(node.link_free_s for node in ends))
        seconds = len(pull.blocks) * self.bytes_per_block / self.costs.network_bytes_per_s
        for node in ends:
            node.link_free_s = begins_s + seconds
        self.accounts.sent_blocks += len(pull.blocks)

        def arrived() -> None:
            scheduler = self.nodes[name].scheduler
            assert isinstance(scheduler, DecodeScheduler), f"{name} is not a decode node"
            scheduler.pulled(pull.part_id)
            self.changed.add(name)

        self._at(begins_s + seconds, arrived)

    def _fail(self, failed: PrefillFailed) -> None:
        route = self.routes.pop(failed.key)
        self.router.finished(failed.key)
        self.busy_refusals += failed.is_busy
        self.refused_by[failed.key.request_id] = route.decode
        self.retrier.tick(self.clock_s)
        self.retrier.prefill_failed(
            failed.key, failed.reason, is_final=failed.is_final, is_busy=failed.is_busy
        )
        self._at(self.clock_s + _BACKOFF_S, lambda: self.retrier.tick(self.clock_s))

    # Result

    def result(self, wall_s: float) -> ClusterResult:
        """Return the result; call it when every request is answered."""
        node, nodes = self.config.node, self.nodes.values()
        accounts, answers = self.accounts, self.accounts.answers
        simulated_s = self.last_answer_s - self.first_arrival_s
        prefill = [each for each in nodes if isinstance(each.scheduler, PrefillScheduler)]
        decode = [each for each in nodes if isinstance(each.scheduler, DecodeScheduler)]
        preemptions = sum(each.preemptions for each in decode)
        unexpected = preemptions if node.reserve_tokens is None else None
        managers = [each.scheduler.manager for each in nodes]
        stats = [each.scheduler.stats() for each in decode]
        steps = sum(each.steps for each in nodes)
        return ClusterResult(
            finished=len(answers.times),
            refused=answers.refused,
            prompt_tokens=answers.prompt_tokens,
            hit_tokens=accounts.hit_tokens,
            own_tokens=accounts.own_tokens,
            sent_blocks=accounts.sent_blocks,
            sent_bytes=accounts.sent_blocks * self.bytes_per_block,
            busy_refusals=self.busy_refusals,
            preemptions=preemptions,
            recomputed_tokens=sum(each.recomputed_tokens for each in stats),
            num_blocks=self.num_blocks,
            prefill=summarize_role(prefill, simulated_s),
            decode=summarize_role(decode, simulated_s),
            simulated_s=simulated_s,
            latencies=summarize_latencies(
                answers.times, answers.refused, simulated_s, node.slo_ttft_s, node.slo_tpot_s
            ),
            scheduler_us_per_step=sum(n.scheduler_s for n in nodes) / max(steps, 1) * 1e6,
            wall_s=wall_s,
            checks=tuple(accounts.checks(len(self.arrivals), managers, unexpected)),
        )

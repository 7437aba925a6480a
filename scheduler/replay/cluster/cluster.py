"""Discrete-event replay over prefill and decode nodes: only the clock is made up.

Front desk, router, hand-off protocol, schedulers and managers are the real ones::

    arrival ─► front desk ─► router ─► P: steps ── messages ──► D: transfers ─► steps ─► answer
                    ▲                                           │
                    └────────────── later ◄── no room ◄─────────┘

A step takes what the cost model says of it; a message `message_s`; a transfer the bytes that D
lacks over the bandwidth between nodes, each of which has part in one transfer at a time. A chunk is
sent while the next is computed. Nothing fails here: what does is the matter of
`radixkv.scheduler.handoff_simulation`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count

from ....kvcache.errors import RequestTooLargeError
from ...decode import DecodeScheduler
from ...handoff import (
    Answer,
    Begin,
    Failed,
    Finished,
    FrontDesk,
    Key,
    Message,
    Post,
    Pull,
    Started,
    Withdraw,
)
from ...handoff.router import Route, Router
from ...prefill import PrefillScheduler
from ...request import Request
from ..progress import Progress, no_progress
from ..simulation.cost_model import CostModel
from ..simulation.latency import summarize_latencies
from ..simulation.plan_cost import plan_s
from ..simulation.simulation import FIRST_OUTPUT_TOKEN
from ..trace import Trace, tokens
from .ledger import ClusterLedger
from .node import (
    TIMING,
    Node,
    make_decode,
    make_prefill,
    sum_up,
)
from .result import ClusterConfig, ClusterResult

_BACKOFF_S = 0.25
_NEVER_S = 1e12


def simulate_cluster(
    trace: Trace,
    costs: CostModel,
    config: ClusterConfig,
    progress: Progress = no_progress,
    stage: str = "prefill and decode apart",
) -> ClusterResult:
    """Replay a trace over prefill and decode nodes in simulated time.

    Raises:
        CostError: if the model leaves no room for KV blocks.
    """
    started = time.perf_counter()
    cluster = _Cluster(trace, costs, config)
    num_requests = len(trace.requests)
    while cluster.step():
        progress(stage, cluster.ledger.num_answered, num_requests)
    progress(stage, num_requests, num_requests)
    cluster.finish()
    return cluster.result(time.perf_counter() - started)


class _Cluster:
    """The state of a simulation between two events."""

    def __init__(self, trace: Trace, costs: CostModel, config: ClusterConfig) -> None:
        self.costs, self.config = costs, config
        block_size = config.node.block_size
        self.bytes_per_block = costs.model.kv_bytes_per_token * block_size
        self.num_blocks = config.node.num_blocks or costs.num_blocks(block_size)
        prefill = {
            f"p{i}": make_prefill(config, self.num_blocks) for i in range(config.num_prefill)
        }
        decode = {f"d{i}": make_decode(config, self.num_blocks) for i in range(config.num_decode)}
        self.nodes: dict[str, Node] = {**prefill, **decode}
        self.router = Router(
            block_size,
            prefill=dict.fromkeys(prefill, self.num_blocks),
            decode=dict.fromkeys(decode, self.num_blocks),
        )
        self.front = FrontDesk(max_attempts=1, backoff_s=_BACKOFF_S, request_s=_NEVER_S)
        self.ledger = ClusterLedger(block_size)
        self.requests: dict[str, Request] = {}
        self.routes: dict[Key, Route] = {}
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
        self._at(self.clock_s, self._arrive)
        self._at(self.clock_s, self._tick)

    # The clock

    def _at(self, when_s: float, event: Callable[[], None]) -> None:
        heappush(self._events, (when_s, next(self._num_events), event))

    def step(self) -> bool:
        """Let the next event happen, and what follows at once; False when all is answered."""
        if self.is_answered:
            return False
        assert self._events, "requests are open, and nothing will happen"
        self._next_event()
        return True

    @property
    def is_answered(self) -> bool:
        """Whether every request is."""
        return self.ledger.num_answered == len(self.arrivals)

    def finish(self) -> None:
        """Let what is under way end: the last answer is not the last message."""
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
        if not self.is_answered:
            self._at(self.clock_s + TIMING.retry_s, self._tick)

    def _arrive(self) -> None:
        index, line = self.arrivals[self.next_arrival]
        request = Request(str(index), tokens(line), line.output_length)
        self.requests[request.request_id] = request
        self.ledger.arrive(request, self.clock_s)
        self.front.tick(self.clock_s)
        self.front.submit(request.request_id)
        self.front.tick(self.clock_s)
        self.next_arrival += 1
        if self.next_arrival < len(self.arrivals):
            self._at(self.arrivals[self.next_arrival][1].timestamp_ms / 1e3, self._arrive)

    # What follows

    def _settle(self) -> None:
        """Carry out what anybody wants done, and begin a step wherever there is one to begin."""
        while True:
            for wanted in self.front.take_actions():
                match wanted:
                    case Begin(key):
                        self._begin(key)
                    case Answer(request_id, tokens=None):
                        self.ledger.refuse(request_id)
            if not self.changed:
                return
            name = min(self.changed)
            self.changed.remove(name)
            node = self.nodes[name]
            if not node.is_busy:
                self._step(name, node)
            for action in node.scheduler.take_actions():
                self._act(name, action)

    def _step(self, name: str, node: Node) -> None:
        plan = node.schedule()
        if not plan.chunks:
            return
        step_s = plan_s(self.costs, plan)
        node.begin(step_s)

        def end() -> None:
            num_chunks = len(plan.chunks)
            node.end(plan, range(self.next_token, self.next_token + num_chunks))
            self.next_token += num_chunks
            self.changed.add(name)

        self._at(self.clock_s + step_s, end)

    def _begin(self, key: Key) -> None:
        request = self.requests[key.request_id]
        avoid = [self.refused_by[key.request_id]] if key.request_id in self.refused_by else []
        try:
            route = self.router.route(key, request.prompt, avoid=avoid)
            scheduler = self.nodes[route.prefill].scheduler
            assert isinstance(scheduler, PrefillScheduler), f"{route.prefill} is no prefill node"
            scheduler.begin(request, route.decode, key.attempt)
        except RequestTooLargeError as large:
            self.front.prefill_failed(key, str(large), is_final=True)
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
                assert isinstance(scheduler, PrefillScheduler), f"{name} offers nothing"
                scheduler.fenced(key)
                self.changed.add(name)
            case Failed():
                self._fail(action)
            case Started(key, request, num_own_tokens):
                self.router.computed(key)
                self.ledger.start(request, num_own_tokens, self.clock_s)
                self.front.started(key)
            case Finished(key, request):
                self.router.finished(key, request.tokens[:-1])
                del self.routes[key]
                self.ledger.finish(request, self.clock_s)
                self.front.finished(key, tuple(request.output_tokens))

    def _deliver(self, name: str, peer: str, message: Message) -> None:
        self.nodes[peer].scheduler.receive(name, message)
        self.changed.add(peer)

    def _pull(self, name: str, pull: Pull) -> None:
        ends = (self.nodes[name], self.nodes[pull.peer])
        begins_s = max(self.clock_s, *(node.link_free_s for node in ends))
        seconds = len(pull.blocks) * self.bytes_per_block / self.costs.network_bytes_per_s
        for node in ends:
            node.link_free_s = begins_s + seconds
        self.ledger.sent_blocks += len(pull.blocks)

        def arrived() -> None:
            scheduler = self.nodes[name].scheduler
            assert isinstance(scheduler, DecodeScheduler), f"{name} pulls nothing"
            scheduler.pulled(pull.ticket)
            self.changed.add(name)

        self._at(begins_s + seconds, arrived)

    def _fail(self, failed: Failed) -> None:
        route = self.routes.pop(failed.key)
        self.router.finished(failed.key)
        self.busy_refusals += failed.is_busy
        self.refused_by[failed.key.request_id] = route.decode
        self.front.tick(self.clock_s)
        self.front.prefill_failed(
            failed.key, failed.reason, is_final=failed.is_final, is_busy=failed.is_busy
        )
        self._at(self.clock_s + _BACKOFF_S, lambda: self.front.tick(self.clock_s))

    # At the end

    def result(self, wall_s: float) -> ClusterResult:
        """Sum up; called when every request is answered."""
        node, ledger, nodes = self.config.node, self.ledger, self.nodes.values()
        simulated_s = self.last_answer_s - self.first_arrival_s
        prefill = [each for each in nodes if isinstance(each.scheduler, PrefillScheduler)]
        decode = [each for each in nodes if isinstance(each.scheduler, DecodeScheduler)]
        preemptions = sum(each.preemptions for each in decode)
        must_be_none = preemptions if node.reserve_tokens is None else None
        managers = [each.scheduler.manager for each in nodes]
        stats = [each.scheduler.stats() for each in decode]
        steps = sum(each.steps for each in nodes)
        return ClusterResult(
            finished=len(ledger.times),
            refused=ledger.refused,
            prompt_tokens=ledger.prompt_tokens,
            hit_tokens=ledger.hit_tokens,
            own_tokens=ledger.own_tokens,
            sent_blocks=ledger.sent_blocks,
            sent_bytes=ledger.sent_blocks * self.bytes_per_block,
            busy_refusals=self.busy_refusals,
            preemptions=preemptions,
            recomputed_tokens=sum(each.recomputed_tokens for each in stats),
            num_blocks=self.num_blocks,
            prefill=sum_up(prefill, simulated_s),
            decode=sum_up(decode, simulated_s),
            simulated_s=simulated_s,
            latencies=summarize_latencies(
                ledger.times, ledger.refused, simulated_s, node.slo_ttft_s, node.slo_tpot_s
            ),
            scheduler_us_per_step=sum(n.scheduler_s for n in nodes) / max(steps, 1) * 1e6,
            wall_s=wall_s,
            checks=tuple(ledger.checks(len(self.arrivals), managers, must_be_none)),
        )

"""Simulation of a single node: the real manager and scheduler on a virtual clock.

Requests arrive at the trace's timestamps. Each turn of the loop plans a step, advances the clock by
its cost in the cost model, and returns made-up tokens::

    copies, arrivals <= clock --> add --> schedule --> clock += cost(plan) --> update --> finished

With tiers below the device, copies are queued in simulated time (`tier_links`). While every request
waits for copies, the clock advances to the end of the next copy or to the next arrival.

Prompts are expanded from hash ids (`trace.tokens`). Output tokens are negative and never repeat, so
they never hit. In real conversations the next turn contains the last answer, but traces do not
record answers. Results depend only on the trace and the configuration, except the CPU time of the
scheduler.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from ....kvcache.errors import RequestTooLargeError
from ....kvcache.manager import CacheManager
from ....kvcache.tiers.host_tier import HostConfig
from ...batching.preemption import PreemptMode
from ...mixed import MixedScheduler
from ...request import Request
from ..checks import Check, check_all_blocks_returned, check_all_host_blocks_returned
from ..progress import Progress, no_progress
from ..trace import Trace, tokens
from .accounting import NodeAccounts
from .cost_model import CostModel
from .latency import Latencies, summarize_latencies
from .simulated_node import SimulatedNode, summarize_role
from .simulated_storage import SimulatedStorage, simulated_namespace
from .tier_links import TierCounts, TierLinks

FIRST_OUTPUT_TOKEN = -(2**31)


@dataclass(frozen=True, slots=True)
class SimulationConfig:
    """Configuration of the simulated engine, and its SLO.

    Attributes:
        block_size: Tokens per block.
        num_blocks: Size of the pool; None for the number that fits beside the weights.
        token_budget, max_running, reserve_tokens, prefix_cache, preempt: As in `MixedScheduler`.
        host: Host tier; None for none.
        storage_blocks: Size of the storage below the host; None for none.
        slo_ttft_s, slo_tpot_s: Limits on the time to first token and on the mean time per token
            after it. Source of the figures: Mooncake, FAST'25.
    """

    block_size: int = 16
    num_blocks: int | None = None
    token_budget: int = 2048
    max_running: int = 256
    reserve_tokens: int | None = 512
    prefix_cache: bool = True
    host: HostConfig | None = None
    storage_blocks: int | None = None
    preempt: PreemptMode = "recompute"
    slo_ttft_s: float = 30.0
    slo_tpot_s: float = 0.1


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """Result of a single-node simulation.

    Attributes:
        finished: Requests answered in full.
        refused: Requests that need more blocks than the pool has.
        prompt_tokens: Prompt tokens of the finished requests.
        hit_tokens, host_hit_tokens, storage_hit_tokens: The part of these that hit on the device,
            on the host and in storage, at first admission; the rest was computed.
        recomputed_tokens: Tokens computed again after a preemption.
        preemptions: Preemptions for lack of blocks.
        steps: Engine steps.
        mean_budget_use: Mean fraction of the token budget that a step fills; near 1, prompts queue.
        num_blocks: Size of the pool.
        mean_occupancy: Mean fraction of the pool that running requests hold during steps.
        peak_occupancy: The same at its peak.
        evicted_blocks: Cached blocks evicted.
        simulated_s: Simulated time from the first arrival to the last token.
        latencies: Latency distributions and goodput.
        scheduler_us_per_step: Real CPU time of schedule, update and tier operations; differs from
            run to run.
        wall_s: Real elapsed time of the simulation; differs from run to run.
        tiers: Copies and hits below the device; None without a host tier.
        checks: Checks of the accounts.
    """

    finished: int
    refused: int
    prompt_tokens: int
    hit_tokens: int
    host_hit_tokens: int
    storage_hit_tokens: int
    recomputed_tokens: int
    preemptions: int
    steps: int
    mean_budget_use: float
    num_blocks: int
    mean_occupancy: float
    peak_occupancy: float
    evicted_blocks: int
    simulated_s: float
    latencies: Latencies
    scheduler_us_per_step: float
    wall_s: float
    tiers: TierCounts | None
    checks: tuple[Check, ...]

    @property
    def computed_tokens(self) -> int:
        """Number of prompt tokens that hit in no tier."""
        hit_tokens = self.hit_tokens + self.host_hit_tokens + self.storage_hit_tokens
        return self.prompt_tokens - hit_tokens


def simulate(
    trace: Trace,
    costs: CostModel,
    config: SimulationConfig = SimulationConfig(),
    progress: Progress = no_progress,
    stage: str = "simulation",
    storage: SimulatedStorage | None = None,
) -> SimulationResult:
    """Replay a trace in simulated time.

    Args:
        trace: The requests.
        costs: The cost model.
        config: Configuration of the engine.
        progress, stage: Callback for the progress, and the name of the stage.
        storage: Storage left by an earlier simulation; None for an empty one if config has any.

    Raises:
        CostError: If the model leaves no room for KV blocks.
        CountError, StorageConfigError: For storage of no blocks, or without a host tier.
    """
    started = time.perf_counter()
    if storage is None and config.storage_blocks is not None:
        storage = SimulatedStorage(config.storage_blocks, costs)
    simulation = _Simulation(trace, costs, config, storage)
    num_requests = len(trace.requests)
    while simulation.advance():
        progress(stage, simulation.accounts.answers.num_answered, num_requests)
    progress(stage, num_requests, num_requests)
    return simulation.result(time.perf_counter() - started)


class _Simulation:
    """State of a simulation between two steps."""

    def __init__(
        self,
        trace: Trace,
        costs: CostModel,
        config: SimulationConfig,
        storage: SimulatedStorage | None,
    ) -> None:
        num_blocks = config.num_blocks or costs.num_blocks(config.block_size)
        self.costs = costs
        self.config = config
        stored = None if storage is None else simulated_namespace(config.block_size)
        self.manager = CacheManager(num_blocks, config.block_size, host=config.host, storage=stored)
        self.links = self._connect(storage)
        self.scheduler = MixedScheduler(
            self.manager,
            token_budget=config.token_budget,
            max_running=config.max_running,
            reserve_tokens=config.reserve_tokens,
            prefix_cache=config.prefix_cache,
            preempt=config.preempt,
        )
        self.node = SimulatedNode(self.scheduler)
        self.accounts = NodeAccounts()
        # A stable sort: equal timestamps keep the file's order.
        self.arrivals = sorted(enumerate(trace.requests), key=lambda item: item[1].timestamp_ms)
        self.next_arrival = 0
        self.first_arrival_s = self.clock_s = self._next_arrival_s()
        self.next_token = FIRST_OUTPUT_TOKEN
        self.computed_tokens = 0
        self.waited_s = 0.0

    def advance(self) -> bool:
        """Run one engine step; return False when every request is answered."""
        if not self.scheduler.has_work:
            if self.next_arrival == len(self.arrivals):
                return False
            self._idle()
        self._add_arrivals()
        if not self.scheduler.has_work:  # every arrival was refused
            return True
        started = time.thread_time()
        if self.links is not None:
            self.links.deliver(self.clock_s)
        plan = self.scheduler.schedule()
        if self.links is not None:
            self.links.dispatch(self.clock_s)
        scheduling_s = time.thread_time() - started
        if not plan.num_chunks:
            self.accounts.record_step(plan, self.clock_s)
            self._wait_for_copies()
            return True
        step_s = self.costs.plan_s(plan)
        self.node.scheduler_s += scheduling_s
        self.node.begin_step(step_s)
        self.clock_s += step_s
        self.accounts.record_step(plan, self.clock_s)
        num_chunks = plan.num_chunks
        new_tokens = range(self.next_token, self.next_token + num_chunks)
        self.next_token += num_chunks
        self.computed_tokens += plan.num_tokens
        for request in self.node.end_step(plan, new_tokens):
            self.accounts.finish(request, self.clock_s)
        return True

    def _connect(self, storage: SimulatedStorage | None) -> TierLinks | None:
        if self.manager.tiers is None:
            return None
        bytes_per_block = self.costs.model.kv_bytes_per_token * self.config.block_size
        return TierLinks(self.manager.tiers, bytes_per_block, self.costs.host_bytes_per_s, storage)

    def _idle(self) -> None:
        """Advance the clock to the next arrival; copies continue meanwhile."""
        arrival_s = self._next_arrival_s()
        if self.links is not None and arrival_s > self.clock_s:
            self.links.run_idle(self.clock_s, arrival_s)
        self.clock_s = max(self.clock_s, arrival_s)

    def _wait_for_copies(self) -> None:
        """Advance the clock to the end of the next copy, or to the next arrival if sooner."""
        next_s = None if self.links is None else self.links.next_end_s
        assert next_s is not None, "the scheduler has work, but planned an empty step"
        if self.next_arrival < len(self.arrivals):
            next_s = min(next_s, self._next_arrival_s())
        self.waited_s += next_s - self.clock_s
        self.clock_s = next_s

    def _next_arrival_s(self) -> float:
        return self.arrivals[self.next_arrival][1].timestamp_ms / 1e3

    def _add_arrivals(self) -> None:
        while self.next_arrival < len(self.arrivals) and self._next_arrival_s() <= self.clock_s:
            index, line = self.arrivals[self.next_arrival]
            request = Request(str(index), tokens(line), line.output_length)
            try:
                self.scheduler.add(request)
            except RequestTooLargeError:
                self.accounts.answers.refuse(request.request_id)
            else:
                self.accounts.arrive(request, self._next_arrival_s())
            self.next_arrival += 1

    def result(self, wall_s: float) -> SimulationResult:
        """Return the result; call it when every request is answered."""
        config, accounts, answers = self.config, self.accounts, self.accounts.answers
        simulated_s = self.clock_s - self.first_arrival_s
        steps = summarize_role([self.node], simulated_s)
        tiers = None
        if self.links is not None:
            tiers = self.links.finish(self.clock_s, self.scheduler.stats(), self.waited_s)
        checks = [*accounts.checks(len(self.arrivals)), check_all_blocks_returned(self.manager)]
        stats = self.manager.stats()
        if stats.tiers is not None:
            checks.append(check_all_host_blocks_returned(stats.tiers))
        return SimulationResult(
            finished=len(answers.times),
            refused=answers.refused,
            prompt_tokens=answers.prompt_tokens,
            hit_tokens=accounts.hit_tokens,
            host_hit_tokens=accounts.host_hit_tokens,
            storage_hit_tokens=accounts.storage_hit_tokens,
            recomputed_tokens=accounts.recomputed_tokens,
            preemptions=accounts.preemptions,
            steps=steps.steps,
            mean_budget_use=self.computed_tokens / (max(steps.steps, 1) * config.token_budget),
            num_blocks=self.manager.num_blocks,
            mean_occupancy=steps.mean_occupancy,
            peak_occupancy=steps.peak_occupancy,
            evicted_blocks=stats.evicted_blocks,
            simulated_s=simulated_s,
            latencies=summarize_latencies(
                answers.times, answers.refused, simulated_s, config.slo_ttft_s, config.slo_tpot_s
            ),
            scheduler_us_per_step=self.node.scheduler_s / max(steps.steps, 1) * 1e6,
            wall_s=wall_s,
            tiers=tiers,
            checks=tuple(checks),
        )

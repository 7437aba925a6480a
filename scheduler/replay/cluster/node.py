"""A node of a simulated cluster: a real scheduler, and what it has done so far."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from ....kvcache.manager import CacheManager
from ...decode import DecodeScheduler
from ...handoff import Timing
from ...prefill import PrefillScheduler
from ...step_plan import StepPlan
from .result import ClusterConfig, RoleResult

TIMING = Timing(retry_s=10.0, silence_s=100.0, transfer_s=1e6, remember_s=10.0)
"""Long: nothing is lost here, and a transfer may wait for many others."""


@dataclass(eq=False)
class Node:
    """One node.

    Attributes:
        is_busy: a step is in flight.
        link_free_s: when the transfers that it has part in have ended.
        busy_s, held_block_s: time in steps; and times the blocks that requests held.
        peak_blocks: most blocks held at a time.
        steps: how many there were.
        preemptions: how often a request lost its blocks.
        scheduler_s: real CPU time of the scheduler.
    """

    scheduler: PrefillScheduler | DecodeScheduler
    is_busy: bool = False
    link_free_s: float = 0.0
    busy_s: float = 0.0
    held_block_s: float = 0.0
    peak_blocks: int = 0
    steps: int = 0
    preemptions: int = 0
    scheduler_s: float = 0.0

    def schedule(self) -> StepPlan:
        """Plan the next step."""
        started = time.perf_counter()
        plan = self.scheduler.schedule()
        self.scheduler_s += time.perf_counter() - started
        self.preemptions += len(plan.preempted)
        return plan

    def begin(self, step_s: float) -> None:
        """Note that a step has begun."""
        manager = self.scheduler.manager
        held = manager.num_blocks - manager.available
        self.is_busy = True
        self.steps += 1
        self.busy_s += step_s
        self.held_block_s += held * step_s
        self.peak_blocks = max(self.peak_blocks, held)

    def end(self, plan: StepPlan, new_tokens: Sequence[int]) -> None:
        """Take in the results of the step."""
        self.is_busy = False
        started = time.perf_counter()
        self.scheduler.update(plan, new_tokens)
        self.scheduler_s += time.perf_counter() - started


def make_prefill(config: ClusterConfig, num_blocks: int) -> Node:
    """Make a prefill node."""
    scheduler = PrefillScheduler(
        CacheManager(num_blocks, config.node.block_size),
        epoch=1,
        timing=TIMING,
        token_budget=config.node.token_budget,
        max_running=config.node.max_running,
        order=config.order,
    )
    return Node(scheduler)


def make_decode(config: ClusterConfig, num_blocks: int) -> Node:
    """Make a decode node."""
    scheduler = DecodeScheduler(
        CacheManager(num_blocks, config.node.block_size),
        epoch=1,
        timing=TIMING,
        token_budget=config.node.token_budget,
        max_running=config.node.max_running,
        reserve_tokens=config.node.reserve_tokens,
    )
    return Node(scheduler)


def sum_up(nodes: Sequence[Node], simulated_s: float) -> RoleResult:
    """Return what the nodes of one role did together."""
    num_blocks = nodes[0].scheduler.manager.num_blocks
    steps, busy_s = sum(node.steps for node in nodes), sum(node.busy_s for node in nodes)
    held_block_s = sum(node.held_block_s for node in nodes)
    return RoleResult(
        steps=steps,
        busy=busy_s / (len(nodes) * simulated_s) if simulated_s else 0.0,
        mean_occupancy=held_block_s / (busy_s * num_blocks) if steps else 0.0,
        peak_occupancy=max(node.peak_blocks for node in nodes) / num_blocks,
        evicted_blocks=sum(node.scheduler.manager.stats().evicted_blocks for node in nodes),
    )

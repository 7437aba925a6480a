"""A simulated node: a real scheduler, and counters of its steps."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from ...decode import DecodeScheduler
from ...mixed import MixedScheduler
from ...prefill import PrefillScheduler
from ...request import Request
from ...step_plan import StepPlan

_Scheduler = TypeVar("_Scheduler", bound=MixedScheduler | PrefillScheduler | DecodeScheduler)


@dataclass(eq=False)
class SimulatedNode(Generic[_Scheduler]):
    """A scheduler and what it has done so far.

    Attributes:
        is_busy: Whether a step is in flight.
        link_free_s: Time at which the last of its transfers ends.
        busy_s: Time spent in steps.
        held_block_s: Integral over that time of the blocks that requests hold.
        peak_blocks: Largest number of blocks held at once.
        steps: Number of steps.
        preemptions: Number of preemptions.
        scheduler_s: Real CPU time of the scheduler; what runs beside it does not count.
    """

    scheduler: _Scheduler
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
        started = time.thread_time()
        plan = self.scheduler.schedule()
        self.scheduler_s += time.thread_time() - started
        self.preemptions += len(plan.preempted)
        return plan

    def begin_step(self, step_s: float) -> None:
        """Count a step that begins now and takes step_s."""
        manager = self.scheduler.manager
        held = manager.num_blocks - manager.available
        self.is_busy = True
        self.steps += 1
        self.busy_s += step_s
        self.held_block_s += held * step_s
        self.peak_blocks = max(self.peak_blocks, held)

    def end_step(self, plan: StepPlan, new_tokens: Sequence[int]) -> Sequence[Request]:
        """Give the results of the step to the scheduler; return the finished requests."""
        self.is_busy = False
        started = time.thread_time()
        finished = self.scheduler.update(plan, new_tokens)
        self.scheduler_s += time.thread_time() - started
        return finished


@dataclass(frozen=True, slots=True)
class RoleResult:
    """Step counters of all nodes of one role.

    Attributes:
        steps: Steps of all nodes.
        busy: Mean fraction of the time that a node spends in steps.
        mean_occupancy: Mean fraction of the pool that requests hold during steps.
        peak_occupancy: The same at its peak, on the fullest node.
        evicted_blocks: Evictions on all nodes.
    """

    steps: int
    busy: float
    mean_occupancy: float
    peak_occupancy: float
    evicted_blocks: int


def summarize_role(nodes: Sequence[SimulatedNode[Any]], simulated_s: float) -> RoleResult:
    """Combine the counters of the nodes of one role."""
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

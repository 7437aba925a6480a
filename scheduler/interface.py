"""The interface that the mixed, prefill and decode schedulers share."""

from __future__ import annotations

from collections.abc import Sequence

from .batching.batch import BatchScheduler
from .request import Request
from .step_plan import SchedulerStats, StepPlan


class Scheduler:
    """A scheduler over a cache manager.

    Attributes:
        manager: holds the blocks.
        policy: order of admission and preemption.
        token_budget: most tokens of a step.
        max_running: most requests that hold blocks at a time.
        reserve_tokens, prefix_cache, preempt, depth: see `MixedScheduler`.
    """

    def __init__(self, batch: BatchScheduler) -> None:
        self._batch = batch
        self._queues = batch.queues
        self.manager = batch.manager
        self.policy = batch.queues.policy
        self.token_budget = batch.token_budget
        self.max_running = batch.max_running
        self.reserve_tokens = batch.reserve_tokens
        self.prefix_cache = batch.prefix_cache
        self.preempt = batch.preempt
        self.depth = batch.depth

    @property
    def has_work(self) -> bool:
        """Whether any request has yet to end, or any step is in flight."""
        return bool(self._queues or self._batch.in_flight)

    @property
    def running(self) -> Sequence[Request]:
        """Requests that hold blocks, in order of admission; some may still be loading."""
        return tuple(self._queues.running)

    @property
    def waiting(self) -> Sequence[Request]:
        """Requests without blocks, in order of admission: preempted ones come first."""
        return (*self._queues.preempted, *self._queues.waiting)

    def schedule(self) -> StepPlan:
        """Plan the next step.

        The plan is empty only if there is no work, or if all requests wait for copies, hand-offs,
        or the steps in flight. Do not pass an empty plan to `update`: call `schedule` again after
        the next completion.

        Raises:
            StepOrderError: if ``depth`` plans are in flight: `update` was not called for them.
        """
        return self._batch.schedule()

    def stats(self) -> SchedulerStats:
        """Return a copy of the counts."""
        return self._batch.stats()

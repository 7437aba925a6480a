"""Adapter of our mixed scheduler for the specification."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from types import ModuleType
from typing import Any, Final

import numpy as np

from ... import scheduler as own_scheduler
from ...kvcache import CacheManager, OutOfBlocksError, RequestTooLargeError
from ...kvcache.tokens import SupportsArray, as_ids
from ...spec.adapters.scheduler import (
    Chunk,
    SchedulerFactory,
    SchedulerPromises,
    Submission,
)
from ...spec.harness.engine import Config
from ...spec.model.scheduler import Reason
from ...spec.rules.cache import C3
from ...spec.rules.rule import require
from .lent_tokens import lending

IN_FLIGHT: Final = ("schedule too far ahead", "update another plan", "update with a token too few")
"""Wrong calls while a step is in flight."""

BETWEEN: Final = ("add a twin", "update the last plan again", "abort an unknown request")
"""Wrong calls between two steps."""


class SinglesManager(CacheManager):
    """A `CacheManager` that extends a batch one lease at a time, which must be equivalent."""

    def extend_batch(self, rows: Sequence[int] | SupportsArray) -> None:
        """See `CacheManager.extend_batch`."""
        leases = [self._leases[row] for row in as_ids("row", rows).tolist()]
        needed = sum(lease.num_tokens == lease.num_blocks * self.block_size for lease in leases)
        if needed > self.available:
            raise OutOfBlocksError(needed, self.available)
        for lease in leases:
            self.extend(lease, 1)


class MixedAdapter:
    """A `MixedScheduler` and its `CacheManager`, with names for requests.

    Args:
        config: As drawn by `radixkv.spec.harness.scheduler.configuration`; ``"growth": "singles"``
            extends the decode batch one request at a time.
        scheduler: The package, or a copy of it.
        promises: The promises that the specification checks.
    """

    def __init__(self, config: Config, scheduler: Any, promises: SchedulerPromises) -> None:
        if promises.leaders:
            # A request is overtaken only while a leader computes its prefix, some in each step.
            longest = config["num_blocks"] * config["block_size"]
            promises = replace(promises, max_overtaken=longest * config["max_running"])
        self.promises = promises
        self.manager = self._make_manager(config)
        self.package = scheduler
        self.scheduler = self._make_scheduler(config)
        self.depth = self.scheduler.depth
        self.requests: dict[str, Any] = {}
        self.plans: deque[Any] = deque()
        self.last_plan: Any = None
        self._copies: list[tuple[str, str, int, int]] = []

    def _make_manager(self, config: Config) -> CacheManager:
        kind = SinglesManager if config.get("growth") == "singles" else CacheManager
        return kind(config["num_blocks"], config["block_size"])

    def _make_scheduler(self, config: Config) -> Any:
        return self.package.MixedScheduler(
            self.manager,
            prefix_cache=config["prefix_cache"],
            depth=config.get("depth", 1),
            **self._options(config),
        )

    def _options(self, config: Config) -> dict[str, Any]:
        priority = config["policy"] == "priority"
        return {
            "token_budget": config["token_budget"],
            "max_running": config["max_running"],
            "policy": self.package.Priority() if priority else self.package.Fcfs(),
            "reserve_tokens": config["reserve_tokens"],
            "preempt": config.get("preempt", "recompute"),
        }

    def add(self, request: Submission) -> bool:
        """Add a request; False if it is too large for the pool."""
        made = self._make(request.name, request)
        try:
            self.scheduler.add(made)
        except RequestTooLargeError:
            return False
        self.requests[request.name] = made
        return True

    def _make(self, name: str, request: Submission) -> Any:
        prompt, stop = list(request.prompt), list(request.stop)
        with lending(prompt) as lent:
            made = self.package.Request(
                name,
                lent,
                request.max_new_tokens,
                priority=request.priority,
                stop_token_ids=stop,
                namespace=request.namespace,
                sample_of=self.requests.get(request.sample_of),
            )
        found, given = (prompt, stop), (list(request.prompt), list(request.stop))
        require(found == given, C3, "a request was given {}, and changed it to {}", given, found)
        return made

    def schedule(self) -> list[Chunk]:
        """Plan the next step."""
        plan = self.scheduler.schedule()
        if plan.chunks:
            self.plans.append(plan)
        self._copies = [self._name_copy(plan, copy) for copy in plan.copies]
        return [(chunk.request.request_id, chunk.start, chunk.length) for chunk in plan.chunks]

    def _name_copy(self, plan: Any, copy: Any) -> tuple[str, str, int, int]:
        """Find out for which admitted request a block is copied."""
        tables = {each.request_id: self.block_table(each.request_id) for each in plan.admitted}
        name = next((name for name, table in tables.items() if copy.destination in table), "")
        return name, copy.owner.request_id, copy.source, copy.destination

    def copies(self) -> list[tuple[str, str, int, int]]:
        """Return the copies of the last plan."""
        return self._copies

    def update(self, tokens: list[int]) -> list[str]:
        """Report the token after each chunk; return the ids of the requests that ended."""
        self.last_plan = plan = self.plans.popleft()
        with lending(tokens) as lent:
            ended = self.scheduler.update(plan, lent)
        return [request.request_id for request in ended]

    def abort(self, name: str) -> bool:
        """End a request; False if it is not live."""
        return bool(self.scheduler.abort(name))

    def running(self) -> list[str]:
        """Return the ids of running requests, in order of admission."""
        return [request.request_id for request in self.scheduler.running]

    def waiting(self) -> list[str]:
        """Return the ids of waiting requests, in the order in which they are tried."""
        return [request.request_id for request in self.scheduler.waiting]

    def num_computed(self, name: str) -> int:
        """Return the number of leading tokens whose KV is in the cache."""
        return int(self.requests[name].num_computed)

    def num_hit(self, name: str) -> int:
        """Return the hit tokens of the last admission."""
        lease = self.requests[name].lease
        return lease.num_hit_blocks * self.manager.block_size if lease is not None else 0

    def block_table(self, name: str) -> list[int]:
        """Return the block table of a request."""
        lease = self.requests[name].lease
        return lease.block_table.tolist() if lease is not None else []

    def output(self, name: str) -> list[int]:
        """Return the generated tokens, and check that the token array has the same."""
        request = self.requests[name]
        after_prompt = request.tokens[request.num_prompt_tokens :].tolist()
        assert after_prompt == request.output_tokens, f"{request!r} has two outputs"
        return list(request.output_tokens)

    def reason(self, name: str) -> Reason | None:
        """Return the finish reason of a request, None while it lives."""
        reason: Reason | None = self.requests[name].finish_reason
        return reason

    def available(self) -> int:
        """Return the number of blocks that are free or evictable."""
        return self.manager.available

    def counts(self) -> dict[str, int]:
        """Return the statistics of the scheduler."""
        stats = vars(self.scheduler.stats())
        lower = stats["host_hit_tokens"] + stats["storage_hit_tokens"]
        return {**stats, "lower_hit_tokens": lower}

    def check(self) -> None:
        """Run the manager's own check."""
        self.manager.check()

    def misuse(self, kind: int, name: str) -> bool:
        """Make a wrong call, and return whether it was refused."""
        if self.plans:
            return self._misuse_in_flight(IN_FLIGHT[kind % len(IN_FLIGHT)])
        return self._misuse_between(BETWEEN[kind % len(BETWEEN)], name)

    def _misuse_in_flight(self, what: str) -> bool:
        scheduler, plan = self.scheduler, self.plans[0]
        other = self.plans[-1]
        if other is plan:
            other = copy(plan)
        try:
            if what == "schedule too far ahead" and len(self.plans) == self.depth:
                scheduler.schedule()
            elif what != "update with a token too few":
                scheduler.update(other, [0] * len(other.chunks))
            else:
                scheduler.update(plan, [0] * (len(plan.chunks) - 1))
        except self.package.StepOrderError:
            return True
        return False

    def _misuse_between(self, what: str, name: str) -> bool:
        scheduler, request = self.scheduler, self.requests.get(name)
        try:
            if what == "update the last plan again":
                plan = self.last_plan
                if plan is None:
                    return True
                scheduler.update(plan, np.zeros(len(plan.chunks), np.int32))
            elif what == "abort an unknown request":
                return not scheduler.abort(f"{name}.unknown")
            elif request is not None:
                is_live = request.finish_reason is None
                twin = Submission(name, [1], 1, 0, (), b"")
                scheduler.add(self._make(name, twin) if is_live else request)
            else:
                return True
        except (self.package.StepOrderError, self.package.RequestError):
            return True
        return False


def make_factory(
    scheduler: ModuleType | None = None, promises: SchedulerPromises | None = None
) -> SchedulerFactory:
    """Return a factory of adapters for a scheduler package: ours, or a copy with a planted bug."""
    package = own_scheduler if scheduler is None else scheduler
    claimed = SchedulerPromises.all() if promises is None else promises
    return lambda config: MixedAdapter(config, package, claimed)

"""The world of a scheduler: it draws and applies operations and checks every rule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from ...adapters.scheduler import SchedulerFactory, Submission
from ...rules.rule import require
from ...rules.scheduler import Q14, Q15, Q19, Q20, Q30
from ..engine import Below, Config, Operation
from .checks import check_settled
from .draw import MAX_WAITING, NAMESPACES, WEIGHTS, draw, draw_config
from .requests import Tracked
from .state import SchedulerState
from .step import end_by_abort, run_step

LAST_PRIORITY: Final = 3
"""Priority of requests that must not overtake others."""

OPERATIONS: Final = tuple(WEIGHTS)
"""Operations by word; each is a method of the world."""


class SchedulerWorld(SchedulerState):
    """A scheduler under test with its requests and rules, as an engine runs it."""

    def draw(self, below: Below) -> Operation:
        """Draw an operation that applies now."""
        return draw(self, below)

    def apply(self, operation: Operation) -> bool:
        """Do one operation and check every rule; False if it does not apply."""
        word, *arguments = operation
        assert word in OPERATIONS, f"{word!r} is no operation"
        method: Callable[..., bool] = getattr(self, word)
        if not method(*arguments):
            return False
        check_settled(self)
        return True

    def picture(self) -> str:
        """Draw the requests as text: running ones, then waiting ones, in order."""
        lines = []
        waiting = [request for request in self.live.values() if request.phase != "running"]
        for request in [*self.running, *sorted(waiting, key=lambda each: each.order)]:
            done = f"{request.computed}/{len(request.tokens)} computed"
            line = f"{request.name} {request.phase}, {done}, {request.num_output} generated"
            if request.phase == "running":
                line += f", table {self.tables[request.name]}"
            lines.append(line)
        return "\n".join(lines) or "no request lives"

    # Operations: each returns whether it applied

    def submit(
        self,
        name: str,
        prompt: Sequence[int],
        max_new_tokens: int,
        priority: int,
        stop: Sequence[int],
        namespace: int,
    ) -> bool:
        """Queue a request; check that it is refused if and only if it can never fit."""
        if any(request.name == name for request in self.past) or not prompt or max_new_tokens < 1:
            return False
        submission = Submission(
            name, tuple(prompt), max_new_tokens, priority, tuple(stop), NAMESPACES[namespace]
        )
        request = Tracked(submission, namespace, len(self.past), self.config)
        needed, there = self.blocks_for(request.max_kv_tokens), self.config["num_blocks"]
        added = self.target.add(submission)
        require(
            added == (needed <= there),
            Q19, "{} needs {} blocks of {}, and is {}",
            name, needed, there, "accepted" if added else "refused",
        )  # fmt: skip
        self.past.append(request)
        if added:
            self.live[name] = request
        else:
            request.phase = "ended"
            self.situations["too large"] += 1
        return True

    def step(self) -> bool:
        """Run one step."""
        run_step(self)
        return True

    def step_abort(self, names: Sequence[str]) -> bool:
        """Run a step, and abort some requests while it is in flight."""
        run_step(self, lambda step: [end_by_abort(self, name, step) for name in names])
        return True

    def step_misuse(self, kind: int, name: str) -> bool:
        """Run a step, and make a wrong call while it is in flight."""
        run_step(self, lambda step: step.chunks and self.misuse(kind, name))
        return True

    def abort(self, name: str) -> bool:
        """Abort between two steps."""
        return end_by_abort(self, name)

    def misuse(self, kind: int, name: str) -> bool:
        """Make a wrong call."""
        if "misuse" not in self.target.can or not any(each.name == name for each in self.past):
            return False
        refused = self.target.misuse(kind, name)
        require(refused, Q30, "the wrong call {} with {} is not refused", kind, name)
        self.situations["misuse refused"] += 1
        return True

    def flood(self, name: str, prompt: Sequence[int], max_new_tokens: int) -> bool:
        """Submit new requests in every step until all current ones have ended."""
        old = list(self.live.values())
        if not old or not prompt or any(each.name == f"{name}.1" for each in self.past):
            return False
        work = len(prompt) + max_new_tokens
        bound = self.bound() + (self.config["max_running"] + 1) * work
        number = 0
        while any(request.is_live for request in old):
            require(number < bound, Q15, "{} steps, and {} have not ended", bound, self.names(old))
            number += 1
            if len(self.live) - len(self.running) < MAX_WAITING:
                priority = LAST_PRIORITY
                self.submit(f"{name}.{number}", prompt, max_new_tokens, priority, [], 0)
            run_step(self)
            check_settled(self)
        self.situations["flooded"] += 1
        return True

    def drain(self) -> bool:
        """Run until all requests end, within the bound; then no block may be held."""
        self.situations["drained with work"] += bool(self.live)
        bound = self.bound()
        for _ in range(bound):
            if not self.live:
                break
            run_step(self)
            check_settled(self)
        require(
            not self.live,
            Q14, "{} steps, and {} have not ended", bound, self.names(list(self.live.values())),
        )  # fmt: skip
        available = self.target.available()
        require(
            available == self.config["num_blocks"],
            Q20, "all have ended, and {} of {} blocks can be had",
            available, self.config["num_blocks"],
        )  # fmt: skip
        if "check" in self.target.can:
            self.target.check()
        return True


class SchedulerSubject:
    """A scheduler to test, in worlds of all sizes.

    Args:
        factory: makes an adapter from a configuration.
    """

    def __init__(self, factory: SchedulerFactory) -> None:
        self.factory = factory

    def configure(self, below: Below) -> Config:
        """Draw the sizes and options of a world."""
        return draw_config(below)

    def world(self, config: Config) -> SchedulerWorld:
        """Make a world without requests."""
        return SchedulerWorld(config, self.factory)

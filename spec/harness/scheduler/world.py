"""The world of a scheduler: it draws and applies operations and checks every rule."""

from __future__ import annotations

from ...adapters.scheduler import SchedulerFactory
from ..engine import Below, Config, Operation
from .configuration import draw_config, draw_tiers
from .operations import SCHEDULER_TABLE
from .state import SchedulerState
from .step import settle


class SchedulerWorld(SchedulerState):
    """A scheduler under test with its requests and rules, as an engine runs it."""

    def __init__(self, config: Config, factory: SchedulerFactory) -> None:
        super().__init__(config, factory)
        self.table = SCHEDULER_TABLE.for_adapter(self.target.can)

    def draw(self, below: Below) -> Operation:
        """Draw an operation that applies now."""
        return self.table.draw(self, self.table.weights(), below)

    def apply(self, operation: Operation) -> bool:
        """Do one operation and check every rule; False if it does not apply."""
        if not SCHEDULER_TABLE.apply(self, operation):
            return False
        settle(self)
        return True

    def picture(self) -> str:
        """Draw the requests as text: running ones, then waiting ones, in order."""
        lines = []
        waiting = sorted(self.model.waiting(), key=lambda each: each.order)
        for request in [*self.running, *waiting]:
            done = f"{request.computed}/{len(request.tokens)} computed"
            line = f"{request.name} {request.phase}, {done}, {request.num_output} generated"
            if request.phase == "running":
                line += f", table {self.model.tables[request.name]}"
            lines.append(line)
        return "\n".join(lines) or "no request lives"


class SchedulerSubject:
    """A scheduler to test, in worlds of all sizes.

    Args:
        factory: makes an adapter from a configuration.
        has_tiers: whether its worlds have a host tier, and perhaps storage.
    """

    table = SCHEDULER_TABLE

    def __init__(self, factory: SchedulerFactory, has_tiers: bool = False) -> None:
        self.factory = factory
        self.has_tiers = has_tiers
        self.case_lengths = (100,) if has_tiers else (25, 25, 50, 100)

    def configure(self, below: Below) -> Config:
        """Draw the sizes and options of a world."""
        return draw_config(below) | (draw_tiers(below) if self.has_tiers else {})

    def world(self, config: Config) -> SchedulerWorld:
        """Make a world without requests."""
        return SchedulerWorld(config, self.factory)

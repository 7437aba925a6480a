"""The world of a cache with tiers: it draws and applies operations and checks every rule."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from ...adapters.tiers import TierFactory
from ..cache.checks import check_all
from ..cache.requests import draw_config
from ..engine import Below, Config, Operation, Trace
from .checks import check_tiers
from .configuration import draw_tiers
from .operations import TIER_TABLE, weights_now, weights_of
from .picture import picture
from .state import TierState
from .storage import settle

RELIEF: Final = ("finish", "preempt", "unpark", "result", "fence", "reset", "cancel")
"""Operations that may free room for a request."""


class TierWorld(TierState):
    """A cache manager with tiers under test, with all that surrounds it, as an engine runs it."""

    def __init__(self, config: Config, factory: TierFactory) -> None:
        super().__init__(config, factory)
        self.table = TIER_TABLE.for_adapter(self.target.can)
        self.weights = weights_of(config.get("rare", 0), config.get("often", 0))
        if config.get("fences") == 2:  # more operations come between a copy and its end
            self.weights["result"] //= 3

    def draw(self, below: Below) -> Operation:
        """Draw an operation that applies now."""
        return self.table.draw(self, weights_now(self, self.weights), below)

    def apply(self, operation: Operation) -> bool:
        """Do one operation and check every rule; False if it does not apply."""
        word = operation[0]
        if not TIER_TABLE.apply(self, operation):
            return False
        self.num_steps += 1
        if word in RELIEF:
            self.without_room.clear()
        if word in ("submit", "elsewhere"):  # they call nothing, so nothing has changed
            return True
        if self.config["at_once"]:
            settle(self)
        self.situations["forgotten by storage"] = self.storage_law.num_forgotten
        check_all(self)
        self.see()
        check_tiers(self)
        self.check_events()
        return True

    def picture(self) -> str:
        """Draw the blocks, the cache, the tiers and the requests as text."""
        return picture(self)


class TierSubject:
    """A manager with tiers to test, in worlds of all sizes and policies."""

    # A replay does not read these.
    only_drawn = ("max_running", "alphabet", "rare", "often", "faults", "fences")

    table = TIER_TABLE

    def __init__(self, factory: TierFactory) -> None:
        self.factory = factory

    def configure(self, below: Below) -> Config:
        """Draw the sizes and policies of a world."""
        return {**draw_config(below), **draw_tiers(below, list(TIER_TABLE.by_word))}

    def simpler(self, trace: Trace) -> Iterator[Trace]:
        """Yield traces in which an operation ends well, and at once."""
        for index, operation in enumerate(trace):
            if operation[0] == "result" and operation[3] != 1:
                yield [*trace[:index], [*operation[:3], 1], *trace[index + 1 :]]

    def world(self, config: Config) -> TierWorld:
        """Make a world with nothing cached."""
        return TierWorld(config, self.factory)

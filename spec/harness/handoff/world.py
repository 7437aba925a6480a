"""The world of a hand-off: it draws and applies operations and checks every rule."""

from __future__ import annotations

from typing import Final

from ...adapters.handoff import HandoffFactory
from ..engine import Below, Config, Operation
from .configuration import draw_config, weights_of
from .events import carry_out, deliver, send_status
from .operations import HANDOFF_TABLE
from .state import HandoffState

OPS_PER_CHECK: Final = 32
"""Operations between two checks of all caches."""


class HandoffWorld(HandoffState):
    """Prefill and decode nodes, a gateway, and the network between them."""

    table = HANDOFF_TABLE

    def __init__(self, config: Config, factory: HandoffFactory) -> None:
        super().__init__(config, factory)
        self._weights = weights_of(config, self.table.weights())
        self._num_operations = 0
        for node in self.live():
            send_status(self, node)
        while self.network:
            deliver(self, self.network.pop())

    def draw(self, below: Below) -> Operation:
        """Draw an operation that applies now."""
        return self.table.draw(self, self._weights, below)

    def apply(self, operation: Operation) -> bool:
        """Do one operation and all that follows; False if it does not apply."""
        for node in self.live():
            node.has_evicted = False
        self.in_tick = operation[0] == "tick"
        if not self.table.apply(self, operation):
            return False
        carry_out(self)
        self._num_operations += 1
        if self._num_operations % OPS_PER_CHECK == 0:
            self.check_caches()
        return True

    def picture(self) -> str:
        """Draw the requests, the nodes and the network as text."""
        lines = []
        for name, request in self.requests.items():
            state = (
                "answered" if name in self.model.answers else f"open, {sorted(request.attempts)}"
            )
            lines.append(f"{name} {list(request.prompt)} + {request.max_new_tokens}, {state}")
        for name, node in self.nodes.items():
            if node is None:
                lines.append(f"{name} has crashed")
                continue
            counts = node.system.counts()
            step = f", {len(node.flights)} steps in flight" if node.flights else ""
            waits = f", waits to withdraw {node.withdrawn}" if node.withdrawn else ""
            used = counts.num_blocks - counts.available
            lines.append(f"{name} uses {used} of {counts.num_blocks} blocks{step}{waits}")
        lines += [
            f"pull {each.name} from {each.peer} into blocks {each.blocks} of {each.node}"
            for each in self.transfers
        ]
        lines += [
            f"message {each.name} to {each.to}" for each in self.network if not each.is_status
        ]
        return "\n".join(lines)


class HandoffSubject:
    """A hand-off to test, in worlds of all sizes.

    Args:
        factory: makes the nodes and the gateway from a configuration.
    """

    table = HANDOFF_TABLE
    only_drawn = ("rare", "often")  # a replay does not read them

    def __init__(self, factory: HandoffFactory) -> None:
        self.factory = factory

    def configure(self, below: Below) -> Config:
        """Draw the sizes and options of a world."""
        return draw_config(below)

    def world(self, config: Config) -> HandoffWorld:
        """Make a world without requests."""
        return HandoffWorld(config, self.factory)

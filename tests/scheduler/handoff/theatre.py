"""The simulation as a stage for stories about schedulers: what happens when, the test says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from radixkv.scheduler import DecodeScheduler, PrefillScheduler
from radixkv.scheduler.handoff import Message
from radixkv.scheduler.handoff.gateway_messages import GATEWAY, GatewayMessage
from radixkv.scheduler.handoff_simulation import (
    Op,
    Simulation,
    SimulationConfig,
)
from radixkv.scheduler.handoff_simulation.gateway_side import Envelope
from radixkv.scheduler.handoff_simulation.nodes import DecodeNode, PrefillNode

MANY = 400


class Theatre(Simulation):
    """A simulation without faults, in which each node goes on when the test says so.

    What the gateway says arrives at once, and what it is to hear arrives with `report`.
    """

    def __init__(self, **sizes: Any) -> None:
        roomy = {"num_groups": 1, "prefill_blocks": 40, "decode_blocks": 40, "budget": 8}
        super().__init__(SimulationConfig(**(roomy | sizes)))

    def apply(self, op: Op) -> None:
        """Do an operation; what the gateway says to nodes, and signs of life, arrive at once."""
        super().apply(op)
        self._deliver_all(lambda envelope: envelope.source == GATEWAY or envelope.is_status)

    def _deliver_all(self, is_meant: Callable[[Envelope], bool]) -> list[Message | GatewayMessage]:
        came = []
        while places := [place for place, each in enumerate(self.network) if is_meant(each)]:
            came.append(self.network[places[0]].message)
            super().apply(["deliver", places[0]])
        return came

    def submit(self, prompt: list[int], max_new_tokens: int = 3, seed: int = 1) -> str:
        """A client's request; returns its id."""
        self.apply(["submit", prompt, max_new_tokens, seed])
        return f"r{len(self.jobs)}"

    def p(self, name: str = "p0") -> PrefillScheduler:
        """The scheduler of a prefill node."""
        node = self.nodes[name]
        assert isinstance(node, PrefillNode)
        return node.scheduler

    def d(self, name: str = "d0") -> DecodeScheduler:
        """The scheduler of a decode node."""
        node = self.nodes[name]
        assert isinstance(node, DecodeNode)
        return node.scheduler

    def deliver(self) -> list[Message | GatewayMessage]:
        """Deliver what nodes say to each other, and what follows; return it."""
        return self._deliver_all(lambda envelope: envelope.to != GATEWAY)

    def transfer(self) -> None:
        """Let all pulls end well."""
        while self.pulls:
            self.apply(["pull_write", 0])
            self.apply(["pull_end", 0, True, True])

    def copy(self) -> None:
        """Let all copies between tiers end well."""
        while any(node is not None and node.copies.in_flight for node in self.nodes.values()):
            self.apply(["copy", 0, True])

    def report(self) -> None:
        """Let the gateway hear what nodes have said."""
        self._deliver_all(lambda envelope: GATEWAY in (envelope.source, envelope.to))

    def step_p(self, place: int = 0) -> None:
        """One whole step of a prefill node."""
        for _ in range(1 + self.config.num_groups):
            self.apply(["compute", place])

    def step_d(self, place: int = 0) -> None:
        """One whole step of a decode node."""
        for _ in range(2):
            self.apply(["decode", place])

    def tick(self, ticks: int = 1) -> None:
        """Let time pass."""
        self.apply(["tick", ticks])

    def round(self) -> None:
        """Everybody does what there is to do, once."""
        self.deliver()
        self.transfer()
        self.deliver()
        self.copy()
        for place in range(len(self.prefill_names)):
            self.step_p(place)
        for place in range(len(self.decode_names)):
            self.step_d(place)
        self.report()

    def until(self, is_done: Callable[[], bool]) -> None:
        """Go on, a tick a round, until something is so."""
        for _ in range(MANY):
            if is_done():
                return
            self.round()
            self.tick()
        raise AssertionError(f"not so after {MANY} rounds")

    def finish(self) -> None:
        """Go on until every request has an answer."""
        self.until(lambda: len(self.answers) == len(self.jobs))
        for answer in self.answers.values():
            assert answer.tokens is not None, answer.reason

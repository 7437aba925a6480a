"""A simulation whose nodes run step by step, as the test says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from radixkv.scheduler import DecodeScheduler, PrefillScheduler
from radixkv.scheduler.handoff import Message
from radixkv.scheduler.handoff.gateway_messages import GATEWAY, GatewayMessage
from radixkv.scheduler.handoff_simulation import Op, Simulation, SimulationConfig
from radixkv.scheduler.handoff_simulation.gateway_side import Envelope
from radixkv.scheduler.handoff_simulation.nodes import DecodeNode, PrefillNode

MANY = 400


class SteppedSimulation(Simulation):
    """A simulation without faults, in which the test runs each step of each node.

    Messages of the gateway arrive at once; messages to it arrive with `report`.
    """

    def __init__(self, **sizes: Any) -> None:
        roomy = {"num_groups": 1, "prefill_blocks": 40, "decode_blocks": 40, "budget": 8}
        super().__init__(SimulationConfig(**(roomy | sizes)))

    def apply(self, op: Op) -> None:
        """Apply an operation; messages of the gateway and signs of life arrive at once."""
        super().apply(op)
        self._deliver_all(lambda envelope: envelope.source == GATEWAY or envelope.is_status)

    def _deliver_all(self, is_meant: Callable[[Envelope], bool]) -> list[Message | GatewayMessage]:
        came = []
        while places := [place for place, each in enumerate(self.network) if is_meant(each)]:
            came.append(self.network[places[0]].message)
            super().apply(["deliver", places[0]])
        return came

    def submit(self, prompt: list[int], max_new_tokens: int = 3, seed: int = 1) -> str:
        """Submit a client's request; return its id."""
        self.apply(["submit", prompt, max_new_tokens, seed])
        return f"r{len(self.jobs)}"

    def p(self, name: str = "p0") -> PrefillScheduler:
        """Return the scheduler of a prefill node."""
        node = self.nodes[name]
        assert isinstance(node, PrefillNode)
        return node.scheduler

    def d(self, name: str = "d0") -> DecodeScheduler:
        """Return the scheduler of a decode node."""
        node = self.nodes[name]
        assert isinstance(node, DecodeNode)
        return node.scheduler

    def deliver(self) -> list[Message | GatewayMessage]:
        """Deliver all messages between nodes; return them."""
        return self._deliver_all(lambda envelope: envelope.to != GATEWAY)

    def transfer(self) -> None:
        """Finish all pulls."""
        while self.pulls:
            self.apply(["pull_write", 0])
            self.apply(["pull_end", 0, True, True])

    def copy(self) -> None:
        """Finish all copies between tiers."""
        while any(node is not None and node.copies.in_flight for node in self.nodes.values()):
            self.apply(["copy", 0, True])

    def report(self) -> None:
        """Deliver all messages to the gateway."""
        self._deliver_all(lambda envelope: GATEWAY in (envelope.source, envelope.to))

    def step_p(self, place: int = 0) -> None:
        """Run one whole step of a prefill node."""
        for _ in range(1 + self.config.num_groups):
            self.apply(["compute", place])

    def step_d(self, place: int = 0) -> None:
        """Run one whole step of a decode node."""
        for _ in range(2):
            self.apply(["decode", place])

    def tick(self, ticks: int = 1) -> None:
        """Advance the clock."""
        self.apply(["tick", ticks])

    def round(self) -> None:
        """Let everything that is pending happen once."""
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
        """Run rounds, a tick each, until is_done."""
        for _ in range(MANY):
            if is_done():
                return
            self.round()
            self.tick()
        raise AssertionError(f"not so after {MANY} rounds")

    def finish(self) -> None:
        """Run until every request has an answer."""
        self.until(lambda: len(self.answers) == len(self.jobs))
        for answer in self.answers.values():
            assert answer.tokens is not None, answer.reason

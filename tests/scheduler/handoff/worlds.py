"""Worlds of the specification around our hand-off, or around a copy of it with a planted bug."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from random import Random
from types import ModuleType
from typing import Any, Final

from radixkv.scheduler import DecodeScheduler, PrefillScheduler, handoff
from radixkv.scheduler.handoff import Message
from radixkv.scheduler.handoff.gateway_messages import GATEWAY, GatewayMessage
from radixkv.spec.harness.engine import Finding, Operation, replay
from radixkv.spec.harness.handoff.configuration import ORDERS
from radixkv.spec.harness.handoff.state import Envelope, guarded
from radixkv.spec.harness.handoff.world import HandoffSubject, HandoffWorld
from radixkv.spec.harness.random_engine import Run
from radixkv.spec.harness.random_engine import run as run_engine

SIZES: Final[dict[str, Any]] = {
    "prefill_blocks": 12,
    "decode_blocks": 12,
    "host_blocks": 0,
    "block_size": 2,
    "num_groups": 2,
    "budget": 5,
    "max_running": 4,
    "order": ORDERS[0],
    "reserve_tokens": 0,
    "num_prefill": 1,
    "num_decode": 1,
    "max_attempts": 3,
    "request_s": 5000,
    "max_overtaken": 256,
}

MANY: Final = 400


def subject_of(package: ModuleType) -> HandoffSubject:
    """Return the subject of the hand-off package, or of a copy of it."""
    beside = package.__name__.removesuffix("handoff")
    adapter = importlib.import_module(f"{beside}fuzz.handoff_adapter")
    return HandoffSubject(adapter.make_factory())


def world_of(package: ModuleType, **sizes: Any) -> HandoffWorld:
    """Return a world of the hand-off package, or of a copy of it."""
    return subject_of(package).world(SIZES | sizes)


def run_random(package: ModuleType, seed: int, num_steps: int) -> Run:
    """Run one random program, and drain its world."""
    return run_engine(subject_of(package), seed, num_steps, num_steps)


def is_found_again(package: ModuleType, finding: Finding) -> bool:
    """Whether a replay breaks the same rule."""
    violation = replay(subject_of(package), finding.config, finding.trace)
    return violation is not None and violation.rule.name == finding.rule


def below_of(seed: int) -> Callable[[int], int]:
    """Return a source of random choices."""
    return Random(seed).randrange


class SteppedWorld(HandoffWorld):
    """A world without faults, in which the test runs each step of each node.

    Messages of the gateway arrive at once; messages to it arrive with `report`.
    """

    def __init__(self, **sizes: Any) -> None:
        roomy = {"num_groups": 1, "prefill_blocks": 40, "decode_blocks": 40, "budget": 8}
        super().__init__(SIZES | roomy | sizes, subject_of(handoff).factory)

    def apply(self, operation: Operation) -> bool:
        """Apply an operation; messages of the gateway and signs of life arrive at once."""
        applied = super().apply(operation)
        self._deliver_all(lambda envelope: envelope.source == GATEWAY or envelope.is_status)
        return applied

    def _deliver_all(self, is_meant: Callable[[Envelope], bool]) -> list[Message | GatewayMessage]:
        came = []
        while meant := [each for each in self.network if is_meant(each)]:
            came.append(meant[0].message.body)
            super().apply(["deliver", meant[0].name])
        return came

    def ask(self, prompt: list[int], max_new_tokens: int = 3, seed: int = 1) -> str:
        """Submit a client's request; return its id."""
        name = f"r{len(self.requests) + 1}"
        self.apply(["submit", name, prompt, max_new_tokens, seed])
        return name

    def p(self, name: str = "p0") -> PrefillScheduler:
        """Return the scheduler of a prefill node."""
        scheduler = self._scheduler(name)
        assert isinstance(scheduler, PrefillScheduler)
        return scheduler

    def d(self, name: str = "d0") -> DecodeScheduler:
        """Return the scheduler of a decode node."""
        scheduler = self._scheduler(name)
        assert isinstance(scheduler, DecodeScheduler)
        return scheduler

    def _scheduler(self, name: str) -> Any:
        node = self.nodes[name]
        assert node is not None, f"{name} has crashed"
        return guarded(node.target).scheduler

    def arrive(self) -> list[Message | GatewayMessage]:
        """Deliver all messages between nodes; return them."""
        return self._deliver_all(lambda envelope: envelope.to != GATEWAY)

    def transfer(self) -> None:
        """Finish all pulls."""
        while self.transfers:
            self.apply(["pull_write", self.transfers[0].name])
            self.apply(["pull_end", self.transfers[0].name, True, True])

    def copy_all(self) -> None:
        """Finish all copies between tiers."""
        while names := [name for node in self.live() for name in node.copies]:
            self.apply(["copy", names[0], True])

    def report(self) -> None:
        """Deliver all messages to the gateway."""
        self._deliver_all(lambda envelope: GATEWAY in (envelope.source, envelope.to))

    def step_p(self, name: str = "p0") -> None:
        """Run one whole step of a prefill node."""
        for _ in range(1 + self.num_groups):
            self.apply(["compute", name])

    def step_d(self, name: str = "d0") -> None:
        """Run one whole step of a decode node."""
        for _ in range(2):
            self.apply(["decode", name])

    def wait(self, ticks: int = 1) -> None:
        """Advance the clock."""
        self.apply(["tick", ticks])

    def round(self) -> None:
        """Let everything that is pending happen once."""
        self.arrive()
        self.transfer()
        self.arrive()
        self.copy_all()
        for name in self.prefill_names:
            self.step_p(name)
        for name in self.decode_names:
            self.step_d(name)
        self.report()

    def until(self, is_done: Callable[[], bool]) -> None:
        """Run rounds, a tick each, until is_done."""
        for _ in range(MANY):
            if is_done():
                return
            self.round()
            self.wait()
        raise AssertionError(f"not so after {MANY} rounds")

    def finish(self) -> None:
        """Run until every request has its tokens."""
        self.until(lambda: not self.model.open())
        for answer in self.model.answers.values():
            assert answer.tokens is not None, answer.reason

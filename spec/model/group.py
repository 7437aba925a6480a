"""Processes that share a model: what each has executed, and whether results may be used."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, TypeVar

from ..rules.group import G1, G2, G3, G4, G5
from ..rules.rule import require

T = TypeVar("T")


class GroupLedger(Generic[T]):
    """Records calls, and checks each record.

    Attributes:
        sent: the calls of process 0, in order.
        weights: those that process 0 has at each of them.
        executed: the calls of each other process, in order.
        is_faulty: whether a message was lost, doubled, damaged or out of order, or a process
            executed another call.
    """

    def __init__(self, processes: Iterable[int]) -> None:
        """Begin without calls.

        Args:
            processes: ids of the processes other than process 0.
        """
        self.sent: list[T] = []
        self.weights: list[int] = []
        self.executed: dict[int, list[T]] = {process: [] for process in processes}
        self.is_faulty = False

    def send(self, call: T, weights: int) -> None:
        """Record that process 0 sends a call, and which weights it has."""
        self.sent.append(call)
        self.weights.append(weights)

    def execute(
        self, process: int, number: int, call: T, *, is_damaged: bool, weights: int | None
    ) -> None:
        """Record that a process executes a call.

        Args:
            process: which.
            number: number of the call of process 0 that the message was sent for, from 1.
            call: the call as it arrived.
            is_damaged: whether the message was damaged on its way.
            weights: those with which it is executed; None if it needs none.
        """
        done = self.executed[process]
        require(number == len(done) + 1, G1, "process {} executes call {} after {} calls",
                process, number, len(done))  # fmt: skip
        require(not is_damaged, G2, "process {} executes {}, sent as {}",
                process, call, self.sent[number - 1])  # fmt: skip
        due = self.weights[number - 1]
        require(weights in (None, due), G5, "process {} executes {} with weights {} instead of {}",
                process, call, weights, due)  # fmt: skip
        done.append(call)

    def use(self) -> None:
        """Record that process 0 uses the results of all calls so far."""
        for process, done in self.executed.items():
            require(done == self.sent, G3, "process {} has executed {}, process 0 {}",
                    process, done, self.sent)  # fmt: skip

    def end(self, why: str) -> None:
        """Record that a process ends with an error."""
        require(self.is_faulty, G4, "no message was damaged, and a process ends: {}", why)

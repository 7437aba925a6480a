"""The simulated hand-off as it stands, and what follows from each operation at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np

from ...kvcache import Int32Array, OutOfBlocksError, RequestTooLargeError
from .actions import CancelPull, Compute, Failed, Offer, Post, Pull, Start, Stop, Withdraw
from .front_desk import Answer, Begin, Cancel, FrontDesk
from .messages import Key, Message, Ticket
from .nodes import DecodeNode, PrefillNode, SimulationConfig, SimulationError, sample

REQUEST_S: Final = 200
"""After this a request is answered as failed, in ticks."""


@dataclass(eq=False)
class Transfer:
    """A pull that is not fenced.

    Attributes:
        pull: what D wants.
        landed: whether its bytes were written.
        ended: whether D was told how it ended.
        may_fence: whether it has ended, or was cancelled.
        on_the_way: what P had in its blocks when it crashed; it may still be written.
    """

    pull: Pull
    landed: bool = False
    ended: bool = False
    may_fence: bool = False
    on_the_way: list[bytes] | None = None


@dataclass(frozen=True)
class Job:
    """What a client asked for."""

    prompt: Int32Array
    max_new_tokens: int
    seed: int

    def answer(self) -> tuple[int, ...]:
        """What one node alone would generate."""
        tokens = self.prompt
        for _ in range(self.max_new_tokens):
            tokens = np.append(tokens, np.int32(sample(self.seed, tokens)))
        return tuple([int(token) for token in tokens[len(self.prompt) :]])


class World:
    """P, D, what is between them, and who uses them.

    Attributes:
        now: the clock, in ticks.
        network: messages on their way, with the node they go to.
        pulls: transfers that may still write.
        reports: what each node has said to the front desk, and has not arrived.
        answers: what clients were told.
        counts: how often each thing happened.
    """

    def __init__(self, config: SimulationConfig | None = None) -> None:
        self.config = config or SimulationConfig()
        self.now = 0
        self.epochs = [1, 1]
        self.prefill: PrefillNode | None = PrefillNode(self.config, 1, 0)
        self.decode: DecodeNode | None = DecodeNode(self.config, 1, 0)
        self.front = FrontDesk(
            max_attempts=self.config.max_attempts, backoff_s=2, request_s=REQUEST_S
        )
        self.jobs: dict[str, Job] = {}
        self.network: list[tuple[int, Message]] = []
        self.pulls: list[Transfer] = []
        self.reports: tuple[list[Callable[[], None]], list[Callable[[], None]]] = ([], [])
        self.answers: dict[str, Answer] = {}
        self.counts: Counter[str] = Counter()
        self._started: set[Key] = set()

    # What follows

    def _act(self) -> None:
        """Carry out what front desk and nodes want done, until they want nothing."""
        more = True
        while more:
            more = False
            if self.prefill is not None:
                more |= self._act_prefill(self.prefill)
            if self.decode is not None:
                more |= self._act_decode(self.decode)
            for action in self.front.take_actions():
                more = True
                self._act_front(action)

    def _act_prefill(self, node: PrefillNode) -> bool:
        actions = node.side.take_actions()
        for action in actions:
            match action:
                case Post(message):
                    self.network.append((1, message))
                case Compute(key):
                    node.may_compute(key)
                case Offer(ticket, blocks, group):
                    node.offer(ticket, blocks, group)
                case Withdraw(key):
                    node.withdrawn.append(key)
                case Failed(key, reason, is_final):
                    node.work.pop(key, None)
                    self._report_failed(key, reason, is_final)
        return bool(actions)

    def _report_failed(self, key: Key, reason: str, is_final: bool) -> None:
        report = self.front.prefill_failed
        self.reports[0].append(lambda: report(key, reason, is_final=is_final))

    def _act_decode(self, node: DecodeNode) -> bool:
        actions = node.side.take_actions()
        for action in actions:
            match action:
                case Post(message):
                    self.network.append((0, message))
                case Pull():
                    self.counts["blocks sent"] += len(action.blocks)
                    self.pulls.append(Transfer(action))
                case CancelPull(ticket):
                    self._cancel_pull(ticket)
                case Start():
                    self._start(node, action)
                case Stop(key):
                    node.stop(key)
        return bool(actions)

    def _cancel_pull(self, ticket: Ticket) -> None:
        for transfer in self.pulls:
            if transfer.pull.ticket == ticket:
                transfer.may_fence = True

    def _start(self, node: DecodeNode, start: Start) -> None:
        if start.key in self._started:
            raise SimulationError(f"{start.key} starts twice")
        self._started.add(start.key)
        self.counts["starts"] += 1
        self.counts["own tokens"] += start.num_own_tokens
        self.counts["hit tokens"] += start.commit.hits.device
        job = self.jobs[start.key[0]]
        node.start(start, job.prompt, job.max_new_tokens)
        self.reports[1].append(lambda: self.front.started(start.key))

    def _act_front(self, action: Begin | Cancel | Answer) -> None:
        match action:
            case Begin(key):
                self._begin(key)
            case Cancel(key):
                if self.prefill is not None:
                    self.prefill.side.abort(key, "cancelled")
                if self.decode is not None:
                    self.decode.side.abort(key, "cancelled")
            case Answer(request_id, tokens, _):
                if request_id in self.answers:
                    raise SimulationError(f"{request_id} has two answers")
                if tokens is not None and tokens != self.jobs[request_id].answer():
                    raise SimulationError(f"{request_id} has other tokens than one node gives")
                self.answers[request_id] = action
                self.counts["answers" if tokens is not None else "failures"] += 1

    def _begin(self, key: Key) -> None:
        job = self.jobs[key[0]]
        self.counts["attempts"] += 1
        if self.prefill is None:
            self._report_failed(key, "the prefill node is down", False)
            return
        try:
            self.prefill.begin(key, job.prompt, job.seed)
        except OutOfBlocksError as short:
            self._report_failed(key, str(short), False)
        except RequestTooLargeError as large:
            self._report_failed(key, str(large), True)

    def _source_tags(self, transfer: Transfer) -> list[bytes] | None:
        """What P has, or had when it crashed, for a pull; None if it does not serve it."""
        if self.prefill is None or transfer.on_the_way is not None:
            return transfer.on_the_way
        return self.prefill.serve(transfer.pull.ticket)

"""A node's end of its exchange with the gateway: begins attempts once, and reports on them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from ...kvcache import CountError, RequestTooLargeError
from ..errors import RequestError
from ..handoff.actions import Finished as DecodeFinished
from ..handoff.actions import Preempted as DecodePreempted
from ..handoff.actions import Started as DecodeStarted
from ..handoff.actions import Timing
from ..handoff.gateway_messages import (
    GATEWAY,
    MAX_PROGRESS_ATTEMPTS,
    MAX_PROGRESS_TOKENS,
    AttemptMessage,
    DecodeFailed,
    DeliveryAck,
    Finished,
    FollowAttempt,
    NewTokens,
    Preempted,
    PrefillFailed,
    Progress,
    RunPrefill,
    Started,
)
from ..handoff.messages import AttemptKey, Hits, NodeId
from ..handoff.records import pack_records
from ..request import Request, RequestStatus
from .resend import ResendQueue

Report: TypeAlias = PrefillFailed | DecodeStarted | DecodePreempted | DecodeFinished | DecodeFailed
"""What a node reports on an attempt, as its scheduler hands it out."""


class NodeReporter:
    """Begins each attempt once and repeats each report until acknowledged, over a lossy network.

    It reports the tokens of an attempt as they come if the gateway follows it.

    It does no I/O: send `take_messages` to the gateway after every call.
    """

    def __init__(self, epoch: int, timing: Timing, *, progress_s: float = 0.005) -> None:
        """Create the reporter of a node that has just started.

        Args:
            epoch: epoch of the node.
            timing: unacknowledged reports are repeated every retry_s, for transfer_s. RunPrefill
                messages are remembered for remember_s.
            progress_s: shortest time between two messages with new tokens, which are of all
                attempts that the gateway follows.

        Raises:
            CountError: unless remember_s is more than silence_s; the gateway repeats RunPrefill
                for that long.
        """
        if timing.remember_s <= timing.silence_s:
            raise CountError(
                f"remember_s must be more than silence_s {timing.silence_s:g}, as an attempt that "
                f"is forgotten sooner may begin twice; got {timing.remember_s:g}"
            )
        self._epoch = epoch
        self._reports = ResendQueue(retry_s=timing.retry_s, patience_s=timing.transfer_s)
        self._remember_s = timing.remember_s
        self._begun: dict[AttemptKey, float] = {}  # time of the last RunPrefill, oldest first
        self._decoding: dict[AttemptKey, Request] = {}
        # Number of tokens that were sent of each followed attempt, the longest unheard one first.
        self._followed: dict[AttemptKey, int] = {}
        self._progress_s = progress_s
        self._next_progress_at = 0.0
        self._preempted: dict[AttemptKey, float] = {}  # when each is reported again
        self._retry_s = timing.retry_s
        self._messages: list[AttemptMessage | DeliveryAck | Progress | Preempted] = []

    @property
    def num_unacked(self) -> int:
        """Number of reports that the gateway has not acknowledged."""
        return len(self._reports)

    def take_messages(self) -> list[AttemptMessage | DeliveryAck | Progress | Preempted]:
        """Return the messages to the gateway since the last call, in order."""
        messages, self._messages = self._messages, []
        return messages

    def is_new(self, run: RunPrefill) -> bool:
        """Return whether a message begins an attempt: it is for this epoch and no repetition."""
        return run.epoch == self._epoch and run.key not in self._begun

    def begin(
        self, run: RunPrefill, begin: Callable[[Request, NodeId, int], None], now: float
    ) -> None:
        """Acknowledge a RunPrefill, and begin its attempt if this is the first copy.

        Args:
            run: message of the gateway; ignored if it is for another epoch.
            begin: called with request, decode node and attempt. Its errors are reported.
            now: current time.
        """
        if run.epoch != self._epoch:
            return
        self._messages.append(DeliveryAck.of(run))
        is_new = self.is_new(run)
        self._begun.pop(run.key, None)
        self._begun[run.key] = now
        if not is_new:
            return
        try:
            begin(run.request(), run.decode_node, run.key.attempt)
        except (RequestError, RequestTooLargeError) as error:
            self.report(PrefillFailed(run.key, str(error), is_final=True), now)

    def report(self, report: Report, now: float) -> None:
        """Send a report on an attempt until it is acknowledged, or while it is preempted."""
        if isinstance(report, DecodePreempted):
            self._preempted[report.key] = now
            self._report_preempted(now)
            return
        if isinstance(report, DecodeStarted):
            self._decoding[report.key] = report.request
        else:
            self._decoding.pop(report.key, None)
            self._followed.pop(report.key, None)
        message = _as_message(report)
        self._reports.add(GATEWAY, message, now)
        self._messages.append(message)

    def acknowledge(self, peer: NodeId, ack: DeliveryAck) -> None:
        """Handle the acknowledgement of a report."""
        self._reports.acknowledge(peer, ack)

    def follow(self, follow: FollowAttempt) -> None:
        """Report the tokens of an attempt from now on, if it decodes here."""
        if follow.key in self._decoding:
            self._followed[follow.key] = follow.num_tokens

    def report_progress(self, now: float) -> None:
        """Send the new tokens of all followed attempts, as many as fit in a message."""
        if not self._followed or now < self._next_progress_at:
            return
        attempts: list[NewTokens] = []
        room = MAX_PROGRESS_TOKENS
        for key, start in self._followed.items():
            request = self._decoding[key]
            cost = 1 if request.logprobs is None else 2 + request.logprobs
            stop = start + room // cost
            if tokens := tuple(request.output_tokens[start:stop]):
                records = pack_records(request.output_logprobs[start:stop])
                attempts.append(NewTokens(key, start, tuple(map(int, tokens)), records))
                room -= cost * len(tokens)
            if not room or len(attempts) == MAX_PROGRESS_ATTEMPTS:
                break
        if not attempts:
            return
        for key, start, tokens, _ in attempts:
            del self._followed[key]  # the others are first next time
            self._followed[key] = start + len(tokens)
        self._messages.append(Progress(tuple(attempts)))
        self._next_progress_at = now + self._progress_s

    def _report_preempted(self, now: float) -> None:
        """Report again what is still preempted."""
        for key, due_at in list(self._preempted.items()):
            request = self._decoding.get(key)
            if request is None or request.status is not RequestStatus.PREEMPTED:
                del self._preempted[key]
            elif now >= due_at:
                self._preempted[key] = now + self._retry_s
                self._messages.append(Preempted(key, *_state_of(request)))

    def tick(self, now: float) -> None:
        """Advance the clock."""
        self._report_preempted(now)
        self._messages += [message for _, message in self._reports.take_due(now).resend]
        while self._begun:
            key = next(iter(self._begun))
            if now - self._begun[key] < self._remember_s:
                break
            del self._begun[key]


def _as_message(
    report: PrefillFailed | DecodeStarted | DecodeFinished | DecodeFailed,
) -> AttemptMessage:
    match report:
        case DecodeStarted(key):
            return Started(key)
        case DecodeFinished(key, request):
            return Finished(key, *_state_of(request))
        case _:
            return report


def _state_of(request: Request) -> tuple[tuple[int, ...], Hits, int, bytes]:
    """Return tokens, hits, number of preemptions and log probabilities of a request."""
    tokens = tuple([int(token) for token in request.output_tokens])
    records = pack_records(request.output_logprobs)
    return tokens, Hits.of(request), request.num_preemptions, records

"""A node's end of what it and the gateway say to each other of attempts."""

from __future__ import annotations

from collections.abc import Callable

from ...kvcache import CountError, RequestTooLargeError
from ..errors import RequestError
from ..request import Request
from .actions import (
    Failed,
    Stopped,
    Timing,
)
from .actions import Finished as DecodeFinished
from .actions import Started as DecodeStarted
from .gateway import hits_of
from .gateway_messages import (
    GATEWAY,
    AttemptMessage,
    DecodeFailed,
    DeliveryAck,
    Finished,
    PrefillFailed,
    RunPrefill,
    Started,
)
from .messages import AttemptKey, NodeId
from .resend import ResendQueue


class NodeReporter:
    """Begins each attempt once, and reports until it is heard, over a network that may lose it.

    It does no I/O: send `take_messages` to the gateway after every call.
    """

    def __init__(self, epoch: int, timing: Timing) -> None:
        """Make the end of a node that has just begun to live.

        Args:
            epoch: of this life.
            timing: what the gateway has not heard is said again after retry_s, for transfer_s; for
                remember_s it is known what the gateway has asked for.

        Raises:
            CountError: unless remember_s is more than silence_s; the gateway repeats its
                request for that long.
        """
        if timing.remember_s <= timing.silence_s:
            raise CountError(
                f"remember_s must be more than silence_s {timing.silence_s:g}, as an attempt that "
                f"is forgotten sooner may begin twice; got {timing.remember_s:g}"
            )
        self._epoch = epoch
        self._outbox = ResendQueue(retry_s=timing.retry_s, patience_s=timing.transfer_s)
        self._remember_s = timing.remember_s
        self._begun: dict[AttemptKey, float] = {}  # last request, oldest first
        self._messages: list[AttemptMessage | DeliveryAck] = []

    @property
    def num_unacked(self) -> int:
        """Reports that the gateway has not acknowledged."""
        return len(self._outbox)

    def take_messages(self) -> list[AttemptMessage | DeliveryAck]:
        """Hand out what is to be said to the gateway since the last call, in order."""
        messages, self._messages = self._messages, []
        return messages

    def is_new(self, run: RunPrefill) -> bool:
        """Whether an attempt is to begin: it is for this life, which has not begun it yet."""
        return run.epoch == self._epoch and run.key not in self._begun

    def begin(
        self, run: RunPrefill, begin: Callable[[Request, NodeId, int], None], now: float
    ) -> None:
        """Begin an attempt, unless it was; the gateway is told in either case that it was heard.

        Args:
            run: what the gateway asks for; nothing happens if it asks another life.
            begin: takes request, decode node and attempt; what it refuses is reported.
            now: the time.
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
            self.report(Failed(run.key, str(error), is_final=True), now)

    def report(self, report: Failed | DecodeStarted | DecodeFinished | Stopped, now: float) -> None:
        """Tell the gateway what has become of an attempt, until it is heard."""
        message = _as_message(report)
        self._outbox.add(GATEWAY, message, now)
        self._messages.append(message)

    def heard(self, peer: NodeId, heard: DeliveryAck) -> None:
        """Take in that a peer has heard a report."""
        self._outbox.heard(peer, heard)

    def tick(self, now: float) -> None:
        """Let time pass."""
        self._messages += [said.message for said in self._outbox.take_due(now).again]
        while self._begun:
            key = next(iter(self._begun))
            if now - self._begun[key] < self._remember_s:
                break
            del self._begun[key]


def _as_message(report: Failed | DecodeStarted | DecodeFinished | Stopped) -> AttemptMessage:
    match report:
        case Failed(key, reason, is_final, is_busy):
            return PrefillFailed(key, reason, is_final, is_busy)
        case DecodeStarted(key):
            return Started(key)
        case DecodeFinished(key, request):
            tokens = tuple([int(token) for token in request.output_tokens])
            return Finished(key, tokens, hits_of(request), request.num_preemptions)
        case Stopped(key, reason):
            return DecodeFailed(key, reason)

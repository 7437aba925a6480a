"""Queue of messages that are sent again until the peer acknowledges them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import takewhile
from typing import NamedTuple

from ..handoff.gateway_messages import AttemptMessage, DeliveryAck
from ..handoff.messages import AttemptKey, NodeId


class Due(NamedTuple):
    """Messages whose time has come, each with its receiver.

    Attributes:
        resend: messages to send now.
        expired: messages without an answer for too long, which have left the queue.
    """

    resend: list[tuple[NodeId, AttemptMessage]]
    expired: list[tuple[NodeId, AttemptMessage]]


@dataclass(frozen=True, slots=True)
class _Waiting:
    message: AttemptMessage
    first_sent_at: float
    sent_at: float


class ResendQueue:
    """Messages without an acknowledgement, at most one per attempt and peer.

    A connection may lose any message and any acknowledgement. The receiver acknowledges every copy
    and ignores all but the first. The queue does no I/O: send what you `add`, and what `take_due`
    returns.
    """

    def __init__(self, *, retry_s: float, patience_s: float) -> None:
        """Create an empty queue.

        Args:
            retry_s: interval between two copies of a message.
            patience_s: time after which an unanswered message expires.
        """
        self._retry_s = retry_s
        self._patience_s = patience_s
        self._waiting: dict[tuple[NodeId, AttemptKey], _Waiting] = {}  # oldest sent_at first

    def __len__(self) -> int:
        """Return the number of unacknowledged messages."""
        return len(self._waiting)

    def add(self, peer: NodeId, message: AttemptMessage, now: float) -> None:
        """Add a message that is sent now; it replaces the peer's last one of the attempt."""
        self._waiting.pop((peer, message.key), None)
        self._waiting[peer, message.key] = _Waiting(message, now, now)

    def acknowledge(self, peer: NodeId, ack: DeliveryAck) -> None:
        """Remove an acknowledged message; ignores the acknowledgement of an earlier one."""
        waiting = self._waiting.get((peer, ack.key))
        if waiting is not None and DeliveryAck.of(waiting.message) == ack:
            del self._waiting[peer, ack.key]

    def forget_peer(self, peer: NodeId) -> None:
        """Remove all messages to a peer that is gone."""
        for place in [place for place in self._waiting if place[0] == peer]:
            del self._waiting[place]

    def forget(self, key: AttemptKey) -> None:
        """Remove all messages of an attempt that is over."""
        for place in [place for place in self._waiting if place[1] == key]:
            del self._waiting[place]

    def take_due(self, now: float) -> Due:
        """Return the messages to send again, and remove those that have expired."""
        found = list(
            takewhile(lambda item: now - item[1].sent_at >= self._retry_s, self._waiting.items())
        )
        due = Due([], [])
        for place, waiting in found:
            del self._waiting[place]
            addressed = place[0], waiting.message
            if now - waiting.first_sent_at >= self._patience_s:
                due.expired.append(addressed)
            else:
                self._waiting[place] = replace(waiting, sent_at=now)
                due.resend.append(addressed)
        return due

"""What the gateway and a node say of attempts: again and again, until it was heard."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import takewhile
from typing import NamedTuple

from .gateway_messages import AttemptMessage, DeliveryAck
from .messages import AttemptKey, NodeId


class Said(NamedTuple):
    """A message, and whom it is for."""

    peer: NodeId
    message: AttemptMessage


class Due(NamedTuple):
    """What has waited for an answer.

    Attributes:
        again: to be sent now.
        given_up: waited too long; it is forgotten.
    """

    again: list[Said]
    given_up: list[Said]


@dataclass(frozen=True, slots=True)
class _Waiting:
    message: AttemptMessage
    first_said_at: float
    said_at: float


class ResendQueue:
    """Messages without an acknowledgement, at most one of an attempt for each peer.

    A connection may lose any of them, and any acknowledgement. Who hears one acknowledges every
    copy; a second one changes nothing. This does no I/O: send what `add` is given, and what
    `take_due` returns.
    """

    def __init__(self, *, retry_s: float, patience_s: float) -> None:
        """Make an empty one.

        Args:
            retry_s: after so long without an answer a message is said again.
            patience_s: for so long, then no more.
        """
        self._retry_s = retry_s
        self._patience_s = patience_s
        self._waiting: dict[tuple[NodeId, AttemptKey], _Waiting] = {}  # said longest ago first

    def __len__(self) -> int:
        """Count the messages that wait."""
        return len(self._waiting)

    def add(self, peer: NodeId, message: AttemptMessage, now: float) -> None:
        """Take in what is said now; it replaces what was said of the attempt before."""
        self._waiting.pop((peer, message.key), None)
        self._waiting[peer, message.key] = _Waiting(message, now, now)

    def heard(self, peer: NodeId, heard: DeliveryAck) -> None:
        """Say no more what a peer has heard; an acknowledgement of something earlier is none."""
        waiting = self._waiting.get((peer, heard.key))
        if waiting is not None and DeliveryAck.of(waiting.message) == heard:
            del self._waiting[peer, heard.key]

    def forget_peer(self, peer: NodeId) -> None:
        """Say no more to a peer that has gone."""
        for place in [place for place in self._waiting if place[0] == peer]:
            del self._waiting[place]

    def forget(self, key: AttemptKey) -> None:
        """Say no more of an attempt that is over."""
        for place in [place for place in self._waiting if place[1] == key]:
            del self._waiting[place]

    def take_due(self, now: float) -> Due:
        """Hand out what is to be said again, and what nobody has heard for too long."""
        found = list(
            takewhile(lambda item: now - item[1].said_at >= self._retry_s, self._waiting.items())
        )
        due = Due([], [])
        for place, waiting in found:
            del self._waiting[place]
            said = Said(place[0], waiting.message)
            if now - waiting.first_said_at >= self._patience_s:
                due.given_up.append(said)
            else:
                self._waiting[place] = replace(waiting, said_at=now)
                due.again.append(said)
        return due

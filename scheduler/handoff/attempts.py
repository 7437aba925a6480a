"""What each side knows of an attempt."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from ...kvcache import Int32Array, Lease
from ..errors import RequestError
from ..request import Request
from .actions import Offer
from .messages import (
    MAX_MISSING,
    MAX_PART_BLOCKS,
    Ask,
    AttemptKey,
    Commit,
    Header,
    Hits,
    NodeId,
    Send,
    Ticket,
)
from .states import DecodeState, PrefillState


@dataclass(slots=True, eq=False)
class PrefillAttempt:
    """One attempt of a request, on P.

    Times are of the last move, of D's last sign of life, and of the last message of its own.
    """

    header: Header
    peer: NodeId
    ask: Ask
    request: Request
    lease: Lease
    moved_at: float
    heard_at: float
    sent_at: float
    state: PrefillState = PrefillState.NEW
    num_computed: int = 0
    group: int = 0  # whose turn it is in the chunk up to chunk_stop
    chunk_stop: int = 0
    next_block: list[int] = field(default_factory=list)  # to be offered, of each group
    sends: list[Send] = field(default_factory=list)
    sampled: tuple[int, Hits] | None = None
    commit: Commit | None = None
    refusal: str = ""  # the last, if D was busy

    @property
    def tokens(self) -> Int32Array:
        """The prompt."""
        return self.request.prompt

    def next_part(self, group: int, num_tokens: int, block_size: int) -> tuple[Offer, Send] | None:
        """Take the next of what D lacks of the blocks that so many tokens fill, if there is more.

        The last block of the prompt need not be full.
        """
        first = self.next_block[group]
        is_all = num_tokens == len(self.tokens)
        last = -(-num_tokens // block_size) if is_all else num_tokens // block_size
        if last <= first:
            return None
        last = min(last, first + MAX_PART_BLOCKS)
        self.next_block[group] = last
        header, part = self.header, len(self.sends)
        assert header.peer_epoch is not None, "parts are offered before D has granted"
        blocks = tuple([int(block) for block in self.lease.block_table[first:last]])
        ticket = Ticket(header.key, header.epoch, header.peer_epoch, header.grant, part)
        self.sends.append(Send(header, part, first, last - first, group))
        return Offer(self.peer, ticket, blocks, group), self.sends[-1]

    def make_commit(self) -> Commit:
        """Say that everything was sent, and how to go on."""
        assert self.sampled is not None, "COMMIT before the first token"
        (token, hits), request = self.sampled, self.request
        return Commit(
            self.header,
            len(self.sends),
            token,
            len(self.tokens),
            hits,
            request.sampling,
            tuple(sorted(request.stop_token_ids)),
        )


def make_ask(header: Header, request: Request, block_size: int, num_groups: int) -> Ask:
    """Ask for the blocks of a request's prompt."""
    return Ask(
        header,
        request.prompt.astype("<i4").tobytes(),
        request.namespace,
        block_size,
        num_groups,
        request.max_new_tokens,
        request.priority,
    )


def as_request(ask: Ask) -> Request:
    """Return what is asked for, as D schedules it; COMMIT tells how its tokens are chosen.

    Raises:
        RequestError, TokenError: if it is no request.
    """
    if len(ask.prompt) % 4:
        raise RequestError(f"{len(ask.prompt)} bytes are no int32 tokens")
    tokens = np.frombuffer(ask.prompt, "<i4").astype(np.int32)
    return Request(
        ask.header.key.request_id,
        tokens,
        ask.max_new_tokens,
        priority=ask.priority,
        namespace=ask.namespace,
    )


@dataclass(slots=True, eq=False)
class DecodeAttempt:
    """One attempt of a request, on D.

    Times are of the last move or COMMIT, of P's last sign of life, and of the last RENEW.
    """

    header: Header
    peer: NodeId
    request: Request
    num_groups: int
    lease: Lease
    moved_at: float
    heard_at: float
    sent_at: float
    state: DecodeState = DecodeState.NEW
    first_block: int = 0
    commit: Commit | None = None
    parts: dict[int, Send] = field(default_factory=dict)  # those known
    pulls: dict[int, float] = field(default_factory=dict)  # those not fenced, and when they began
    reason: str = ""  # why it was given up

    @property
    def tokens(self) -> Int32Array:
        """The prompt."""
        return self.request.prompt

    def ticket(self, part: int) -> Ticket:
        """Name a part of it for the transport."""
        header = self.header
        assert header.peer_epoch is not None, "D pulls from nobody"
        return Ticket(header.key, header.peer_epoch, header.epoch, header.grant, part)

    def missing(self) -> tuple[int, ...]:
        """Which parts P has sent in vain, as far as can be known: the first of them."""
        num_parts = self.commit.num_parts if self.commit is not None else 0
        missing = (part for part in range(num_parts) if part not in self.parts)
        return tuple(islice(missing, MAX_MISSING))

    @property
    def max_parts(self) -> int:
        """As many as there are if each is one block of one group of layers."""
        return (self.lease.num_blocks - self.first_block) * self.num_groups

    def expects(self, send: Send) -> bool:
        """Whether a part is of what was granted, and nothing of it is in another part."""
        first, stop = send.first_block, send.first_block + send.num_blocks
        is_granted = self.first_block <= first < stop <= self.lease.num_blocks
        if not is_granted or send.group >= self.num_groups or send.part >= self.max_parts:
            return False
        return not any(
            each.group == send.group
            and first < each.first_block + each.num_blocks
            and each.first_block < stop
            for each in self.parts.values()
        )

    def is_whole(self) -> bool:
        """Whether its parts are as many blocks, in all groups of layers, as were granted."""
        return sum(part.num_blocks for part in self.parts.values()) == self.max_parts


class DecodeAttempts:
    """The attempts that D knows, by request; the newest of a request is its last."""

    def __init__(self) -> None:
        self._by_request: dict[str, list[DecodeAttempt]] = {}

    def add(self, attempt: DecodeAttempt) -> None:
        """Add the newest attempt of a request."""
        self._by_request.setdefault(attempt.header.key.request_id, []).append(attempt)

    def of(self, request_id: str) -> list[DecodeAttempt]:
        """Return the attempts of a request, oldest first."""
        return list(self._by_request.get(request_id, ()))

    def find(self, key: AttemptKey) -> DecodeAttempt | None:
        """Return an attempt, or None if it is not known."""
        for attempt in self._by_request.get(key.request_id, ()):
            if attempt.header.key == key:
                return attempt
        return None

    def all(self) -> list[DecodeAttempt]:
        """Return every attempt."""
        return [attempt for attempts in self._by_request.values() for attempt in attempts]

    def forget(self, attempt: DecodeAttempt) -> None:
        """Take an attempt out."""
        request_id = attempt.header.key.request_id
        self._by_request[request_id].remove(attempt)
        if not self._by_request[request_id]:
            del self._by_request[request_id]

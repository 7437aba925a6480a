"""State that each side keeps of an attempt."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from ...kvcache import Int32Array, Lease
from ..errors import RequestError
from ..request import Request
from .actions import Offer, Pull, Sent
from .messages import (
    MAX_MISSING,
    Ask,
    AttemptKey,
    Commit,
    Header,
    Hits,
    NodeId,
    PartId,
    Send,
)
from .part_cut import PartCut
from .states import DecodeState, PrefillState


@dataclass(slots=True, eq=False)
class PrefillAttempt:
    """An attempt on P.

    Attributes:
        moved_at: time of the last state transition.
        heard_at: time of D's last message.
        sent_at: time of the last ASK, COMMIT or RENEW.
        num_computed: tokens whose KV is written in all groups of layers.
        group, chunk_stop: next group of layers to compute, of the chunk that ends at chunk_stop.
        cut: where the prompt is cut into parts; None before the grant.
        next_block: first block not yet offered, by group.
        sends: SENDs of all parts so far.
        sampled: first token, P's hits and the token's record, once the prompt is computed.
        refusal: D's last temporary reason.
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
    group: int = 0
    chunk_stop: int = 0
    cut: PartCut | None = None
    next_block: list[int] = field(default_factory=list)
    sends: list[Send] = field(default_factory=list)
    sampled: tuple[int, Hits, bytes] | None = None
    commit: Commit | None = None
    refusal: str = ""

    @property
    def tokens(self) -> Int32Array:
        """The prompt."""
        return self.request.prompt

    def next_part(self, group: int, num_tokens: int) -> tuple[Offer, Send] | None:
        """Cut the next part from the blocks that the first num_tokens tokens fill and D lacks.

        The last block of the prompt need not be full. Returns None if no part is left.
        """
        header, part, cut, first = self.header, len(self.sends), self.cut, self.next_block[group]
        assert header.peer_epoch is not None and cut is not None, "parts before D has granted"
        last = cut.part_end(first, num_tokens)
        if last <= first:
            return None
        self.next_block[group] = last
        blocks = tuple([int(block) for block in self.lease.block_table[first:last]])
        part_id = PartId(header.key, header.epoch, header.peer_epoch, header.grant, part)
        self.sends.append(Send(header, part, first, last - first, group))
        return Offer(self.peer, part_id, blocks, group), self.sends[-1]

    def make_commit(self) -> Commit:
        """Return the COMMIT of an attempt whose parts were all sent."""
        assert self.sampled is not None, "COMMIT before the first token"
        (token, hits, record), request = self.sampled, self.request
        return Commit(
            self.header,
            len(self.sends),
            token,
            len(self.tokens),
            hits,
            request.sampling,
            tuple(sorted(request.stop_token_ids)),
            record,
        )


def make_ask(header: Header, request: Request, block_size: int, num_groups: int) -> Ask:
    """Return the ASK for a request's prompt."""
    return Ask(
        header,
        request.prompt.astype("<i4").tobytes(),
        request.namespace,
        block_size,
        num_groups,
        request.max_new_tokens,
        request.priority,
    )


def request_of(ask: Ask) -> Request:
    """Return the request of an ASK, for D's scheduler; its sampling comes with COMMIT.

    Raises:
        RequestError, TokenError: if the fields are not those of a request.
    """
    if len(ask.prompt) % 4:
        raise RequestError(f"the prompt has {len(ask.prompt)} bytes, no multiple of 4")
    return Request(
        ask.header.key.request_id,
        np.frombuffer(ask.prompt, "<i4").astype(np.int32),
        ask.max_new_tokens,
        priority=ask.priority,
        namespace=ask.namespace,
    )


@dataclass(slots=True, eq=False)
class DecodeAttempt:
    """An attempt on D. One that has ended has no request, lease, cut, COMMIT and parts any more.

    Attributes:
        moved_at: time of the last state transition, or of COMMIT.
        heard_at: time of P's last message.
        sent_at: time of the last RENEW.
        block_size: P's block size.
        cut: where the prompt is cut into parts; None before the grant.
        parts: SENDs received, by part.
        pulls: start time of each pull that is not fenced, by part.
        reason: why it was given up.
        has_lost_peer: whether that is because P is silent.
    """

    header: Header
    peer: NodeId
    request: Request
    num_groups: int
    block_size: int
    lease: Lease
    moved_at: float
    heard_at: float
    sent_at: float
    state: DecodeState = DecodeState.NEW
    cut: PartCut | None = None
    commit: Commit | None = None
    parts: dict[int, Send] = field(default_factory=dict)
    pulls: dict[int, float] = field(default_factory=dict)
    reason: str = ""
    has_lost_peer: bool = False

    @property
    def tokens(self) -> Int32Array:
        """The prompt."""
        return self.request.prompt

    def drop_request(self) -> None:
        """Drop what only an open attempt needs. D remembers many, and prompts may be long."""
        del self.request, self.lease, self.cut, self.commit, self.parts

    def part_id(self, part: int) -> PartId:
        """Return the transport's name for a part."""
        header = self.header
        assert header.peer_epoch is not None, "D pulls from an unknown epoch of P"
        return PartId(header.key, header.peer_epoch, header.epoch, header.grant, part)

    def pull(self, send: Send) -> Pull:
        """Return the action that answers a SEND."""
        first, stop, num_skipped = self.granted.destination(
            send.first_block, send.first_block + send.num_blocks
        )
        blocks = tuple([int(block) for block in self.lease.block_table[first:stop]])
        sent = Sent(send.num_blocks, self.block_size, num_skipped)
        return Pull(self.peer, self.part_id(send.part), blocks, send.group, self.num_groups, sent)

    def missing(self) -> tuple[int, ...]:
        """Return the first MAX_MISSING parts that COMMIT counts and D has not received."""
        if self.commit is None:
            return ()
        missing = (part for part in range(self.commit.num_parts) if part not in self.parts)
        return tuple(islice(missing, MAX_MISSING))

    @property
    def granted(self) -> PartCut:
        """Where P cuts the prompt, once it is granted."""
        assert self.cut is not None, "parts before the grant"
        return self.cut

    @property
    def max_parts(self) -> int:
        """Number of parts if each has one block of one group of layers."""
        return (self.granted.num_blocks - self.granted.first_block) * self.num_groups

    def accepts(self, send: Send) -> bool:
        """Whether a part lies within the grant and overlaps no other part."""
        first, stop = send.first_block, send.first_block + send.num_blocks
        if send.group >= self.num_groups or send.part >= self.max_parts:
            return False
        return self.granted.is_part(first, stop) and not any(
            each.group == send.group
            and first < each.first_block + each.num_blocks
            and each.first_block < stop
            for each in self.parts.values()
        )

    def is_complete(self) -> bool:
        """Whether the parts cover the grant, in all groups of layers."""
        return sum(part.num_blocks for part in self.parts.values()) == self.max_parts


class DecodeAttempts:
    """The attempts that D knows, by request; the last of a request is the newest.

    D remembers many that have ended: only `find` and `of` look at those.
    """

    def __init__(self) -> None:
        self._by_request: dict[str, list[DecodeAttempt]] = {}
        self._open: dict[DecodeAttempt, None] = {}  # in order of their begin
        self._ended: dict[DecodeAttempt, None] = {}  # in order of their end

    def __len__(self) -> int:
        """Return the number of attempts, including those that have ended."""
        return len(self._open) + len(self._ended)

    def add(self, attempt: DecodeAttempt) -> None:
        """Add the newest attempt of a request."""
        self._open[attempt] = None
        self._by_request.setdefault(attempt.header.key.request_id, []).append(attempt)

    def of(self, request_id: str) -> list[DecodeAttempt]:
        """Return the attempts of a request, oldest first."""
        return list(self._by_request.get(request_id, ()))

    def find(self, key: AttemptKey) -> DecodeAttempt | None:
        """Return an attempt, or None if it is unknown."""
        attempts = self._by_request.get(key.request_id, ())
        return next((each for each in attempts if each.header.key == key), None)

    def open(self) -> list[DecodeAttempt]:
        """Return the attempts that have not ended, oldest first."""
        return list(self._open)

    @property
    def oldest_ended(self) -> DecodeAttempt | None:
        """The attempt that ended first; None if there is none."""
        return next(iter(self._ended), None)

    def end(self, attempt: DecodeAttempt) -> None:
        """Note that an attempt has ended; it is remembered."""
        del self._open[attempt]
        self._ended[attempt] = None

    def forget(self, attempt: DecodeAttempt) -> None:
        """Remove an attempt that has ended."""
        del self._ended[attempt]
        request_id = attempt.header.key.request_id
        self._by_request[request_id].remove(attempt)
        if not self._by_request[request_id]:
            del self._by_request[request_id]

"""The hand-off as the decode node sees it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from ...kvcache import (
    CacheManager,
    Lease,
    OutOfBlocksError,
    RequestTooLargeError,
    TokenError,
)
from ..errors import RefusedError, RequestError
from ..request import Request
from .actions import Pull, Timing
from .attempts import DecodeAttempt, as_request
from .deferred_asks import (
    DeferredAsk,
    DeferredAsks,
    num_shared_blocks,
)
from .live_decodes import LiveDecodes
from .messages import (
    MAX_REASON_CHARS,
    PROTOCOL_VERSION,
    Abort,
    Ask,
    AttemptKey,
    Commit,
    Grant,
    Header,
    Message,
    NodeId,
    Refuse,
    Renew,
    Send,
)
from .states import DecodeState

Admit: TypeAlias = Callable[[Request], Lease]
"""Reserves the blocks of a request's prompt; raises an error of `CacheManager.admit`, or
`RefusedError`."""


class DecodeSide(LiveDecodes):
    """Takes requests over from prefill nodes, as a state machine without I/O.

    Blocks are granted by a lease. They are published when all of the prompt has arrived, and given
    back, if it has not, when the last pull into them is fenced. Time alone frees nothing.

    Carry out `take_actions` after every call. One thread at a time.

    Attributes:
        epoch: of this node.
    """

    def __init__(
        self,
        manager: CacheManager,
        *,
        epoch: int,
        timing: Timing,
        admit: Admit | None = None,
        vocab_size: int | None = None,
    ) -> None:
        """Make the side of a node.

        Args:
            manager: of D's blocks.
            epoch: higher than that of any earlier life of the node.
            timing: how long to wait.
            admit: decides who gets blocks; default: everybody, as long as there are any.
            vocab_size: first tokens are below it; None: any is taken.
        """
        super().__init__(manager, epoch=epoch, timing=timing)
        self._admit = admit if admit is not None else self._admit_any
        self._vocab_size = vocab_size
        self._last_grant = 0
        self._held = DeferredAsks()

    # ASKs that are held

    def keys_of(self, request_id: str) -> list[AttemptKey]:
        """Return the attempts of a request that have not ended, oldest first."""
        held = self._held.of(request_id)
        return [*super().keys_of(request_id), *([held.key] if held is not None else ())]

    def abort(self, key: AttemptKey, reason: str) -> None:
        """Give an attempt up; `Stop` follows if it has started. Nothing if it is not known."""
        held = self._held.of(key.request_id)
        if held is not None and held.key == key:
            self._held.drop(key.request_id)
            self._say(held.peer, Abort(self._back(held.ask.header), reason, fenced=True))
        super().abort(key, reason)

    def tick(self, now: float) -> None:
        """Let time pass: grant what has been loaded, and give up what has waited too long."""
        super().tick(now)
        for held in self._held.all():
            if now - held.heard_at >= self._timing.silence_s:
                self._held.drop(held.key.request_id)

    def answer_deferred(self) -> None:
        """Answer the ASKs that were held for what has arrived since, or has come to nothing.

        Call it when what has started is counted among those that run.
        """
        if not self._has_arrived:
            return
        self._has_arrived = False
        for held in self._held.all():
            self._asked(held)

    def _is_on_its_way(self, request: Request) -> bool:
        """Whether a block that D lacks of a prompt is being received for one that is much the same.

        Others are not worth the wait: what is received can be matched when all of it has arrived.
        """
        others = [each for each in self.receiving if each.namespace == request.namespace]
        if not others:
            return False
        block_size = self._manager.block_size
        first = self._manager.match(request.prompt, request.namespace).num_blocks
        return any(
            num_shared_blocks(request.prompt, each.prompt, block_size) > first for each in others
        )

    # What P says

    def receive(self, peer: NodeId, message: Message) -> None:
        """Take in a message of a prefill node; one that is stale changes nothing."""
        header = message.header
        back = self._back(header)
        if isinstance(message, Ask):
            self._asked(DeferredAsk(peer, message, self._now))
            return
        if header.version != PROTOCOL_VERSION:
            return
        if isinstance(message, Abort):
            self._held.end(peer, header.key)
        attempt = self._attempts.find(header.key)
        if attempt is not None and not (
            attempt.peer == peer and header.grant in (0, attempt.header.grant)
        ):
            attempt = None
        if attempt is None or header.peer_epoch not in (None, self.epoch):
            self._say(peer, Abort(back, "nothing is granted", fenced=True))
            return
        if header.epoch != attempt.header.peer_epoch:
            restarted = header.epoch > (attempt.header.peer_epoch or 0)
            if restarted and attempt.state is not DecodeState.STARTED:
                self._give_up(attempt, "the prefill node restarted")
            return
        attempt.heard_at = self._now
        if attempt.state in (DecodeState.STARTED, DecodeState.ENDED):
            self._say_end(attempt)
        elif isinstance(message, Abort):
            self._give_up(attempt, message.reason)
        elif attempt.state is DecodeState.RECEIVING:
            self._receiving(attempt, message)

    def _receiving(self, attempt: DecodeAttempt, message: Message) -> None:
        """Take in what P sends of a prompt."""
        match message:
            case Send() if message.part not in attempt.parts:
                if not attempt.expects(message):
                    self._give_up(attempt, f"part {message.part} is not of what was granted")
                    return
                first, stop = message.first_block, message.first_block + message.num_blocks
                attempt.parts[message.part] = message
                attempt.pulls[message.part] = self._now
                blocks = tuple([int(block) for block in attempt.lease.block_table[first:stop]])
                ticket = attempt.ticket(message.part)
                self._actions.append(Pull(attempt.peer, ticket, blocks, message.group))
            case Commit() if message.num_parts > attempt.max_parts:
                self._give_up(attempt, "what was sent is not the prompt")
            case Commit() if not self._is_token(message.first_token):
                token, size = message.first_token, self._vocab_size
                self._give_up(attempt, f"first token {token} is outside the vocabulary of {size}")
            case Commit() if attempt.commit is None:
                attempt.commit = message
                attempt.moved_at = self._now
                self._start_if_whole(attempt)
            case Commit() if missing := attempt.missing():
                self._post(attempt, Renew(attempt.header, missing))

    def _is_token(self, token: int) -> bool:
        return self._vocab_size is None or 0 <= token < self._vocab_size

    def _back(self, header: Header) -> Header:
        """Return the header of an answer."""
        return Header(header.key, self.epoch, header.epoch, header.grant)

    def _asked(self, asked: DeferredAsk) -> None:
        """Admit what is asked for, unless that was done, or is stale; or hold it."""
        peer, header = asked.peer, asked.ask.header
        back, held = self._back(header), self._held.of(header.key.request_id)
        if header.version != PROTOCOL_VERSION:
            self._say(peer, Refuse(back, "version", header.version, PROTOCOL_VERSION))
            return
        known = self._attempts.of(header.key.request_id)
        others = [each.header.key for each in known] + ([held.key] if held is not None else [])
        if any(header.key < each for each in others):
            self._say(peer, Abort(back, "a newer attempt has begun", fenced=True))
            return
        attempt = self._attempts.find(header.key)
        if attempt is not None:
            self._asked_again(attempt, peer, header, back)
            return
        for older in known:
            self._give_up(older, "a newer attempt has begun")
        answer = self._reserve(asked, back)
        if isinstance(answer, Renew):
            self._held.hold(asked)
        else:
            self._held.drop(header.key.request_id)
        if answer is not None:
            self._say(peer, answer)

    def _reserve(self, asked: DeferredAsk, back: Header) -> Refuse | Renew | None:
        """Admit a request that is new, or say why not, or that it is to be held."""
        peer, ask = asked.peer, asked.ask
        header, block_size = ask.header, self._manager.block_size
        if ask.block_size != block_size:
            return Refuse(back, "block size", ask.block_size, block_size)
        # Before anything is allocated: a request has room for all of its tokens.
        needed = -(-(len(ask.prompt) // 4 + ask.max_new_tokens - 1) // block_size)
        if needed > self._manager.num_blocks:
            return Refuse(back, "too large", needed, self._manager.num_blocks)
        try:
            request = as_request(ask)
            if self._is_on_its_way(request) and self._held.has_room:
                return Renew(back)
            lease = request.lease = self._admit(request)
        except (RequestError, TokenError) as error:
            return Refuse(back, "malformed", 0, 0, str(error)[:MAX_REASON_CHARS])
        except OutOfBlocksError as short:
            return Refuse(back, "out of blocks", short.needed, short.available)
        except RequestTooLargeError as large:
            return Refuse(back, "too large", large.needed, large.num_blocks)
        except RefusedError as refused:
            return Refuse(back, refused.reason, refused.needed, refused.available)
        self._last_grant += 1
        own, now = Header(header.key, self.epoch, header.epoch, self._last_grant), self._now
        attempt = DecodeAttempt(own, peer, request, ask.num_groups, lease, now, now, now)
        self._attempts.add(attempt)
        if lease.loading is None:
            self._grant(attempt)
        else:
            self._move(attempt, DecodeState.LOADING)
        return None

    def _admit_any(self, request: Request) -> Lease:
        return self._manager.admit(self._manager.match(request.prompt, request.namespace))

    def _asked_again(
        self, attempt: DecodeAttempt, peer: NodeId, header: Header, back: Header
    ) -> None:
        """Repeat the answer to an ASK; a twin of an attempt of P's earlier life gets none."""
        if peer != attempt.peer or header.epoch != attempt.header.peer_epoch:
            self._say(peer, Abort(back, "the attempt is known of another epoch", fenced=True))
            return
        attempt.heard_at = self._now
        if attempt.state is DecodeState.RECEIVING:
            self._post(attempt, Grant(attempt.header, attempt.first_block))
        elif attempt.state in (DecodeState.STARTED, DecodeState.ENDED):
            self._say_end(attempt)

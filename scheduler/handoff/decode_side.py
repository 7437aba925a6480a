"""The hand-off protocol of a decode node, without I/O."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeAlias

from ...kvcache import CacheManager, Lease, OutOfBlocksError, RequestTooLargeError, TokenError
from ..errors import RefusedError, RequestError
from ..request import Request
from .actions import CancelPull, DecodeAction, Post, Start, Stop, Timing
from .attempts import DecodeAttempt, DecodeAttempts, request_of
from .deferred_asks import DeferredAsk, DeferredAsks, num_shared_blocks
from .messages import (
    MAX_REASON_CHARS,
    PROTOCOL_VERSION,
    Abort,
    Ack,
    Ask,
    AttemptKey,
    Commit,
    Grant,
    Header,
    Message,
    NodeId,
    PartId,
    Refuse,
    Renew,
    Send,
)
from .part_cut import PartCut
from .states import DECODE_MOVES, DecodeState

Admit: TypeAlias = Callable[[Request, bool], Lease | None]
"""Reserves the blocks of a request's prompt; raises `RefusedError` or as `CacheManager.admit`.

The flag tells whether the request may wait. If so, the result may be None: blocks of the request
are on their way from storage.
"""

_RECEIVES: Final = (DecodeState.LOADING, DecodeState.RECEIVING)


class DecodeSide:
    """Takes requests over from prefill nodes, as a state machine without I/O.

    A grant reserves blocks in a lease. D publishes them when the whole prompt has arrived. If the
    attempt fails, D releases them when the last pull into them is fenced. Time alone frees nothing.

    Carry out `take_actions` after every call. Not thread-safe.

    Attributes:
        epoch: epoch of this node.
    """

    def __init__(
        self,
        manager: CacheManager,
        *,
        epoch: int,
        timing: Timing,
        admit: Admit | None = None,
        is_fetching: Callable[[Request], bool] = lambda request: False,
        forget: Callable[[Request], object] = lambda request: None,
        vocab_size: int | None = None,
    ) -> None:
        """Create the side of a node.

        Args:
            manager: owner of D's blocks.
            epoch: higher than in any earlier run of the node.
            timing: timeouts.
            admit: admission; default: admit every request for which there are blocks.
            is_fetching: tells whether a request that ``admit`` let wait must wait longer.
            forget: drops a request that waited and is not admitted.
            vocab_size: upper bound of first tokens; None: no bound.
        """
        self.epoch = epoch
        self._manager = manager
        self._timing = timing
        self._admit = admit if admit is not None else self._admit_any
        self._is_fetching = is_fetching
        self._forget = forget
        self._vocab_size = vocab_size
        self._now = 0.0
        self._last_grant = 0
        self._attempts = DecodeAttempts()
        self._deferred = DeferredAsks()
        self._has_stopped_receiving = False  # any attempt, since `answer_deferred`
        self._actions: list[DecodeAction] = []

    @property
    def num_open(self) -> int:
        """Number of attempts that hold blocks, or have started and not finished."""
        return len(self._attempts.open())

    @property
    def num_known(self) -> int:
        """Number of attempts in memory, including those that have ended."""
        return len(self._attempts)

    @property
    def receiving(self) -> list[Request]:
        """Requests that hold blocks and have not started, oldest first."""
        return [each.request for each in self._attempts.open() if each.state in _RECEIVES]

    @property
    def quarantined(self) -> list[Request]:
        """Requests that were given up and hold blocks until their pulls are fenced."""
        attempts = self._attempts.open()
        return [each.request for each in attempts if each.state is DecodeState.QUARANTINED]

    def keys_of(self, request_id: str) -> list[AttemptKey]:
        """Return the attempts of a request that have not ended, oldest first."""
        attempts = self._attempts.of(request_id)
        keys = [each.header.key for each in attempts if each.state is not DecodeState.ENDED]
        deferred = self._deferred.of(request_id)
        return keys if deferred is None else [*keys, deferred.key]

    def take_actions(self) -> list[DecodeAction]:
        """Return the actions since the last call, in order."""
        actions, self._actions = self._actions, []
        return actions

    # Calls of D's scheduler

    def finished(self, key: AttemptKey) -> None:
        """Report that a started attempt has ended and its lease is released."""
        attempt = self._attempts.find(key)
        if attempt is not None and attempt.state is DecodeState.STARTED:
            self._move(attempt, DecodeState.ENDED)

    def abort(self, key: AttemptKey, reason: str) -> None:
        """Give an attempt up; `Stop` follows if it has started. Ignored if it is unknown."""
        deferred = self._deferred.of(key.request_id)
        if deferred is not None and deferred.key == key:
            self._drop(deferred)
            reply = self._reply_to(deferred.ask.header)
            self._send(deferred.peer, Abort(reply, reason, fenced=True))
        attempt = self._attempts.find(key)
        if attempt is not None:
            self._give_up(attempt, reason)

    def abort_receiving(self, reason: str) -> None:
        """Give up every attempt that has not started."""
        for attempt in self._attempts.open():
            if attempt.state in _RECEIVES:
                self._give_up(attempt, reason)

    def answer_deferred(self) -> None:
        """Answer the deferred ASKs if an attempt was received, or given up, since the last call.

        Call it when the scheduler counts the started requests as running.
        """
        if not self._has_stopped_receiving:
            return
        self._has_stopped_receiving = False
        for deferred in self._deferred.all():
            self._asked(deferred)

    # Events of the transport and the clock

    def pulled(self, part_id: PartId) -> None:
        """Report that a part has arrived; nothing writes into its blocks any more."""
        attempt = self._ended_pull(part_id)
        if attempt is not None:
            self._start_if_complete(attempt)

    def pull_failed(self, part_id: PartId, *, fenced: bool, reason: str) -> None:
        """Report that a pull has failed.

        Args:
            part_id: the pulled part.
            fenced: whether nothing writes into its blocks any more; if not, call `pull_fenced`
                when that is so.
            reason: text for people.
        """
        attempt = self._ended_pull(part_id) if fenced else self._pulling(part_id)
        if attempt is not None:
            self._give_up(attempt, f"part {part_id.part} could not be pulled: {reason}")

    def pull_fenced(self, part_id: PartId) -> None:
        """Report that a failed or cancelled pull no longer writes."""
        self._ended_pull(part_id)

    def set_time(self, now: float) -> None:
        """Advance the clock for what is received next; `tick` checks the deadlines."""
        self._now = now

    def tick(self, now: float) -> None:
        """Advance the clock: grant blocks that were loaded, and give up attempts that are late."""
        self._now = now
        timing = self._timing
        while (ended := self._attempts.oldest_ended) is not None:
            if now - ended.moved_at < timing.remember_s:
                break
            self._move(ended, DecodeState.GONE)
            self._attempts.forget(ended)
        for attempt in self._attempts.open():
            if attempt.state is DecodeState.LOADING and attempt.lease.loading is None:
                self._grant(attempt)
            if attempt.state not in _RECEIVES:
                continue
            started = [*attempt.pulls.values()]
            if attempt.commit is not None or attempt.state is DecodeState.LOADING:
                started.append(attempt.moved_at)
            if any(now - each >= timing.transfer_s for each in started):
                self._give_up(attempt, f"{attempt.state.value} took too long")
            elif now - attempt.heard_at >= timing.silence_s:
                attempt.has_lost_peer = True
                self._give_up(attempt, "the prefill node is silent")
            elif now - attempt.sent_at >= timing.retry_s:
                attempt.sent_at = now
                self._post(attempt, Renew(attempt.header, attempt.missing()))
        for deferred in self._deferred.all():
            if now - deferred.heard_at >= timing.silence_s:
                self._drop(deferred)
            elif deferred.is_fetching and not self._must_wait(deferred):
                self._asked(deferred)

    def _pulling(self, part_id: PartId) -> DecodeAttempt | None:
        """Return the attempt of a pull that is not fenced."""
        attempt = self._attempts.find(part_id.key)
        if attempt is None or part_id.grant != attempt.header.grant:
            return None
        return attempt if part_id.part in attempt.pulls else None

    def _ended_pull(self, part_id: PartId) -> DecodeAttempt | None:
        """Record that a pull is fenced; return its attempt if it is still receiving."""
        attempt = self._pulling(part_id)
        if attempt is None:
            return None
        del attempt.pulls[part_id.part]
        if attempt.state is DecodeState.QUARANTINED and not attempt.pulls:
            self._end(attempt)
        return attempt if attempt.state is DecodeState.RECEIVING else None

    # Messages of P

    def receive(self, peer: NodeId, message: Message) -> None:
        """Handle a message of a prefill node; a stale one changes nothing."""
        header = message.header
        if isinstance(message, Ask):
            self._asked(DeferredAsk(peer, message, self._now))
            return
        if header.version != PROTOCOL_VERSION:
            return
        if isinstance(message, Abort):
            deferred = self._deferred.of(header.key.request_id)
            if deferred is not None and (deferred.peer, deferred.key) == (peer, header.key):
                self._drop(deferred)
        attempt = self._attempts.find(header.key)
        if attempt is not None and not (
            attempt.peer == peer and header.grant in (0, attempt.header.grant)
        ):
            attempt = None
        if attempt is None or header.peer_epoch not in (None, self.epoch):
            self._send(peer, Abort(self._reply_to(header), "nothing is granted", fenced=True))
            return
        if header.epoch != attempt.header.peer_epoch:
            restarted = header.epoch > (attempt.header.peer_epoch or 0)
            if restarted and attempt.state is not DecodeState.STARTED:
                self._give_up(attempt, "the prefill node restarted")
            return
        attempt.heard_at = self._now
        if attempt.state in (DecodeState.STARTED, DecodeState.ENDED):
            self._post_end(attempt)
        elif isinstance(message, Abort):
            self._give_up(attempt, message.reason)
        elif attempt.state is DecodeState.RECEIVING:
            self._receiving(attempt, message)

    def _receiving(self, attempt: DecodeAttempt, message: Message) -> None:
        """Handle a SEND or COMMIT."""
        match message:
            case Send() if message.part not in attempt.parts:
                if not attempt.accepts(message):
                    self._give_up(attempt, f"part {message.part} lies outside the grant")
                    return
                attempt.parts[message.part] = message
                attempt.pulls[message.part] = self._now
                self._actions.append(attempt.pull(message))
            case Commit() if message.num_parts > attempt.max_parts:
                self._give_up(attempt, "the parts do not cover the prompt")
            case Commit() if not self._is_token(message.first_token):
                token, size = message.first_token, self._vocab_size
                self._give_up(attempt, f"first token {token} is outside the vocabulary of {size}")
            case Commit() if attempt.commit is None:
                attempt.commit = message
                attempt.moved_at = self._now
                self._start_if_complete(attempt)
            case Commit() if missing := attempt.missing():
                self._post(attempt, Renew(attempt.header, missing))

    def _is_token(self, token: int) -> bool:
        return self._vocab_size is None or 0 <= token < self._vocab_size

    def _reply_to(self, header: Header) -> Header:
        return Header(header.key, self.epoch, header.epoch, header.grant)

    # Admission

    def _asked(self, asked: DeferredAsk) -> None:
        """Admit, refuse or defer an ASK, or repeat the answer."""
        peer, header = asked.peer, asked.ask.header
        reply, deferred = self._reply_to(header), self._deferred.of(header.key.request_id)
        if header.version != PROTOCOL_VERSION:
            self._send(peer, Refuse(reply, "version", header.version, PROTOCOL_VERSION))
            return
        known = self._attempts.of(header.key.request_id)
        others = [each.header.key for each in known]
        if deferred is not None:
            others.append(deferred.key)
        if any(header.key < each for each in others):
            self._send(peer, Abort(reply, "a newer attempt has begun", fenced=True))
            return
        attempt = self._attempts.find(header.key)
        if attempt is not None:
            self._asked_again(attempt, peer, header)
            return
        for older in known:
            self._give_up(older, "a newer attempt has begun")
        if deferred is not None and (deferred.peer, deferred.ask.header) == (peer, header):
            deferred.heard_at = asked.heard_at
            asked = deferred
        elif deferred is not None:
            self._drop(deferred)
        answer = self._reserve(asked, reply)
        if isinstance(answer, Renew):
            self._deferred.add(asked)
        elif answer is not None:
            self._drop(asked)
        else:
            self._deferred.remove(header.key.request_id)
        if answer is not None:
            self._send(peer, answer)

    def _asked_again(self, attempt: DecodeAttempt, peer: NodeId, header: Header) -> None:
        """Repeat the answer to an ASK, unless it comes from another node or epoch."""
        if peer != attempt.peer or header.epoch != attempt.header.peer_epoch:
            reason = "the attempt belongs to another epoch"
            self._send(peer, Abort(self._reply_to(header), reason, fenced=True))
            return
        attempt.heard_at = self._now
        if attempt.state is DecodeState.RECEIVING:
            self._post_grant(attempt)
        elif attempt.state in (DecodeState.STARTED, DecodeState.ENDED):
            self._post_end(attempt)

    def _reserve(self, asked: DeferredAsk, reply: Header) -> Refuse | Renew | None:
        """Admit a new request; return a REFUSE, or a RENEW if the ASK is to be deferred."""
        ask, header, block_size = asked.ask, asked.ask.header, self._manager.block_size
        if not PartCut(ask.block_size, block_size, 0, 0).is_possible:
            return Refuse(reply, "block size", ask.block_size, block_size)
        # Before anything is allocated: a request allocates room for all of its tokens.
        needed = -(-(len(ask.prompt) // 4 + ask.max_new_tokens - 1) // block_size)
        if needed > self._manager.num_blocks:
            return Refuse(reply, "too large", needed, self._manager.num_blocks)
        try:
            request = request_of(ask) if asked.request is None else asked.request
            asked.is_fetching = False
            has_room = self._deferred.has_room(request.request_id)
            if has_room and self._is_in_flight(request):
                return Renew(reply)
            lease = request.lease = self._admit(request, self._may_wait(asked))
        except (RequestError, TokenError) as error:
            return Refuse(reply, "malformed", 0, 0, str(error)[:MAX_REASON_CHARS])
        except OutOfBlocksError as short:
            return Refuse(reply, "out of blocks", short.needed, short.available)
        except RequestTooLargeError as large:
            return Refuse(reply, "too large", large.needed, large.num_blocks)
        except RefusedError as refused:
            return Refuse(reply, refused.reason, refused.needed, refused.available)
        if lease is None:
            if asked.request is None:
                asked.request, asked.fetches_at = request, self._now
            asked.is_fetching = True
            return Renew(reply)
        self._last_grant += 1
        now, header = self._now, Header(header.key, self.epoch, header.epoch, self._last_grant)
        sizes = ask.num_groups, ask.block_size
        attempt = DecodeAttempt(header, asked.peer, request, *sizes, lease, now, now, now)
        self._attempts.add(attempt)
        if lease.loading is None:
            self._grant(attempt)
        else:
            self._move(attempt, DecodeState.LOADING)
        return None

    def _may_wait(self, asked: DeferredAsk) -> bool:
        """Whether an ASK may wait, or wait longer, for blocks from storage."""
        if asked.request is None:
            return self._deferred.has_room(asked.key.request_id)
        return self._now - asked.fetches_at < self._timing.silence_s

    def _must_wait(self, deferred: DeferredAsk) -> bool:
        """Whether blocks of a deferred ASK are on their way from storage, and not late."""
        assert deferred.request is not None, f"{deferred.key} fetches nothing"
        return self._may_wait(deferred) and self._is_fetching(deferred.request)

    def _drop(self, deferred: DeferredAsk) -> None:
        """Forget an ASK that is not granted."""
        self._deferred.remove(deferred.key.request_id)
        if deferred.request is not None:
            self._forget(deferred.request)

    def _admit_any(self, request: Request, may_wait: bool) -> Lease:
        return self._manager.admit(self._manager.match(request.prompt, request.namespace))

    def _is_in_flight(self, request: Request) -> bool:
        """Whether D is receiving a block that it lacks of this prompt, for a similar prompt.

        A prompt that shares less is not worth the wait: its blocks match only when all of it has
        arrived.
        """
        others = [each for each in self.receiving if each.namespace == request.namespace]
        if not others:
            return False
        block_size = self._manager.block_size
        first = self._manager.match(request.prompt, request.namespace).num_blocks
        return any(
            num_shared_blocks(request.prompt, each.prompt, block_size) > first for each in others
        )

    # Transitions

    def _grant(self, attempt: DecodeAttempt) -> None:
        block_size, num_tokens = self._manager.block_size, len(attempt.tokens)
        num_cached = attempt.lease.num_shared_blocks * block_size
        attempt.cut = PartCut(attempt.block_size, block_size, num_tokens, num_cached)
        self._move(attempt, DecodeState.RECEIVING)
        self._post_grant(attempt)

    def _post_grant(self, attempt: DecodeAttempt) -> None:
        cut = attempt.granted
        first_block = cut.num_cached_tokens // cut.block_size
        self._post(attempt, Grant(attempt.header, first_block, cut.block_size))

    def _start_if_complete(self, attempt: DecodeAttempt) -> None:
        """Publish and start if COMMIT and every part have arrived."""
        commit = attempt.commit
        if commit is None or attempt.pulls or len(attempt.parts) < commit.num_parts:
            return
        if not attempt.is_complete() or commit.position != len(attempt.tokens):
            self._give_up(attempt, "the parts do not cover the prompt")
            return
        self._manager.publish(attempt.lease, attempt.tokens)
        self._move(attempt, DecodeState.STARTED)
        self._post_end(attempt)
        cached = attempt.granted.num_cached_tokens
        self._actions.append(Start(attempt.header.key, attempt.request, commit, cached))

    def _give_up(self, attempt: DecodeAttempt, reason: str) -> None:
        """End an attempt; its blocks wait for the pulls into them."""
        if attempt.state is DecodeState.STARTED:
            self._actions.append(Stop(attempt.header.key, reason))
        if attempt.state not in _RECEIVES:
            return
        attempt.reason = reason
        for part in attempt.pulls:
            self._actions.append(CancelPull(attempt.part_id(part)))
        if attempt.pulls:
            self._move(attempt, DecodeState.QUARANTINED)
            self._post(attempt, self._abort(attempt, fenced=False))
        else:
            self._end(attempt)

    def _end(self, attempt: DecodeAttempt) -> None:
        request, lease = attempt.request, attempt.lease
        self._move(attempt, DecodeState.ENDED)
        self._manager.release(lease)
        request.lease = None
        self._post_end(attempt)

    def _abort(self, attempt: DecodeAttempt, *, fenced: bool) -> Abort:
        return Abort(attempt.header, attempt.reason, fenced, attempt.has_lost_peer)

    def _post_end(self, attempt: DecodeAttempt) -> None:
        """Tell P how the attempt ended; D reads none of P's blocks any more."""
        if attempt.reason:
            self._post(attempt, self._abort(attempt, fenced=True))
        else:
            self._post(attempt, Ack(attempt.header))

    def _post(self, attempt: DecodeAttempt, message: Message) -> None:
        self._send(attempt.peer, message)

    def _send(self, peer: NodeId, message: Message) -> None:
        self._actions.append(Post(peer, message))

    def _move(self, attempt: DecodeAttempt, state: DecodeState) -> None:
        assert (attempt.state, state) in DECODE_MOVES, f"{attempt.state} to {state}"
        self._has_stopped_receiving |= attempt.state in _RECEIVES and state not in _RECEIVES
        attempt.state = state
        attempt.moved_at = self._now
        if state is DecodeState.ENDED:
            self._attempts.end(attempt)
            attempt.drop_request()

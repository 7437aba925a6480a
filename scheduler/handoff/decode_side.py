"""The hand-off as the decode node sees it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeAlias

from ...kvcache import CacheManager, Lease, OutOfBlocksError, RequestTooLargeError, TokenError
from ..errors import RefusedError, RequestError
from ..request import Request
from .actions import CancelPull, DecodeAction, Post, Pull, Start, Stop, Timing
from .attempts import DecodeAttempt, DecodeAttempts, as_request
from .messages import (
    MAX_REASON_CHARS,
    PROTOCOL_VERSION,
    Abort,
    Ack,
    Ask,
    Commit,
    Grant,
    Head,
    Key,
    Message,
    NodeId,
    Refuse,
    Renew,
    Send,
    Ticket,
)
from .states import DECODE_MOVES, DecodeState

Admit: TypeAlias = Callable[[Request], Lease]
"""Reserves the blocks of a request's prompt; raises an error of `CacheManager.admit`, or
`RefusedError`."""


_RECEIVES: Final = (DecodeState.LOADING, DecodeState.RECEIVING)


class DecodeSide:
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
        self.epoch = epoch
        self._admit = admit if admit is not None else self._admit_any
        self._vocab_size = vocab_size
        self._manager = manager
        self._timing = timing
        self._now = 0.0
        self._last_grant = 0
        self._attempts = DecodeAttempts()
        self._actions: list[DecodeAction] = []

    @property
    def num_open(self) -> int:
        """Attempts that hold blocks, or have started and not finished."""
        return sum(each.state is not DecodeState.ENDED for each in self._attempts.all())

    @property
    def num_known(self) -> int:
        """Attempts that are known, with those that have ended."""
        return len(self._attempts.all())

    @property
    def receiving(self) -> list[Request]:
        """Requests that hold blocks, and have not started: oldest first."""
        return [each.request for each in self._attempts.all() if each.state in _RECEIVES]

    @property
    def quarantined(self) -> list[Request]:
        """Requests that were given up, and hold blocks until the pulls into them are fenced."""
        attempts = self._attempts.all()
        return [each.request for each in attempts if each.state is DecodeState.QUARANTINED]

    def take_actions(self) -> list[DecodeAction]:
        """Hand out what is to be done since the last call, in order."""
        actions, self._actions = self._actions, []
        return actions

    # What the scheduler of D says

    def finished(self, key: Key) -> None:
        """Say that a started attempt is over, and its lease released."""
        attempt = self._attempts.find(key)
        if attempt is not None and attempt.state is DecodeState.STARTED:
            self._move(attempt, DecodeState.ENDED)

    def abort(self, key: Key, reason: str) -> None:
        """Give an attempt up; `Stop` follows if it has started. Nothing if it is not known."""
        attempt = self._attempts.find(key)
        if attempt is not None:
            self._give_up(attempt, reason)

    def abort_receiving(self, reason: str) -> None:
        """Give up every attempt that has not started."""
        for attempt in self._attempts.all():
            if attempt.state in _RECEIVES:
                self._give_up(attempt, reason)

    def keys_of(self, request_id: str) -> list[Key]:
        """Return the attempts of a request that have not ended, oldest first."""
        attempts = self._attempts.of(request_id)
        return [each.head.key for each in attempts if each.state is not DecodeState.ENDED]

    # What the transport and the clock say

    def pulled(self, ticket: Ticket) -> None:
        """Say that all of a part is in its blocks, and nothing is written there any more."""
        attempt = self._ended_pull(ticket)
        if attempt is not None:
            self._start_if_whole(attempt)

    def pull_failed(self, ticket: Ticket, *, fenced: bool, reason: str) -> None:
        """Say that a part will not arrive.

        Args:
            ticket: of a pull.
            fenced: whether nothing is written into its blocks any more; else `pull_fenced` is to
                say so.
            reason: for people.
        """
        attempt = self._ended_pull(ticket) if fenced else self._pulling(ticket)
        if attempt is not None:
            self._give_up(attempt, f"part {ticket.part} could not be pulled: {reason}")

    def pull_fenced(self, ticket: Ticket) -> None:
        """Say that nothing is written any more by a pull that failed or was cancelled."""
        self._ended_pull(ticket)

    def _pulling(self, ticket: Ticket) -> DecodeAttempt | None:
        attempt = self._attempts.find(ticket.key)
        known = attempt is not None and ticket.grant == attempt.head.grant
        return attempt if known and attempt is not None and ticket.part in attempt.pulls else None

    def _ended_pull(self, ticket: Ticket) -> DecodeAttempt | None:
        """Take in that a pull is fenced; return its attempt if that is receiving."""
        attempt = self._pulling(ticket)
        if attempt is None:
            return None
        del attempt.pulls[ticket.part]
        if attempt.state is DecodeState.QUARANTINED and not attempt.pulls:
            self._end(attempt)
        return attempt if attempt.state is DecodeState.RECEIVING else None

    def tick(self, now: float) -> None:
        """Let time pass: grant what has been loaded, and give up what has waited too long."""
        self._now = now
        timing = self._timing
        for attempt in self._attempts.all():
            if attempt.state is DecodeState.ENDED:
                if now - attempt.moved_at >= timing.remember_s:
                    self._move(attempt, DecodeState.GONE)
                    self._attempts.forget(attempt)
                continue
            if attempt.state is DecodeState.LOADING and attempt.lease.loading is None:
                self._grant(attempt)
            if attempt.state not in _RECEIVES:
                continue
            started = [*attempt.pulls.values()]
            if attempt.commit is not None or attempt.state is DecodeState.LOADING:
                started.append(attempt.moved_at)
            if any(now - begun >= timing.transfer_s for begun in started):
                self._give_up(attempt, f"{attempt.state.value} took too long")
            elif now - attempt.heard_at >= timing.silence_s:
                self._give_up(attempt, "the prefill node is silent")
            elif now - attempt.sent_at >= timing.retry_s:
                attempt.sent_at = now
                self._post(attempt, Renew(attempt.head, attempt.missing()))

    # What P says

    def receive(self, peer: NodeId, message: Message) -> None:
        """Take in a message of a prefill node; one that is stale changes nothing."""
        head = message.head
        back = Head(head.key, self.epoch, head.epoch, head.grant)
        if isinstance(message, Ask):
            self._asked(peer, message, back)
            return
        if head.version != PROTOCOL_VERSION:
            return
        attempt = self._attempts.find(head.key)
        if attempt is not None and not (
            attempt.peer == peer and head.grant in (0, attempt.head.grant)
        ):
            attempt = None
        if attempt is None or head.peer_epoch not in (None, self.epoch):
            self._say(peer, Abort(back, "nothing is granted", fenced=True))
            return
        if head.epoch != attempt.head.peer_epoch:
            restarted = head.epoch > (attempt.head.peer_epoch or 0)
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
                self._post(attempt, Renew(attempt.head, missing))

    def _is_token(self, token: int) -> bool:
        return self._vocab_size is None or 0 <= token < self._vocab_size

    def _asked(self, peer: NodeId, ask: Ask, back: Head) -> None:
        """Admit what is asked for, unless that was done, or is stale."""
        head = ask.head
        if head.version != PROTOCOL_VERSION:
            self._say(peer, Refuse(back, "version", head.version, PROTOCOL_VERSION))
            return
        known = self._attempts.of(head.key[0])
        if known and head.key[1] < known[-1].head.key[1]:
            self._say(peer, Abort(back, "a newer attempt has begun", fenced=True))
            return
        attempt = self._attempts.find(head.key)
        if attempt is not None:
            self._asked_again(attempt, peer, head, back)
            return
        for older in known:
            self._give_up(older, "a newer attempt has begun")
        refusal = self._reserve(peer, ask, back)
        if refusal is not None:
            self._say(peer, refusal)

    def _reserve(self, peer: NodeId, ask: Ask, back: Head) -> Refuse | None:
        """Admit a request that is new, or return why not."""
        head, block_size = ask.head, self._manager.block_size
        if ask.block_size != block_size:
            return Refuse(back, "block size", ask.block_size, block_size)
        # Before anything is allocated: a request has room for all of its tokens.
        needed = -(-(len(ask.prompt) // 4 + ask.max_new_tokens - 1) // block_size)
        if needed > self._manager.num_blocks:
            return Refuse(back, "too large", needed, self._manager.num_blocks)
        try:
            request = as_request(ask)
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
        own, now = Head(head.key, self.epoch, head.epoch, self._last_grant), self._now
        attempt = DecodeAttempt(own, peer, request, ask.num_groups, lease, now, now, now)
        self._attempts.add(attempt)
        if lease.loading is None:
            self._grant(attempt)
        else:
            self._move(attempt, DecodeState.LOADING)
        return None

    def _admit_any(self, request: Request) -> Lease:
        return self._manager.admit(self._manager.match(request.prompt, request.namespace))

    def _asked_again(self, attempt: DecodeAttempt, peer: NodeId, head: Head, back: Head) -> None:
        """Repeat the answer to an ASK; a twin of an attempt of P's earlier life gets none."""
        if peer != attempt.peer or head.epoch != attempt.head.peer_epoch:
            self._say(peer, Abort(back, "the attempt is known of another epoch", fenced=True))
            return
        attempt.heard_at = self._now
        if attempt.state is DecodeState.RECEIVING:
            self._post(attempt, Grant(attempt.head, attempt.first_block))
        elif attempt.state in (DecodeState.STARTED, DecodeState.ENDED):
            self._say_end(attempt)

    # Shared steps

    def _grant(self, attempt: DecodeAttempt) -> None:
        attempt.first_block = attempt.lease.num_shared_blocks
        self._move(attempt, DecodeState.RECEIVING)
        self._post(attempt, Grant(attempt.head, attempt.first_block))

    def _start_if_whole(self, attempt: DecodeAttempt) -> None:
        """Publish and start if COMMIT and every part have come."""
        commit = attempt.commit
        if commit is None or attempt.pulls or len(attempt.parts) < commit.num_parts:
            return
        if not attempt.is_whole() or commit.position != len(attempt.tokens):
            self._give_up(attempt, "what was sent is not the prompt")
            return
        self._manager.publish(attempt.lease, attempt.tokens)
        self._move(attempt, DecodeState.STARTED)
        self._say_end(attempt)
        own = attempt.first_block * self._manager.block_size
        self._actions.append(Start(attempt.head.key, attempt.request, commit, own))

    def _give_up(self, attempt: DecodeAttempt, reason: str) -> None:
        """End an attempt; its blocks wait for the pulls into them."""
        if attempt.state is DecodeState.STARTED:
            self._actions.append(Stop(attempt.head.key, reason))
        if attempt.state not in _RECEIVES:
            return
        attempt.reason = reason
        for part in attempt.pulls:
            self._actions.append(CancelPull(attempt.ticket(part)))
        if attempt.pulls:
            self._move(attempt, DecodeState.QUARANTINED)
            self._post(attempt, Abort(attempt.head, reason, fenced=False))
        else:
            self._end(attempt)

    def _end(self, attempt: DecodeAttempt) -> None:
        self._move(attempt, DecodeState.ENDED)
        self._manager.release(attempt.lease)
        attempt.request.lease = None
        self._say_end(attempt)

    def _say_end(self, attempt: DecodeAttempt) -> None:
        """Tell P that nothing of its blocks is read any more, and whether it was of use."""
        if attempt.reason:
            self._post(attempt, Abort(attempt.head, attempt.reason, fenced=True))
        else:
            self._post(attempt, Ack(attempt.head))

    def _post(self, attempt: DecodeAttempt, message: Message) -> None:
        self._say(attempt.peer, message)

    def _say(self, peer: NodeId, message: Message) -> None:
        self._actions.append(Post(peer, message))

    def _move(self, attempt: DecodeAttempt, state: DecodeState) -> None:
        assert (attempt.state, state) in DECODE_MOVES, f"{attempt.state} to {state}"
        attempt.state = state
        attempt.moved_at = self._now

"""The attempts of a decode node: how each starts or ends, and what it holds until then."""

from __future__ import annotations

from typing import Final

from ...kvcache import CacheManager
from ..request import Request
from .actions import (
    CancelPull,
    DecodeAction,
    Post,
    Start,
    Stop,
    Timing,
)
from .attempts import DecodeAttempt, DecodeAttempts
from .messages import (
    Abort,
    Ack,
    AttemptKey,
    Grant,
    Message,
    NodeId,
    Renew,
    Ticket,
)
from .states import DECODE_MOVES, DecodeState

_RECEIVES: Final = (DecodeState.LOADING, DecodeState.RECEIVING)


class LiveDecodes:
    """The base of `DecodeSide`: what does not depend on what P says.

    Blocks are granted by a lease. They are published when all of the prompt has arrived, and given
    back, if it has not, when the last pull into them is fenced. Time alone frees nothing.

    Attributes:
        epoch: of this node.
    """

    def __init__(self, manager: CacheManager, *, epoch: int, timing: Timing) -> None:
        """Start without any; see `DecodeSide`."""
        self.epoch = epoch
        self._manager = manager
        self._timing = timing
        self._now = 0.0
        self._attempts = DecodeAttempts()
        self._actions: list[DecodeAction] = []
        self._has_arrived = False  # or come to nothing: somebody is received no more

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

    def finished(self, key: AttemptKey) -> None:
        """Say that a started attempt is over, and its lease released."""
        attempt = self._attempts.find(key)
        if attempt is not None and attempt.state is DecodeState.STARTED:
            self._move(attempt, DecodeState.ENDED)

    def abort(self, key: AttemptKey, reason: str) -> None:
        """Give an attempt up; `Stop` follows if it has started. Nothing if it is not known."""
        attempt = self._attempts.find(key)
        if attempt is not None:
            self._give_up(attempt, reason)

    def abort_receiving(self, reason: str) -> None:
        """Give up every attempt that has not started."""
        for attempt in self._attempts.all():
            if attempt.state in _RECEIVES:
                self._give_up(attempt, reason)

    def keys_of(self, request_id: str) -> list[AttemptKey]:
        """Return the attempts of a request that have not ended, oldest first."""
        attempts = self._attempts.of(request_id)
        return [each.header.key for each in attempts if each.state is not DecodeState.ENDED]

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
        known = attempt is not None and ticket.grant == attempt.header.grant
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
                self._post(attempt, Renew(attempt.header, attempt.missing()))

    # Shared steps

    def _grant(self, attempt: DecodeAttempt) -> None:
        attempt.first_block = attempt.lease.num_shared_blocks
        self._move(attempt, DecodeState.RECEIVING)
        self._post(attempt, Grant(attempt.header, attempt.first_block))

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
        self._actions.append(Start(attempt.header.key, attempt.request, commit, own))

    def _give_up(self, attempt: DecodeAttempt, reason: str) -> None:
        """End an attempt; its blocks wait for the pulls into them."""
        if attempt.state is DecodeState.STARTED:
            self._actions.append(Stop(attempt.header.key, reason))
        if attempt.state not in _RECEIVES:
            return
        attempt.reason = reason
        for part in attempt.pulls:
            self._actions.append(CancelPull(attempt.ticket(part)))
        if attempt.pulls:
            self._move(attempt, DecodeState.QUARANTINED)
            self._post(attempt, Abort(attempt.header, reason, fenced=False))
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
            self._post(attempt, Abort(attempt.header, attempt.reason, fenced=True))
        else:
            self._post(attempt, Ack(attempt.header))

    def _post(self, attempt: DecodeAttempt, message: Message) -> None:
        self._say(attempt.peer, message)

    def _say(self, peer: NodeId, message: Message) -> None:
        self._actions.append(Post(peer, message))

    def _move(self, attempt: DecodeAttempt, state: DecodeState) -> None:
        assert (attempt.state, state) in DECODE_MOVES, f"{attempt.state} to {state}"
        self._has_arrived |= attempt.state in _RECEIVES and state not in _RECEIVES
        attempt.state = state
        attempt.moved_at = self._now

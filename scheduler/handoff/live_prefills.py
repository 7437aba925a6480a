"""The attempts of a prefill node: how each ends, and what it holds until then."""

from __future__ import annotations

from typing import Final

from ...kvcache import CacheManager
from .actions import (
    Failed,
    Post,
    PrefillAction,
    Timing,
    Withdraw,
)
from .attempts import PrefillAttempt
from .messages import (
    Abort,
    AttemptKey,
    Message,
    Renew,
)
from .states import PREFILL_MOVES, PrefillState

COMPUTES: Final = (PrefillState.PREPARING, PrefillState.COMPUTING)


class LivePrefills:
    """The base of `PrefillSide`: what does not depend on what D says.

    A request's blocks stay pinned until D has said that it reads them no more (ACK, or an ABORT
    that is fenced), or the transport has said that nobody can (`fenced`). Time alone frees nothing.

    Attributes:
        epoch: of this node.
    """

    def __init__(
        self, manager: CacheManager, *, epoch: int, timing: Timing, num_groups: int
    ) -> None:
        """Start without any; see `PrefillSide`."""
        self.epoch = epoch
        self._manager = manager
        self._timing = timing
        self._num_groups = num_groups
        self._now = 0.0
        self._attempts: dict[AttemptKey, PrefillAttempt] = {}
        self._actions: list[PrefillAction] = []

    @property
    def num_open(self) -> int:
        """Attempts that hold blocks."""
        return len(self._attempts)

    def take_actions(self) -> list[PrefillAction]:
        """Hand out what is to be done since the last call, in order."""
        actions, self._actions = self._actions, []
        return actions

    def abort(self, key: AttemptKey, reason: str) -> None:
        """Give an attempt up; nothing happens if it has ended, and `Failed` follows if not."""
        attempt = self._attempts.get(key)
        if attempt is not None and attempt.state is not PrefillState.WITHDRAWN:
            if attempt.state is not PrefillState.PREPARING:
                self._post(attempt, Abort(attempt.header, reason, fenced=False))
            self._give_up(attempt, reason)

    def abort_all(self, reason: str) -> None:
        """Give up every attempt."""
        for key in list(self._attempts):
            self.abort(key, reason)

    def keys_of(self, request_id: str) -> list[AttemptKey]:
        """Return the open attempts of a request, oldest first."""
        return [key for key in self._attempts if key.request_id == request_id]

    def may_compute(self, key: AttemptKey) -> bool:
        """Tell whether an open attempt is to be computed: `Compute` has said so."""
        return self._attempts[key].state in COMPUTES

    # What the transport and the clock say

    def fenced(self, key: AttemptKey) -> None:
        """Say that nobody can read any more what was offered for a withdrawn attempt."""
        attempt = self._attempts.get(key)
        if attempt is not None and attempt.state is PrefillState.WITHDRAWN:
            self._end(attempt)

    def tick(self, now: float) -> None:
        """Let time pass: repeat what has no answer, and give up what has waited too long."""
        self._now = now
        timing = self._timing
        for attempt in list(self._attempts.values()):
            if attempt.state in (PrefillState.PREPARING, PrefillState.WITHDRAWN):
                continue
            is_silent = now - attempt.heard_at >= timing.silence_s
            is_late = now - attempt.moved_at >= timing.transfer_s
            if attempt.state is not PrefillState.COMPUTING and (is_silent or is_late):
                self._abort_late(attempt)
            elif now - attempt.sent_at >= timing.retry_s:
                attempt.sent_at = now
                if attempt.state is PrefillState.ASKING:
                    self._post(attempt, attempt.ask)
                else:
                    self._post(attempt, attempt.commit or Renew(attempt.header))

    def _abort_late(self, attempt: PrefillAttempt) -> None:
        reason = f"no answer from the decode node while {attempt.state.value}"
        is_busy = attempt.state is PrefillState.ASKING and attempt.refusal != ""
        self._post(attempt, Abort(attempt.header, reason, fenced=False))
        self._give_up(attempt, attempt.refusal if is_busy else reason, is_busy=is_busy)

    # Shared steps

    def _commit(self, attempt: PrefillAttempt) -> None:
        attempt.commit = attempt.make_commit()
        self._move(attempt, PrefillState.COMMITTED)
        attempt.heard_at = self._now  # D's silence counts from here on
        self._post(attempt, attempt.commit)

    def _offer(self, attempt: PrefillAttempt, group: int, num_tokens: int) -> None:
        """Offer what D lacks of the blocks that so many tokens fill; the last need not be full."""
        block_size = self._manager.block_size
        while (part := attempt.next_part(group, num_tokens, block_size)) is not None:
            offer, send = part
            self._actions.append(offer)
            self._post(attempt, send)

    def _publish(self, attempt: PrefillAttempt) -> None:
        """Publish what is computed, unless blocks that were offered would be recycled for it.

        Where others have published the same first, the lease's own blocks go; D may be reading
        them, if an earlier group of layers was offered. Then the tree has the blocks already.
        """
        tokens, lease = attempt.tokens[: attempt.num_computed], attempt.lease
        published = lease.num_shared_blocks * self._manager.block_size
        match = self._manager.match(tokens, attempt.request.namespace)
        if self._num_groups == 1 or not attempt.sends or match.num_tokens <= published:
            self._manager.publish(lease, tokens)

    def _give_up(
        self,
        attempt: PrefillAttempt,
        reason: str,
        *,
        is_final: bool = False,
        is_busy: bool = False,
    ) -> None:
        """End an attempt without D; its blocks wait for the fence if any were offered."""
        if attempt.state is PrefillState.WITHDRAWN:
            return
        self._actions.append(Failed(attempt.header.key, reason, is_final, is_busy))
        if attempt.sends:
            self._move(attempt, PrefillState.WITHDRAWN)
            self._actions.append(Withdraw(attempt.header.key))
        else:
            self._end(attempt)

    def _end(self, attempt: PrefillAttempt) -> None:
        if attempt.sends and attempt.state is not PrefillState.WITHDRAWN:  # then it was ACK
            self._actions.append(Withdraw(attempt.header.key, was_read=True))
        self._move(attempt, PrefillState.GONE)
        del self._attempts[attempt.header.key]
        if attempt.num_computed and attempt.lease.loading is None:
            self._manager.publish(attempt.lease, attempt.tokens[: attempt.num_computed])
        self._manager.release(attempt.lease)

    def _post(self, attempt: PrefillAttempt, message: Message) -> None:
        self._actions.append(Post(attempt.peer, message))

    def _move(self, attempt: PrefillAttempt, state: PrefillState) -> None:
        assert (attempt.state, state) in PREFILL_MOVES, f"{attempt.state} to {state}"
        attempt.state = state
        attempt.moved_at = self._now

"""The hand-off protocol of a prefill node, without I/O."""

from __future__ import annotations

from dataclasses import replace
from typing import Final, Literal, TypeAlias, get_args

from ...kvcache import CacheManager, Lease
from ..errors import ConfigError, RequestError, StepOrderError
from ..request import Request
from .actions import Compute, Post, PrefillAction, Timing, Withdraw
from .attempts import PrefillAttempt, make_ask
from .gateway_messages import PrefillFailed
from .messages import (
    BUSY,
    PROTOCOL_VERSION,
    Abort,
    Ack,
    AttemptKey,
    Grant,
    Header,
    Hits,
    Message,
    NodeId,
    Refuse,
    Renew,
)
from .part_cut import PartCut
from .states import PREFILL_MOVES, PrefillState

Order: TypeAlias = Literal["early", "prefill_complete"]
"""When P asks D for blocks: before it computes a prompt, or after."""

ORDERS: Final = get_args(Order)

_COMPUTES: Final = (PrefillState.PREPARING, PrefillState.COMPUTING)


class PrefillSide:
    """Hands requests over to decode nodes, as a state machine without I/O.

    A request's blocks stay pinned until D no longer reads them (ACK, or a fenced ABORT), or until
    the transport says that nobody can read them (`fenced`). Time alone frees nothing.

    Carry out `take_actions` after every call. Not thread-safe.

    Attributes:
        epoch: epoch of this node.
        order: when D is asked for blocks.
    """

    def __init__(
        self,
        manager: CacheManager,
        *,
        epoch: int,
        timing: Timing,
        num_groups: int = 1,
        order: Order = "early",
    ) -> None:
        """Create the side of a node.

        Args:
            manager: owner of P's blocks.
            epoch: higher than in any earlier run of the node.
            timing: timeouts.
            num_groups: number of layer groups that are sent separately.
            order: "early": D grants before P computes, and P sends parts as it computes them.
                "prefill_complete": P computes first, so D holds no blocks meanwhile.

        Raises:
            ConfigError: if order is unknown.
        """
        if order not in ORDERS:
            raise ConfigError(f"order must be one of {ORDERS}, got {order!r}")
        self.epoch = epoch
        self.order = order
        self._manager = manager
        self._timing = timing
        self._num_groups = num_groups
        self._now = 0.0
        self._attempts: dict[AttemptKey, PrefillAttempt] = {}
        # Have asked or committed: D may answer from the next time on, as a step may come before.
        self._undated: list[PrefillAttempt] = []
        self._actions: list[PrefillAction] = []

    @property
    def num_open(self) -> int:
        """Number of attempts that hold blocks."""
        return len(self._attempts)

    def keys_of(self, request_id: str) -> list[AttemptKey]:
        """Return the open attempts of a request, oldest first."""
        return [key for key in self._attempts if key.request_id == request_id]

    def may_compute(self, key: AttemptKey) -> bool:
        """Whether an open attempt is to be computed: `Compute` was handed out for it."""
        return self._attempts[key].state in _COMPUTES

    def take_actions(self) -> list[PrefillAction]:
        """Return the actions since the last call, in order."""
        actions, self._actions = self._actions, []
        return actions

    # Calls of P's scheduler

    def begin(self, key: AttemptKey, peer: NodeId, request: Request) -> Lease:
        """Reserve blocks for a prompt; in the early order, ask D for blocks, too.

        This gives up an older attempt of the same request. Compute the prompt when `Compute` says
        so and the lease's load has ended. The lease stays owned by this side.

        Args:
            key: the attempt.
            peer: the decode node.
            request: not changed.

        Raises:
            RequestError: if this attempt is open.
            RequestTooLargeError, OutOfBlocksError: as `CacheManager.admit`.
        """
        if key in self._attempts:
            raise RequestError(f"{key} is open")
        match = self._manager.match(request.prompt, request.namespace)
        lease = self._manager.admit(match, count_hit=False)
        for older in self.keys_of(key.request_id):
            self.abort(older, "a newer attempt has begun")
        header, now = Header(key, self.epoch), self._now
        ask = make_ask(header, request, self._manager.block_size, self._num_groups)
        attempt = PrefillAttempt(header, peer, ask, request, lease, now, now, now)
        self._attempts[key] = attempt
        if self.order == "early":
            self._ask(attempt)
        else:
            self._compute(attempt, PrefillState.PREPARING)
        return lease

    def computed(self, key: AttemptKey, num_tokens: int, group: int = 0) -> None:
        """Report that the KV of the first num_tokens tokens is written, in one group of layers.

        Report chunk by chunk, and within a chunk the groups in order. Ignored if the attempt has
        ended.

        Raises:
            StepOrderError: if a group or a token was left out, or the lease is being loaded.
        """
        attempt = self._attempts.get(key)
        if attempt is None or attempt.state not in _COMPUTES:
            return
        fits = attempt.num_computed < num_tokens <= len(attempt.tokens)
        if group > 0:
            fits = num_tokens == attempt.chunk_stop
        if group != attempt.group or not fits or attempt.lease.loading is not None:
            raise StepOrderError(
                f"request {key.request_id!r} computed group {group} up to token {num_tokens}, "
                f"expected group {attempt.group} after token {attempt.num_computed}"
            )
        attempt.chunk_stop = num_tokens
        attempt.group = (group + 1) % self._num_groups
        if attempt.group == 0:
            attempt.num_computed = num_tokens
            self._publish(attempt)
        if attempt.state is PrefillState.COMPUTING:
            self._offer(attempt, group, num_tokens)

    def sampled(self, key: AttemptKey, token: int, hits: Hits, record: bytes = b"") -> None:
        """Report the token that follows the prompt. Ignored if the attempt has ended.

        Args:
            key: the attempt.
            token: the token.
            hits: prompt tokens that were not computed.
            record: the ``first_record`` of COMMIT.

        Raises:
            StepOrderError: if the prompt is not computed.
        """
        attempt = self._attempts.get(key)
        if attempt is None or attempt.state not in _COMPUTES:
            return
        length = len(attempt.tokens)
        if attempt.num_computed != length:
            raise StepOrderError(
                f"request {key.request_id!r} sampled after {attempt.num_computed} of {length} "
                "tokens"
            )
        attempt.sampled = token, hits, record
        if attempt.state is PrefillState.COMPUTING:
            self._commit(attempt)
            return
        self._ask(attempt)

    def abort(self, key: AttemptKey, reason: str) -> None:
        """Give an attempt up and report `PrefillFailed`; ignored if it has ended."""
        attempt = self._attempts.get(key)
        if attempt is not None and attempt.state is not PrefillState.WITHDRAWN:
            if attempt.state is not PrefillState.PREPARING:
                self._post(attempt, Abort(attempt.header, reason, fenced=False))
            self._give_up(attempt, reason)

    def abort_all(self, reason: str) -> None:
        """Give up every attempt."""
        for key in list(self._attempts):
            self.abort(key, reason)

    # Events of the transport and the clock

    def fenced(self, key: AttemptKey) -> None:
        """Report that nobody can read the offers of a withdrawn attempt any more."""
        attempt = self._attempts.get(key)
        if attempt is not None and attempt.state is PrefillState.WITHDRAWN:
            self._end(attempt)

    def set_time(self, now: float) -> None:
        """Advance the clock for what is received next; `tick` checks the deadlines."""
        self._now = now
        for attempt in self._undated:
            attempt.moved_at = attempt.heard_at = attempt.sent_at = now
        self._undated.clear()

    def tick(self, now: float) -> None:
        """Advance the clock: repeat unanswered messages, and give up attempts that are too late."""
        self.set_time(now)
        timing = self._timing
        for attempt in list(self._attempts.values()):
            if attempt.state in (PrefillState.PREPARING, PrefillState.WITHDRAWN):
                continue
            is_silent = now - attempt.heard_at >= timing.silence_s
            is_late = now - attempt.moved_at >= timing.transfer_s
            if attempt.state is not PrefillState.COMPUTING and (is_silent or is_late):
                self._abort_late(attempt, is_silent=is_silent)
            elif now - attempt.sent_at >= timing.retry_s:
                attempt.sent_at = now
                if attempt.state is PrefillState.ASKING:
                    self._post(attempt, attempt.ask)
                else:
                    self._post(attempt, attempt.commit or Renew(attempt.header))

    def _abort_late(self, attempt: PrefillAttempt, *, is_silent: bool) -> None:
        reason = f"no answer from the decode node while {attempt.state.value}"
        is_busy = attempt.state is PrefillState.ASKING and attempt.refusal != ""
        self._post(attempt, Abort(attempt.header, reason, fenced=False))
        if is_busy:
            self._give_up(attempt, attempt.refusal, is_busy=True)
        else:
            self._give_up(attempt, reason, is_lost=is_silent)

    # Messages of D

    def receive(self, peer: NodeId, message: Message) -> None:
        """Handle a message of a decode node; a stale one changes nothing."""
        header = message.header
        if header.version != PROTOCOL_VERSION and not isinstance(message, Refuse):
            return
        attempt = self._attempts.get(header.key)
        if attempt is None or attempt.peer != peer or header.peer_epoch != self.epoch:
            self._decline(peer, message, "no such attempt is open")
            return
        known = attempt.header
        if known.peer_epoch is not None and header.epoch != known.peer_epoch:
            if header.epoch > known.peer_epoch:
                self._decline(peer, message, "the decode node restarted")
                self._give_up(attempt, "the decode node restarted", is_lost=True)
            return
        if known.grant and header.grant != known.grant:
            self._decline(peer, message, "granted twice")
            return
        attempt.heard_at = self._now
        asking = attempt.state is PrefillState.ASKING
        match message:
            case Grant() if asking:
                self._granted(attempt, message)
            case Refuse() if asking:
                self._refused(attempt, message)
            case Abort():
                self._give_up(attempt, message.reason, is_lost=message.is_lost)
                if message.fenced and attempt.state is PrefillState.WITHDRAWN:
                    self._end(attempt)
            case Ack() if attempt.commit is not None:
                self._end(attempt)
            case Renew() if asking:
                attempt.refusal = "the decode node receives the same blocks for another request"
            case Renew() if attempt.state is PrefillState.COMMITTED:
                for part in sorted(set(message.missing)):
                    if 0 <= part < len(attempt.sends):
                        self._post(attempt, attempt.sends[part])

    def _decline(self, peer: NodeId, message: Message, reason: str) -> None:
        """Abort a grant that P has no use for."""
        header = message.header
        if isinstance(message, Grant | Renew) and header.grant:
            reply = Header(header.key, self.epoch, header.epoch, header.grant)
            self._actions.append(Post(peer, Abort(reply, reason, fenced=False)))

    def _granted(self, attempt: PrefillAttempt, grant: Grant) -> None:
        header = grant.header
        attempt.header = replace(attempt.header, peer_epoch=header.epoch, grant=header.grant)
        length, num_cached = len(attempt.tokens), grant.first_block * grant.block_size
        cut = PartCut(attempt.ask.block_size, grant.block_size, length, num_cached)
        if not (0 <= grant.first_block <= -(-length // grant.block_size) and cut.is_possible):
            reason = (
                f"granted from block {grant.first_block} of {grant.block_size} tokens on, of a "
                f"prompt of {length} in blocks of {cut.sent_block_size}"
            )
            self.abort(header.key, reason)
            return
        attempt.cut = cut
        attempt.next_block = [cut.first_block] * self._num_groups
        computed = length
        if attempt.sampled is None:
            self._compute(attempt, PrefillState.COMPUTING)
            hit = attempt.lease.num_shared_blocks * self._manager.block_size
            computed = hit if attempt.lease.loading is None else 0
        for group in range(self._num_groups):
            self._offer(attempt, group, computed)
        if attempt.sampled is not None:
            self._commit(attempt)

    def _refused(self, attempt: PrefillAttempt, refuse: Refuse) -> None:
        """End the attempt, or ask again later if it is computed and the reason is temporary."""
        numbers = f"{refuse.needed} needed, {refuse.available} available"
        if refuse.reason in ("block size", "version"):
            numbers = f"{refuse.needed} here, {refuse.available} there"
        elif refuse.reason == "malformed":
            numbers = refuse.detail
        is_busy = refuse.reason in BUSY
        reason = f"refused, {refuse.reason}: {numbers}"
        if is_busy and attempt.sampled is not None:
            attempt.refusal = reason
        else:
            self._give_up(attempt, reason, is_final=not is_busy, is_busy=is_busy)

    # Transitions

    def _compute(self, attempt: PrefillAttempt, state: PrefillState) -> None:
        """Let the scheduler compute an attempt, whose hit counts from now on."""
        self._move(attempt, state)
        self._manager.count_hit(attempt.lease)
        self._actions.append(Compute(attempt.header.key))

    def _ask(self, attempt: PrefillAttempt) -> None:
        self._move(attempt, PrefillState.ASKING)
        self._post(attempt, attempt.ask)
        self._undated.append(attempt)

    def _offer(self, attempt: PrefillAttempt, group: int, num_tokens: int) -> None:
        """Offer the blocks that the first num_tokens tokens fill and D lacks."""
        while (part := attempt.next_part(group, num_tokens)) is not None:
            offer, send = part
            self._actions.append(offer)
            self._post(attempt, send)

    def _publish(self, attempt: PrefillAttempt) -> None:
        """Publish the computed blocks, unless that would recycle blocks that D may be reading.

        Publishing recycles the lease's blocks that another request has published first. D may be
        reading them if an earlier group of layers was offered. The tree has the prefix either way.
        """
        tokens, lease = attempt.tokens[: attempt.num_computed], attempt.lease
        published = lease.num_shared_blocks * self._manager.block_size
        match = self._manager.match(tokens, attempt.request.namespace)
        if self._num_groups == 1 or not attempt.sends or match.num_tokens <= published:
            self._manager.publish(lease, tokens)

    def _commit(self, attempt: PrefillAttempt) -> None:
        attempt.commit = attempt.make_commit()
        self._move(attempt, PrefillState.COMMITTED)
        self._post(attempt, attempt.commit)
        self._undated.append(attempt)

    def _give_up(
        self,
        attempt: PrefillAttempt,
        reason: str,
        *,
        is_final: bool = False,
        is_busy: bool = False,
        is_lost: bool = False,
    ) -> None:
        """End an attempt; if it has offered blocks, they wait for the fence."""
        if attempt.state is PrefillState.WITHDRAWN:
            return
        self._actions.append(PrefillFailed(attempt.header.key, reason, is_final, is_busy, is_lost))
        if attempt.sends:
            self._move(attempt, PrefillState.WITHDRAWN)
            self._actions.append(Withdraw(attempt.header.key))
        else:
            self._end(attempt)

    def _end(self, attempt: PrefillAttempt) -> None:
        if attempt.sends and attempt.state is not PrefillState.WITHDRAWN:  # after ACK
            self._actions.append(Withdraw(attempt.header.key, was_read=True))
        self._move(attempt, PrefillState.GONE)
        del self._attempts[attempt.header.key]
        if attempt.num_computed:
            self._manager.publish(attempt.lease, attempt.tokens[: attempt.num_computed])
        self._manager.release(attempt.lease)

    def _post(self, attempt: PrefillAttempt, message: Message) -> None:
        self._actions.append(Post(attempt.peer, message))

    def _move(self, attempt: PrefillAttempt, state: PrefillState) -> None:
        assert (attempt.state, state) in PREFILL_MOVES, f"{attempt.state} to {state}"
        attempt.state = state
        attempt.moved_at = self._now

"""The hand-off as the prefill node sees it."""

from __future__ import annotations

from dataclasses import replace
from typing import Final, Literal, TypeAlias, get_args

from ...kvcache import CacheManager, Lease
from ..errors import (
    ConfigError,
    RequestError,
    StepOrderError,
)
from ..request import Request
from .actions import (
    Compute,
    Post,
    Timing,
)
from .attempts import PrefillAttempt, make_ask
from .live_prefills import COMPUTES, LivePrefills
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
from .states import PrefillState

Order: TypeAlias = Literal["early", "prefill_complete"]
"""When D is asked for blocks: before P computes a prompt, or when it has."""

ORDERS: Final = get_args(Order)


class PrefillSide(LivePrefills):
    """Hands requests over to decode nodes, as a state machine without I/O.

    A request's blocks stay pinned until D has said that it reads them no more (ACK, or an ABORT
    that is fenced), or the transport has said that nobody can (`fenced`). Time alone frees nothing.

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
        num_groups: int = 1,
        order: Order = "early",
    ) -> None:
        """Make the side of a node.

        Args:
            manager: of P's blocks.
            epoch: higher than that of any earlier life of the node.
            timing: how long to wait.
            num_groups: groups of layers that are sent each on its own.
            order: "early": D grants before P computes, and parts are sent as they are computed.
                "prefill_complete": D holds no blocks meanwhile; P sends all when D has room.

        Raises:
            ConfigError: if there is no such order.
        """
        if order not in ORDERS:
            raise ConfigError(f"order must be one of {ORDERS}, got {order!r}")
        super().__init__(manager, epoch=epoch, timing=timing, num_groups=num_groups)
        self.order = order

    # What the scheduler of P says

    def begin(self, key: AttemptKey, peer: NodeId, request: Request) -> Lease:
        """Reserve blocks for a prompt; in the early order, ask D for as many.

        An older attempt of the same request is given up then. Compute when `Compute` says so, and
        when nothing is being loaded into the lease, which stays this side's.

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
        lease = self._manager.admit(self._manager.match(request.prompt, request.namespace))
        for older in [each for each in self._attempts if each.request_id == key.request_id]:
            self.abort(older, "a newer attempt has begun")
        header, now = Header(key, self.epoch), self._now
        ask = make_ask(header, request, self._manager.block_size, self._num_groups)
        attempt = self._attempts[key] = PrefillAttempt(
            header, peer, ask, request, lease, now, now, now
        )
        if self.order == "early":
            self._move(attempt, PrefillState.ASKING)
            self._post(attempt, ask)
        else:
            self._move(attempt, PrefillState.PREPARING)
            self._actions.append(Compute(key))
        return lease

    def computed(self, key: AttemptKey, num_tokens: int, group: int = 0) -> None:
        """Say that the KV of all tokens before num_tokens is written, in one group of layers.

        Chunk by chunk, and in each chunk the groups in order. What has ended meanwhile is ignored.

        Raises:
            StepOrderError: if a group or a token was left out, or while the lease is loaded.
        """
        attempt = self._attempts.get(key)
        if attempt is None or attempt.state not in COMPUTES:
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

    def sampled(self, key: AttemptKey, token: int, hits: Hits) -> None:
        """Say which token follows the prompt. What has ended meanwhile is ignored.

        Raises:
            StepOrderError: if the prompt is not computed.
        """
        attempt = self._attempts.get(key)
        if attempt is None or attempt.state not in COMPUTES:
            return
        length = len(attempt.tokens)
        if attempt.num_computed != length:
            raise StepOrderError(
                f"request {key.request_id!r} sampled after {attempt.num_computed} of {length} "
                "tokens"
            )
        attempt.sampled = token, hits
        if attempt.state is PrefillState.COMPUTING:
            self._commit(attempt)
            return
        self._move(attempt, PrefillState.ASKING)
        attempt.heard_at = attempt.sent_at = self._now  # D's silence counts from here on
        self._post(attempt, attempt.ask)

    # What D says

    def receive(self, peer: NodeId, message: Message) -> None:
        """Take in a message of a decode node; one that is stale changes nothing."""
        header = message.header
        if header.version != PROTOCOL_VERSION and not isinstance(message, Refuse):
            return
        attempt = self._attempts.get(header.key)
        if attempt is None or attempt.peer != peer or header.peer_epoch != self.epoch:
            self._decline(peer, message, "nobody asks")
            return
        known = attempt.header
        if known.peer_epoch is not None and header.epoch != known.peer_epoch:
            if header.epoch > known.peer_epoch:
                self._decline(peer, message, "the decode node restarted")
                self._give_up(attempt, "the decode node restarted")
            return
        if known.grant and header.grant != known.grant:
            self._decline(peer, message, "granted twice")
            return
        attempt.heard_at = self._now
        self._answer(attempt, message)

    def _decline(self, peer: NodeId, message: Message, reason: str) -> None:
        """Tell D that a grant of it is of no use."""
        header = message.header
        if isinstance(message, Grant | Renew) and header.grant:
            back = Header(header.key, self.epoch, header.epoch, header.grant)
            self._actions.append(Post(peer, Abort(back, reason, fenced=False)))

    def _answer(self, attempt: PrefillAttempt, message: Message) -> None:
        """Take in a message that is about this attempt and, if there is one, its grant."""
        asking = attempt.state is PrefillState.ASKING
        match message:
            case Grant() if asking:
                self._granted(attempt, message)
            case Refuse() if asking:
                self._refused(attempt, message)
            case Abort():
                self._give_up(attempt, message.reason)
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

    def _granted(self, attempt: PrefillAttempt, grant: Grant) -> None:
        header = grant.header
        attempt.header = replace(attempt.header, peer_epoch=header.epoch, grant=header.grant)
        if not 0 <= grant.first_block <= attempt.lease.num_blocks:
            prompt = f"a prompt of {attempt.lease.num_blocks}"
            self.abort(header.key, f"granted from block {grant.first_block} on, of {prompt}")
            return
        attempt.next_block = [grant.first_block] * self._num_groups
        computed = len(attempt.tokens)
        if attempt.sampled is None:
            self._move(attempt, PrefillState.COMPUTING)
            self._actions.append(Compute(header.key))
            hit = attempt.lease.num_shared_blocks * self._manager.block_size
            computed = hit if attempt.lease.loading is None else 0
        for group in range(self._num_groups):
            self._offer(attempt, group, computed)
        if attempt.sampled is not None:
            self._commit(attempt)

    def _refused(self, attempt: PrefillAttempt, refuse: Refuse) -> None:
        """End the attempt, unless it is computed and D may have room later: it asks again."""
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

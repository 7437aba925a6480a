"""Messages between the gateway and the nodes about attempts.

::

    gateway                          P                                D
      ── RunPrefill ──────────────►    ── NodeStatus ──────────────►    at their first hand-off
                                       ◄─────── the hand-off ───────►
      ◄───────────────────────────────────────────────────── Started ─
      ── FollowAttempt ────────────────────────────────────────────►   if a client streams
      ◄──────────────────────────────────────────────────── Progress ─
      ◄──────────────────────────────────────────────────── Finished ─

If something fails, PrefillFailed or DecodeFailed comes instead. The sender repeats each of these
five until a DeliveryAck answers it. While an attempt is preempted, and its KV is in storage, D
repeats Preempted; if another D has room, the gateway cancels the attempt, and begins the next one
with the tokens in it. The gateway sends CancelAttempt once, to all nodes, when an
attempt is no longer wanted: a node that missed it reports on the attempt later and is told again.
A gateway that wants the tokens of an attempt as they come follows it. Progress may be lost: the
gateway, which knows how many tokens it has, asks again from there, and Finished has all tokens.
Every node sends a NodeStatus at intervals to the gateway and to the nodes that it works with. It
says that the node is alive, and its address. With CacheUpdates it tells the gateway which blocks it
has (``gateway/cache_index.py``). `RequestRetrier` makes the keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, TypeAlias

import numpy as np

from ..request import MAX_TOKENS, Request, SamplingParams
from .messages import AttemptKey, Hits, NodeId

GATEWAY: Final[NodeId] = "gateway"
"""Name of the gateway in every deployment."""

Role: TypeAlias = Literal["prefill", "decode"]


@dataclass(frozen=True, slots=True)
class RunPrefill:
    """The gateway asks P to begin an attempt and to hand it over to a decode node.

    Attributes:
        epoch: P's epoch; in another epoch, P ignores the message.
        prompt: little-endian int32 tokens.
        logprobs: see `Request`.
    """

    key: AttemptKey
    epoch: int
    prompt: bytes
    max_new_tokens: int
    priority: int
    sampling: SamplingParams
    stop_token_ids: tuple[int, ...]
    namespace: bytes
    decode_node: str
    decode_address: str
    logprobs: int | None = None

    @classmethod
    def of(
        cls, key: AttemptKey, epoch: int, request: Request, decode_node: str, decode_address: str
    ) -> RunPrefill:
        """Return the message for an attempt of a request, to one epoch of P."""
        return cls(
            key,
            epoch,
            request.prompt.astype("<i4").tobytes(),
            request.max_new_tokens,
            request.priority,
            request.sampling,
            tuple(request.stop_token_ids),
            request.namespace,
            decode_node,
            decode_address,
            request.logprobs,
        )

    def request(self) -> Request:
        """Return the request, named as the key."""
        return Request(
            self.key.request_id,
            np.frombuffer(self.prompt, "<i4").astype(np.int32),
            self.max_new_tokens,
            priority=self.priority,
            sampling=self.sampling,
            stop_token_ids=self.stop_token_ids,
            namespace=self.namespace,
            logprobs=self.logprobs,
        )


@dataclass(frozen=True, slots=True)
class CancelAttempt:
    """The gateway asks all nodes to give up an attempt, if they know it."""

    key: AttemptKey
    reason: str


@dataclass(frozen=True, slots=True)
class Started:
    """D reports that it decodes an attempt."""

    key: AttemptKey


@dataclass(frozen=True, slots=True)
class FollowAttempt:
    """The gateway asks D to report the tokens of an attempt that it decodes as they come.

    Attributes:
        num_tokens: number of tokens that the gateway has; D goes on after them.
    """

    key: AttemptKey
    num_tokens: int


MAX_NEW_TOKENS: Final = 1 << 17
"""Limit per request: its output tokens travel in one message."""

MAX_PROGRESS_ATTEMPTS: Final = 1024
MAX_PROGRESS_TOKENS: Final = 8192
"""Limits of one ``Progress``, so that it never delays other messages; the rest comes next.

Each log probability counts as a token more.
"""


class NewTokens(NamedTuple):
    """Tokens of a followed attempt, with their ``records`` if it has log probabilities.

    ``start`` is the position of the first one in its output.
    """

    key: AttemptKey
    start: int
    tokens: tuple[int, ...]
    records: bytes = b""


@dataclass(frozen=True, slots=True)
class Progress:
    """D reports new tokens of the attempts that the gateway follows; each at most once."""

    attempts: tuple[NewTokens, ...]


@dataclass(frozen=True, slots=True)
class Finished:
    """D reports all tokens of an attempt, including P's first one.

    Attributes:
        hits: P's hits, by tier.
        num_preemptions: number of preemptions on D.
        records: log probabilities of the tokens, if the request asks for them; see ``records``.
    """

    key: AttemptKey
    tokens: tuple[int, ...]
    hits: Hits
    num_preemptions: int
    records: bytes = b""


@dataclass(frozen=True, slots=True)
class Preempted:
    """D reports that an attempt waits for blocks, with all of its tokens so far.

    For the attributes, see ``Finished``.
    """

    key: AttemptKey
    tokens: tuple[int, ...]
    hits: Hits
    num_preemptions: int
    records: bytes = b""


@dataclass(frozen=True, slots=True)
class PrefillFailed:
    """P reports that an attempt has failed, as far as P knows.

    Attributes:
        is_final: whether every other attempt would fail, too.
        is_busy: whether D refused it for a temporary reason.
        is_lost: whether P and D do not hear each other, or D has restarted.
    """

    key: AttemptKey
    reason: str
    is_final: bool = False
    is_busy: bool = False
    is_lost: bool = False


@dataclass(frozen=True, slots=True)
class DecodeFailed:
    """D reports that it has stopped an attempt that it had started."""

    key: AttemptKey
    reason: str


class NodeLoad(NamedTuple):
    """What a node does, and has done since it started, for those who watch it.

    ``num_running`` requests hold blocks in its scheduler, and ``num_waiting`` wait for blocks;
    on D, these are preempted ones. ``num_used_blocks`` cannot be evicted. ``prompt_tokens`` were
    found or computed, and the hits are those that were found, by tier. ``preemptions`` counts the
    times that a request lost its blocks.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_used_blocks: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    host_hit_tokens: int = 0
    storage_hit_tokens: int = 0
    preemptions: int = 0


IDLE: Final = NodeLoad()


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """A node says that it is alive. The frame carries its name and epoch.

    Attributes:
        address: of its channel.
        transport: name of its transport; both nodes of a hand-off must use the same.
        block_size, num_blocks: of its cache.
        model: name of its model's configuration, and the dtype of its KV; nodes compare their
            weights among themselves.
        unheard: nodes that it works with, and has not heard for some time.
        num_updates: number of `CacheUpdate` messages that it has sent so far.
        load: what it does; all 0 to other nodes.
        max_model_len: limit of prompt and output together, in tokens.
    """

    role: Role
    address: str
    transport: str
    block_size: int
    num_blocks: int
    model: str
    unheard: tuple[NodeId, ...] = ()
    num_updates: int = 0
    load: NodeLoad = IDLE
    max_model_len: int = MAX_TOKENS


MAX_UPDATE_BLOCKS: Final = 8192
"""Blocks in one `CacheUpdate`, at most."""


@dataclass(frozen=True, slots=True)
class CacheUpdate:
    """A node tells the gateway which blocks it has got and lost; see ``CacheIndex``.

    Attributes:
        number: 0 for the first update of an epoch, and one more for each next one.
        is_first: whether the node had nothing before this update, which need not be true: the
            updates from this one on name all that it has.
        device_stored, device_removed, host_stored, host_removed: hashes of blocks, little-endian
            uint64 each. No hash is in two fields of one tier.
    """

    number: int
    is_first: bool
    device_stored: bytes
    device_removed: bytes
    host_stored: bytes
    host_removed: bytes


@dataclass(frozen=True, slots=True)
class CacheAsk:
    """The gateway asks a node for its updates from a number on."""

    number: int


AttemptMessage: TypeAlias = RunPrefill | Started | Finished | PrefillFailed | DecodeFailed
"""Messages that are repeated until they are acknowledged: at most one of a kind per attempt."""


@dataclass(frozen=True, slots=True)
class DeliveryAck:
    """The receiver of an ``AttemptMessage`` acknowledges it.

    Attributes:
        kind: class name of the message.
    """

    key: AttemptKey
    kind: str

    @classmethod
    def of(cls, message: AttemptMessage) -> DeliveryAck:
        """Return the acknowledgement of a message; every copy has the same."""
        return cls(message.key, type(message).__name__)


GatewayMessage: TypeAlias = (
    AttemptMessage
    | CancelAttempt
    | FollowAttempt
    | Progress
    | Preempted
    | NodeStatus
    | DeliveryAck
    | CacheUpdate
    | CacheAsk
)

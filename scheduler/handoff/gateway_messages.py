"""Messages between the gateway and the nodes about attempts.

::

    gateway                          P                                D
      ── RunPrefill ──────────────►    ── NodeStatus ──────────────►    at their first hand-off
                                       ◄─────── the hand-off ───────►
      ◄───────────────────────────────────────────────────── Started ─
      ◄──────────────────────────────────────────────────── Finished ─

If something fails, PrefillFailed or DecodeFailed comes instead. The sender repeats each of these
five until a DeliveryAck answers it. The gateway sends CancelAttempt once, to all nodes, when an
attempt is no longer wanted: a node that missed it reports on the attempt later and is told again.
Every node sends a NodeStatus at intervals to the gateway and to the nodes that it works with. It
says that the node is alive, and its address. `RequestRetrier` makes the keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

import numpy as np

from ..request import Request, SamplingParams
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
class Finished:
    """D reports all tokens of an attempt, including P's first one.

    Attributes:
        hits: P's hits, by tier.
        num_preemptions: number of preemptions on D.
    """

    key: AttemptKey
    tokens: tuple[int, ...]
    hits: Hits
    num_preemptions: int


@dataclass(frozen=True, slots=True)
class PrefillFailed:
    """P reports that an attempt has failed, as far as P knows.

    Attributes:
        is_final: whether every other attempt would fail, too.
        is_busy: whether D refused it for a temporary reason.
    """

    key: AttemptKey
    reason: str
    is_final: bool = False
    is_busy: bool = False


@dataclass(frozen=True, slots=True)
class DecodeFailed:
    """D reports that it has stopped an attempt that it had started."""

    key: AttemptKey
    reason: str


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """A node says that it is alive. The frame carries its name and epoch.

    Attributes:
        address: of its channel.
        transport: name of its transport; both nodes of a hand-off must use the same.
        block_size, num_blocks: of its cache.
        model: name of its model's configuration, and the dtype of its KV; nodes compare their
            weights among themselves.
    """

    role: Role
    address: str
    transport: str
    block_size: int
    num_blocks: int
    model: str


AttemptMessage: TypeAlias = RunPrefill | Started | Finished | PrefillFailed | DecodeFailed
"""Messages that are repeated until they are acknowledged: at most one of a kind per attempt."""


@dataclass(frozen=True, slots=True)
class DeliveryAck:
    """The receiver of an `AttemptMessage` acknowledges it.

    Attributes:
        kind: class name of the message.
    """

    key: AttemptKey
    kind: str

    @classmethod
    def of(cls, message: AttemptMessage) -> DeliveryAck:
        """Return the acknowledgement of a message; every copy has the same."""
        return cls(message.key, type(message).__name__)


GatewayMessage: TypeAlias = AttemptMessage | CancelAttempt | NodeStatus | DeliveryAck

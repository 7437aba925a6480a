"""What a gateway and the nodes say to each other about whole requests.

::

    gateway                       P                                D
      ── RunPrefill ──────────────►    ── NodeStatus ──────────────►    at their first hand-off
                                       ◄─────── the hand-off ───────►
      ◄───────────────────────────────────────────────────── Started ─
      ◄──────────────────────────────────────────────────── Finished ─

If something fails, PrefillFailed or DecodeFailed comes instead. The sender repeats each of these
five until a DeliveryAck answers it. The gateway sends CancelAttempt once, to all nodes, when nobody
wants an attempt any more: a node that missed it reports on the attempt later and is told again.
Every node sends a NodeStatus at intervals to the gateway and to the nodes that it works with. It
says that the node is alive, and its address. `RequestRetrier` makes the keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

import numpy as np

from ..request import Request, SamplingParams
from .messages import (
    AttemptKey,
    Hits,
    NodeId,
)

GATEWAY: Final[NodeId] = "gateway"
"""The name of the gateway in every deployment."""

Role: TypeAlias = Literal["prefill", "decode"]


@dataclass(frozen=True, slots=True)
class RunPrefill:
    """Gateway to P: begin an attempt, and hand it over to this node.

    Attributes:
        epoch: of the life of P that is asked; another does nothing.
        prompt: int32 tokens, little-endian.
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
        """Ask a life of P for an attempt of a request."""
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
        """Return what is asked for, under the key's name."""
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
    """Gateway to both nodes: end an attempt, where it is known."""

    key: AttemptKey
    reason: str


@dataclass(frozen=True, slots=True)
class Started:
    """D to gateway: an attempt is being decoded."""

    key: AttemptKey


@dataclass(frozen=True, slots=True)
class Finished:
    """D to gateway: all tokens of an attempt, P's first one included.

    Attributes:
        hits: of P, by tier.
        num_preemptions: on D.
    """

    key: AttemptKey
    tokens: tuple[int, ...]
    hits: Hits
    num_preemptions: int


@dataclass(frozen=True, slots=True)
class PrefillFailed:
    """P to gateway: an attempt has come to nothing; see `handoff.Failed`."""

    key: AttemptKey
    reason: str
    is_final: bool
    is_busy: bool


@dataclass(frozen=True, slots=True)
class DecodeFailed:
    """D to gateway: an attempt that had started was stopped."""

    key: AttemptKey
    reason: str


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """A node to whom it has to do with: it is alive; its name and epoch are those of the frame.

    Attributes:
        address: of its channel.
        transport: its name; both nodes of a hand-off must use the same.
        block_size, num_blocks: of its cache.
        model: the name of its model's configuration; which weights it has, nodes tell each other.
    """

    role: Role
    address: str
    transport: str
    block_size: int
    num_blocks: int
    model: str


AttemptMessage: TypeAlias = RunPrefill | Started | Finished | PrefillFailed | DecodeFailed
"""What is said until it is heard: each kind once of an attempt."""


@dataclass(frozen=True, slots=True)
class DeliveryAck:
    """Who got a message of an attempt to who sent it: it has come.

    Attributes:
        kind: the message's type, by name.
    """

    key: AttemptKey
    kind: str

    @classmethod
    def of(cls, message: AttemptMessage) -> DeliveryAck:
        """Answer a message; each copy has the same answer."""
        return cls(message.key, type(message).__name__)


GatewayMessage: TypeAlias = AttemptMessage | CancelAttempt | NodeStatus | DeliveryAck

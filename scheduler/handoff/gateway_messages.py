"""What a front desk and the nodes say to each other about whole requests.

::

    front desk                       P                                D
      ── RunPrefill ──────────────►    ── NodeStatus ──────────────►    at their first hand-off
                                       ◄─────── the hand-off ───────►
      ◄───────────────────────────────────────────────────── Started ─
      ◄──────────────────────────────────────────────────── Finished ─

PrefillFailed and DecodeFailed come instead when something fails. Each of these five is said again
until Heard answers it. GiveUp goes to all nodes when nobody wants an attempt any more, and is said
once: who has not heard it reports on the attempt in the end, and is told again. Every node says
NodeStatus now and then to the desk, and to the nodes that it has to do with: that it is alive, and
where. The keys are `FrontDesk`'s.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

import numpy as np

from ..request import Request, SamplingParams
from .messages import (
    Hits,
    Key,
    NodeId,
)

DESK: Final[NodeId] = "desk"
"""The name of the front desk in every deployment."""

Role: TypeAlias = Literal["prefill", "decode"]


@dataclass(frozen=True, slots=True)
class RunPrefill:
    """Desk to P: begin an attempt, and hand it over to this node.

    Attributes:
        epoch: of the life of P that is asked; another does nothing.
        prompt: int32 tokens, little-endian.
    """

    key: Key
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
        cls, key: Key, epoch: int, request: Request, decode_node: str, decode_address: str
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
class GiveUp:
    """Desk to both nodes: end an attempt, where it is known."""

    key: Key
    reason: str


@dataclass(frozen=True, slots=True)
class Started:
    """D to desk: an attempt is being decoded."""

    key: Key


@dataclass(frozen=True, slots=True)
class Finished:
    """D to desk: all tokens of an attempt, P's first one included.

    Attributes:
        hits: of P, by tier.
        num_preemptions: on D.
    """

    key: Key
    tokens: tuple[int, ...]
    hits: Hits
    num_preemptions: int


@dataclass(frozen=True, slots=True)
class PrefillFailed:
    """P to desk: an attempt has come to nothing; see `handoff.Failed`."""

    key: Key
    reason: str
    is_final: bool
    is_busy: bool


@dataclass(frozen=True, slots=True)
class DecodeFailed:
    """D to desk: an attempt that had started was stopped."""

    key: Key
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


OfAttempt: TypeAlias = RunPrefill | Started | Finished | PrefillFailed | DecodeFailed
"""What is said until it is heard: each kind once of an attempt."""


@dataclass(frozen=True, slots=True)
class Heard:
    """Who got a message of an attempt to who sent it: it has come.

    Attributes:
        kind: the message's type, by name.
    """

    key: Key
    kind: str

    @classmethod
    def of(cls, message: OfAttempt) -> Heard:
        """Answer a message; each copy has the same answer."""
        return cls(message.key, type(message).__name__)


ClientMessage: TypeAlias = OfAttempt | GiveUp | NodeStatus | Heard

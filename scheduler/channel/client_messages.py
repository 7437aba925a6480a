"""What a front desk, the nodes and clients say to each other about whole requests.

::

    client                  front desk                        P              D
      ── Submit ───────────────► chooses P and D
                                 ── RunDecode ────────────────────────────────►
                                 ── RunPrefill ──────────────►  (the hand-off)
                                 ◄─────────────────────────────────── Started ─
                                 ◄────────────────────────────────── Finished ─
      ◄─────────────── Answer ──

PrefillFailed and DecodeFailed come instead when something fails, and GiveUp goes to both nodes when
nobody wants an attempt any more. Every node says NodeStatus now and then: that it is alive, and how
much it has to do. The keys and the answers are `FrontDesk`'s: one answer per request.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from ..handoff.front_desk import Answer
from ..handoff.messages import Key
from ..request import SamplingParams

Role: TypeAlias = Literal["prefill", "decode"]


@dataclass(frozen=True, slots=True)
class Submit:
    """Client to desk: continue this.

    Attributes:
        request_id: never used before.
        prompt: int32 tokens, little-endian.
        reply_to: the client's address, for the answer.
    """

    request_id: str
    prompt: bytes
    max_new_tokens: int
    sampling: SamplingParams
    stop_token_ids: tuple[int, ...]
    namespace: bytes
    reply_to: str


@dataclass(frozen=True, slots=True)
class Withdrawal:
    """Client to desk: nobody wants the answer any more."""

    request_id: str


@dataclass(frozen=True, slots=True)
class RunPrefill:
    """Desk to P: begin an attempt, and hand it over to this node."""

    key: Key
    prompt: bytes
    namespace: bytes
    sampling: SamplingParams
    decode_node: str
    decode_address: str


@dataclass(frozen=True, slots=True)
class RunDecode:
    """Desk to D: an attempt will be handed over by this node; this is how to go on with it."""

    key: Key
    max_new_tokens: int
    sampling: SamplingParams
    stop_token_ids: tuple[int, ...]
    prefill_node: str
    prefill_address: str


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
    """D to desk: all tokens of an attempt, P's first one included."""

    key: Key
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PrefillFailed:
    """P to desk: an attempt has come to nothing; is_final: no other can do better."""

    key: Key
    reason: str
    is_final: bool


@dataclass(frozen=True, slots=True)
class DecodeFailed:
    """D to desk: an attempt that had started was stopped."""

    key: Key
    reason: str


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """A node to the desk: it is alive; its name and epoch are those of the frame.

    Attributes:
        address: of its channel.
        transport: its name; both nodes of a hand-off must use the same.
        num_waiting: requests that hold no blocks yet.
        num_running: requests that hold blocks.
        num_waiting_tokens: prompt tokens that are to be computed.
    """

    role: Role
    address: str
    transport: str
    block_size: int
    num_blocks: int
    num_free_blocks: int
    num_waiting: int
    num_running: int
    num_waiting_tokens: int


ClientMessage: TypeAlias = (
    Submit
    | Withdrawal
    | Answer
    | RunPrefill
    | RunDecode
    | GiveUp
    | Started
    | Finished
    | PrefillFailed
    | DecodeFailed
    | NodeStatus
)

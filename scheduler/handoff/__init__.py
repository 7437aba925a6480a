"""The hand-off protocol between prefill and decode nodes, without I/O.

`PrefillSide` and `DecodeSide` take messages, transfer events and the clock, and return actions:
messages to send and transfers to start.
"""

from __future__ import annotations

from .actions import (
    CancelPull,
    Compute,
    DecodeAction,
    Finished,
    Offer,
    Post,
    Preempted,
    PrefillAction,
    Pull,
    Sent,
    Start,
    Started,
    Stop,
    Timing,
    Withdraw,
)
from .decode_side import DecodeSide
from .gateway_messages import DecodeFailed, PrefillFailed
from .messages import (
    MAX_PART_BLOCKS,
    PROTOCOL_VERSION,
    Abort,
    Ack,
    Ask,
    AttemptKey,
    Commit,
    Grant,
    Header,
    Hits,
    Message,
    NodeId,
    PartId,
    Refuse,
    Renew,
    Send,
)
from .prefill_side import Order, PrefillSide
from .states import DECODE_MOVES, PREFILL_MOVES, DecodeState, PrefillState

__all__ = [
    "DECODE_MOVES",
    "MAX_PART_BLOCKS",
    "PREFILL_MOVES",
    "PROTOCOL_VERSION",
    "Abort",
    "Ack",
    "Ask",
    "AttemptKey",
    "CancelPull",
    "Commit",
    "Compute",
    "DecodeAction",
    "DecodeFailed",
    "DecodeSide",
    "DecodeState",
    "Finished",
    "Grant",
    "Header",
    "Hits",
    "Message",
    "NodeId",
    "Offer",
    "Order",
    "PartId",
    "Post",
    "Preempted",
    "PrefillAction",
    "PrefillFailed",
    "PrefillSide",
    "PrefillState",
    "Pull",
    "Refuse",
    "Renew",
    "Send",
    "Sent",
    "Start",
    "Started",
    "Stop",
    "Timing",
    "Withdraw",
]

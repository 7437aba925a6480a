"""The hand-off of requests from a prefill node to a decode node: a protocol without I/O.

Messages, ends of transfers and the clock go in; messages to send and transfers to start come out.
"""

from __future__ import annotations

from .actions import (
    CancelPull,
    Compute,
    DecodeAction,
    Failed,
    Offer,
    Post,
    PrefillAction,
    Pull,
    Start,
    Stop,
    Timing,
    Withdraw,
)
from .decode_side import DecodeSide
from .front_desk import Answer, Begin, Cancel, FrontDesk
from .messages import (
    PROTOCOL_VERSION,
    Abort,
    Ack,
    Ask,
    Commit,
    Grant,
    Head,
    Hits,
    Key,
    Message,
    Refuse,
    Renew,
    Send,
    Ticket,
)
from .prefill_side import PrefillSide
from .states import DECODE_MOVES, PREFILL_MOVES, DecodeState, PrefillState

__all__ = [
    "DECODE_MOVES",
    "PREFILL_MOVES",
    "PROTOCOL_VERSION",
    "Abort",
    "Ack",
    "Answer",
    "Ask",
    "Begin",
    "Cancel",
    "CancelPull",
    "Commit",
    "Compute",
    "DecodeAction",
    "DecodeSide",
    "DecodeState",
    "Failed",
    "FrontDesk",
    "Grant",
    "Head",
    "Hits",
    "Key",
    "Message",
    "Offer",
    "Post",
    "PrefillAction",
    "PrefillSide",
    "PrefillState",
    "Pull",
    "Refuse",
    "Renew",
    "Send",
    "Start",
    "Stop",
    "Ticket",
    "Timing",
    "Withdraw",
]

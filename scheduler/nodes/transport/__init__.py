"""How the KV of a prompt gets from a prefill node to a decode node: one interface, its engines."""

from __future__ import annotations

from .base import (
    Event,
    Fault,
    Offered,
    OfferFailed,
    PullFailed,
    Received,
    Transport,
    TransportStats,
    Withdrawn,
)
from .descriptors import (
    ArraySpec,
    Descriptor,
    PayloadArray,
    WireTicket,
    describe,
)
from .errors import (
    TransportArgumentError,
    TransportClosedError,
    TransportError,
    TransportUnavailableError,
)
from .in_process import InProcessExchange, InProcessTransport
from .registry import PROCESS_TRANSPORTS, open_transport

__all__ = [
    "PROCESS_TRANSPORTS",
    "ArraySpec",
    "Descriptor",
    "Event",
    "Fault",
    "InProcessExchange",
    "InProcessTransport",
    "OfferFailed",
    "Offered",
    "PayloadArray",
    "PullFailed",
    "Received",
    "Transport",
    "TransportArgumentError",
    "TransportClosedError",
    "TransportError",
    "TransportStats",
    "TransportUnavailableError",
    "WireTicket",
    "Withdrawn",
    "describe",
    "open_transport",
]

"""Transports: move the KV of a prompt from a prefill node to a decode node.

Public are the interface `Transport` with its events, descriptions and errors, `InProcessTransport`,
and `open_transport` for transports between processes.
"""

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
from .descriptors import ArraySpec, Descriptor, PayloadArray, PullInfo, describe
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
    "PullInfo",
    "Received",
    "Transport",
    "TransportArgumentError",
    "TransportClosedError",
    "TransportError",
    "TransportStats",
    "TransportUnavailableError",
    "Withdrawn",
    "describe",
    "open_transport",
]

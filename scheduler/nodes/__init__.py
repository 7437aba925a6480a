"""Engines of prefill and decode nodes over a model, and both in one process."""

from __future__ import annotations

from .decode_node import DecodeEngine, DecodeReport
from .in_process import Disaggregated
from .node import (
    Letter,
    NodeEngine,
    NodeStats,
)
from .prefill_node import PrefillEngine

__all__ = [
    "DecodeEngine",
    "DecodeReport",
    "Disaggregated",
    "Letter",
    "NodeEngine",
    "NodeStats",
    "PrefillEngine",
]

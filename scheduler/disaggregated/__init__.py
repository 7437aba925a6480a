"""Engines of prefill and decode nodes over a model, and both in one process."""

from __future__ import annotations

from .decode_engine import DecodeEngine, DecodeReport
from .in_process import Disaggregated
from .node_engine import Letter, NodeEngine, NodeStats
from .prefill_engine import PrefillEngine

__all__ = [
    "DecodeEngine",
    "DecodeReport",
    "Disaggregated",
    "Letter",
    "NodeEngine",
    "NodeStats",
    "PrefillEngine",
]

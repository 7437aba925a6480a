"""Prefill and decode nodes: their engines, event loop, processes, and clients for all of these.

Public are the engines, which any loop can drive, and `Disaggregated`, which drives them in one
process. `event_loop`, `processes` and `remote_nodes` run nodes in processes of their own.
"""

from __future__ import annotations

from .decode_node import DecodeEngine, DecodeReport
from .in_process import Disaggregated
from .node import NodeEngine, NodeStats, PeerMessage
from .prefill_node import PrefillEngine

__all__ = [
    "DecodeEngine",
    "DecodeReport",
    "Disaggregated",
    "NodeEngine",
    "NodeStats",
    "PeerMessage",
    "PrefillEngine",
]

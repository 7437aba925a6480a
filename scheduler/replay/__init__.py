"""Trace replay: prefix hits, a simulation of the server, and a check of the real engine's tokens.

`run_replay` does all three and `count_hits` only counts hits. They print nothing: they return
results and report to a `Progress`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .hits.counts import HitCounts, count_hits
from .progress import Progress, no_progress
from .simulation.cost_model import GPUS, MODELS, CostError, CostModel, load_costs, named_costs
from .trace import Trace, TraceError, TraceRequest, bundled_trace_path, read_trace

if TYPE_CHECKING:
    from .report import ReplayReport
    from .run import run_replay

__all__ = [
    "GPUS",
    "MODELS",
    "CostError",
    "CostModel",
    "HitCounts",
    "Progress",
    "ReplayReport",
    "Trace",
    "TraceError",
    "TraceRequest",
    "bundled_trace_path",
    "count_hits",
    "load_costs",
    "named_costs",
    "no_progress",
    "read_trace",
    "run_replay",
]


def __getattr__(name: str) -> Any:
    # run_replay imports JAX; counting hits and reading traces must not wait for that.
    if name == "run_replay":
        from .run import run_replay

        return run_replay
    if name == "ReplayReport":
        from .report import ReplayReport

        return ReplayReport
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

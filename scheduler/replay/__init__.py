"""Trace replay: how often a cache would hit, how a server would fare, and whether the tokens stay.

`run_replay` does it all; `count_hits` only counts. Neither prints: they return reports, and tell a
`Progress` how far they are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .hits.hits import HitCounts, count_hits
from .progress import Progress, no_progress
from .simulation.cost_model import (
    GPUS,
    MODELS,
    CostError,
    CostModel,
    load_costs,
    named_costs,
)
from .trace import (
    Trace,
    TraceError,
    TraceRequest,
    bundled_trace_path,
    read_trace,
)

if TYPE_CHECKING:
    from .report.report import ReplayReport
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
    # The real run needs JAX; counting hits and reading traces must not wait for it.
    if name == "run_replay":
        from .run import run_replay

        return run_replay
    if name == "ReplayReport":
        from .report.report import ReplayReport

        return ReplayReport
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

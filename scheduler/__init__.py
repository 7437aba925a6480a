"""Requests, schedulers, the engine and trace replay.

Names are imported when they are first used: the command line must start without JAX and numpy.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .decode import DecodeScheduler
    from .engine import CopyStats, Engine, EngineStats, make_storage_namespace
    from .errors import (
        ConfigError,
        EngineClosedError,
        HandoffsOpenError,
        RefusedError,
        RequestError,
        SchedulerError,
        StepOrderError,
    )
    from .mixed import MixedScheduler
    from .nodes import (
        DecodeEngine,
        Disaggregated,
        PrefillEngine,
    )
    from .policy import (
        Fcfs,
        Policy,
        Priority,
    )
    from .prefill import PrefillScheduler
    from .request import (
        Request,
        RequestStatus,
        SamplingParams,
    )
    from .step_plan import (
        Chunk,
        SchedulerStats,
        StepPlan,
    )

_HOME = {
    "Chunk": "step_plan",
    "ConfigError": "errors",
    "CopyStats": "engine",
    "DecodeEngine": "nodes",
    "DecodeScheduler": "decode",
    "Disaggregated": "nodes",
    "Engine": "engine",
    "EngineClosedError": "errors",
    "EngineStats": "engine",
    "Fcfs": "policy",
    "HandoffsOpenError": "errors",
    "MixedScheduler": "mixed",
    "Policy": "policy",
    "PrefillEngine": "nodes",
    "PrefillScheduler": "prefill",
    "Priority": "policy",
    "RefusedError": "errors",
    "Request": "request",
    "RequestError": "errors",
    "RequestStatus": "request",
    "SamplingParams": "request",
    "SchedulerError": "errors",
    "SchedulerStats": "step_plan",
    "StepOrderError": "errors",
    "StepPlan": "step_plan",
    "make_storage_namespace": "engine",
}

__all__ = [
    "Chunk",
    "ConfigError",
    "CopyStats",
    "DecodeEngine",
    "DecodeScheduler",
    "Disaggregated",
    "Engine",
    "EngineClosedError",
    "EngineStats",
    "Fcfs",
    "HandoffsOpenError",
    "MixedScheduler",
    "Policy",
    "PrefillEngine",
    "PrefillScheduler",
    "Priority",
    "RefusedError",
    "Request",
    "RequestError",
    "RequestStatus",
    "SamplingParams",
    "SchedulerError",
    "SchedulerStats",
    "StepOrderError",
    "StepPlan",
    "make_storage_namespace",
]


def __getattr__(name: str) -> object:
    if name in _HOME:
        return getattr(import_module(f".{_HOME[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""Schedulers for LLM inference over a paged KV cache, and the engines that run them.

The modules of this folder are state machines without I/O; the packages below drive them. Names
are imported on first use, because the command line must start without JAX and numpy.
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
        EngineFailedError,
        HandoffsOpenError,
        RefusedError,
        RequestError,
        SchedulerError,
        StepOrderError,
        StreamError,
    )
    from .mixed import MixedScheduler
    from .nodes import DecodeEngine, Disaggregated, PrefillEngine
    from .policy import Fcfs, Policy, Priority
    from .prefill import PrefillScheduler
    from .request import Request, RequestStatus, SamplingParams, TokenLogprob
    from .serving import (
        AsyncEngine,
        GenerationOutput,
        GenerationParams,
        OutputStream,
        PrefixHits,
    )
    from .step_plan import Chunk, SchedulerStats, StepPlan
    from .text import Guided

__all__ = [
    "AsyncEngine",
    "Chunk",
    "ConfigError",
    "CopyStats",
    "DecodeEngine",
    "DecodeScheduler",
    "Disaggregated",
    "Engine",
    "EngineClosedError",
    "EngineFailedError",
    "EngineStats",
    "Fcfs",
    "GenerationOutput",
    "GenerationParams",
    "Guided",
    "HandoffsOpenError",
    "MixedScheduler",
    "OutputStream",
    "Policy",
    "PrefillEngine",
    "PrefillScheduler",
    "PrefixHits",
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
    "StreamError",
    "TokenLogprob",
    "make_storage_namespace",
]

_NAMES = {
    "decode": ["DecodeScheduler"],
    "engine": ["CopyStats", "Engine", "EngineStats", "make_storage_namespace"],
    "errors": [name for name in __all__ if name.endswith("Error")],
    "mixed": ["MixedScheduler"],
    "nodes": ["DecodeEngine", "Disaggregated", "PrefillEngine"],
    "policy": ["Fcfs", "Policy", "Priority"],
    "prefill": ["PrefillScheduler"],
    "serving": [
        "AsyncEngine",
        "GenerationOutput",
        "GenerationParams",
        "OutputStream",
        "PrefixHits",
    ],
    "request": ["Request", "RequestStatus", "SamplingParams", "TokenLogprob"],
    "text": ["Guided"],
    "step_plan": ["Chunk", "SchedulerStats", "StepPlan"],
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return getattr(import_module(f".{_MODULES[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

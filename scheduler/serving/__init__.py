"""Serving: a model by its name, and an engine whose outputs are streams.

`LLM` completes lists of prompts. `AsyncEngine` serves any number of event loops and threads. Names
are imported on first use, because JAX is slow to import.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .async_engine import AsyncEngine, OutputStream
    from .llm import LLM
    from .observer import EndReason, EngineObserver
    from .outputs import GenerationOutput, PrefixHits
    from .params import GenerationParams
    from .sizes import EngineSizes

_MODULES = {
    "LLM": "llm",
    "AsyncEngine": "async_engine",
    "EndReason": "observer",
    "EngineObserver": "observer",
    "EngineSizes": "sizes",
    "GenerationOutput": "outputs",
    "GenerationParams": "params",
    "OutputStream": "async_engine",
    "PrefixHits": "outputs",
}

__all__ = [
    "LLM",
    "AsyncEngine",
    "EndReason",
    "EngineObserver",
    "EngineSizes",
    "GenerationOutput",
    "GenerationParams",
    "OutputStream",
    "PrefixHits",
]


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return getattr(import_module(f".{_MODULES[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

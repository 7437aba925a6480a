"""Serving: an engine on a thread of its own, whose outputs are streams.

`AsyncEngine` serves any number of event loops and threads. Names are imported on first use, because
JAX is slow to import.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .async_engine import AsyncEngine, OutputStream
    from .outputs import GenerationOutput, PrefixHits
    from .params import GenerationParams

_MODULES = {
    "AsyncEngine": "async_engine",
    "GenerationOutput": "outputs",
    "GenerationParams": "params",
    "OutputStream": "async_engine",
    "PrefixHits": "outputs",
}

__all__ = ["AsyncEngine", "GenerationOutput", "GenerationParams", "OutputStream", "PrefixHits"]


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return getattr(import_module(f".{_MODULES[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""The engine runs a scheduler and a model in steps, and moves KV between the tiers.

`Engine` serves requests on one node. `ModelRunner` is the part that the engines of prefill and
decode nodes use as well. Names are imported on first use, because JAX is slow to import.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .engine import Engine
    from .model_runner import ModelRunner
    from .stats import CopyStats, EngineStats
    from .storage_namespace import make_storage_namespace

_MODULES = {
    "CopyStats": "stats",
    "Engine": "engine",
    "EngineStats": "stats",
    "ModelRunner": "model_runner",
    "make_storage_namespace": "storage_namespace",
}

__all__ = ["CopyStats", "Engine", "EngineStats", "ModelRunner", "make_storage_namespace"]


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return getattr(import_module(f".{_MODULES[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""Metrics of an engine for Prometheus, with the names of vLLM where they mean the same.

Public are `EngineMetrics`, `NodesMetrics` and `CONTENT_TYPE`. They need the extra `metrics`
(prometheus-client), so they are imported on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .engine_metrics import CONTENT_TYPE, EngineMetrics
    from .nodes_metrics import NodesMetrics

__all__ = ["CONTENT_TYPE", "EngineMetrics", "NodesMetrics"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = ".nodes_metrics" if name == "NodesMetrics" else ".engine_metrics"
        return getattr(import_module(module, __name__), name)
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "prometheus_client":
            raise
        text = "radixkv.scheduler.metrics needs prometheus-client: pip install 'radixkv[metrics]'"
        raise ImportError(text) from error

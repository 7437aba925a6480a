"""OpenTelemetry spans of requests: one per request, with a child for each stage it went through.

Public are `EngineTracer`, `TraceContext` and `make_otlp_provider`. They need the extra `tracing`
(opentelemetry-sdk), so they are imported on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from .asgi import TraceContext
    from .engine_tracer import EngineTracer
    from .otlp import make_otlp_provider

__all__ = ["EngineTracer", "TraceContext", "make_otlp_provider"]

_MODULES: Final = {
    "EngineTracer": "engine_tracer",
    "TraceContext": "asgi",
    "make_otlp_provider": "otlp",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(f".{_MODULES[name]}", __name__), name)
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "opentelemetry":
            raise
        text = "radixkv.scheduler.tracing needs OpenTelemetry: pip install 'radixkv[tracing]'"
        raise ImportError(text) from error

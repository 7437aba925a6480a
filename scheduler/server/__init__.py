"""An HTTP server with the interface of OpenAI's: completions and chats over an `AsyncEngine`.

`make_app` is an ASGI application for any server; `serve` runs it on uvicorn until a signal. Needs
the extra `serve`. Names are imported on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .app import ServedModel, make_app
    from .limits import ServerLimits
    from .run import serve

_MODULES = {
    "ServedModel": "app",
    "ServerLimits": "limits",
    "make_app": "app",
    "serve": "run",
}

__all__ = ["ServedModel", "ServerLimits", "make_app", "serve"]


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return getattr(import_module(f".{_MODULES[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

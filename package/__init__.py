"""A KV cache for LLM inference in JAX: `radixkv.LLM` generates text; the rest is in subpackages.

Nothing is imported before it is used, so that `radixkv.kvcache` and `radixkv.spec` load no JAX.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .scheduler.serving import LLM

    __version__: str
    """Version of the installed distribution."""

__all__ = ["LLM", "__version__"]


def __getattr__(name: str) -> object:
    if name == "LLM":
        return import_module(".scheduler.serving", __name__).LLM
    if name == "__version__":
        from importlib import metadata  # here, because it is slow to import

        return metadata.version("radixkv")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

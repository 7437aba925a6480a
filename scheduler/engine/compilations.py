"""Counts what XLA compiles, so that "no compilation after warm-up" is a figure and not a hope."""

from __future__ import annotations

from functools import cache

import jax.monitoring

_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


class CompilationCounter:
    """Compilations in this process since the counter was made first.

    Source: the event that JAX records around each backend compilation.
    """

    def __init__(self) -> None:
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._on_event)

    def _on_event(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        del duration_secs, kwargs  # JAX names them
        self.count += event == _COMPILE_EVENT


@cache
def compilation_counter() -> CompilationCounter:
    """Return the one counter of this process: JAX keeps its listeners for ever."""
    return CompilationCounter()

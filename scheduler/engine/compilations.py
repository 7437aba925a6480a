"""A counter of XLA compilations: engines report those after the warm-up."""

from __future__ import annotations

from functools import cache
from threading import Lock

import jax.monitoring

_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


class CompilationCounter:
    """Counts backend compilations in this process, by the event that JAX records for each.

    Attributes:
        count: compilations since the counter was made.
    """

    def __init__(self) -> None:
        self.count = 0
        self._lock = Lock()  # programs are compiled in parallel threads
        jax.monitoring.register_event_duration_secs_listener(self._on_event)

    def _on_event(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        del duration_secs, kwargs  # JAX passes them by name
        with self._lock:
            self.count += event == _COMPILE_EVENT


@cache
def compilation_counter() -> CompilationCounter:
    """Return the only counter of this process, because JAX keeps listeners forever."""
    return CompilationCounter()

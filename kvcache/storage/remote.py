"""How often a server was asked, and how often in vain: figures that need no server."""

from __future__ import annotations

from threading import Lock


class RequestCounts:
    """Two counters that several threads may raise."""

    def __init__(self) -> None:
        """Start at nothing."""
        self._lock = Lock()
        self._requests = 0
        self._failed = 0

    def ask(self) -> None:
        """Count a request."""
        with self._lock:
            self._requests += 1

    def fail(self) -> None:
        """Count the failure of a request."""
        with self._lock:
            self._failed += 1

    def read(self) -> dict[str, int]:
        """Return the counts by name."""
        with self._lock:
            return {"requests": self._requests, "failed_requests": self._failed}

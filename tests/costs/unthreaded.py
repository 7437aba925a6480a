"""Storage whose threads' work is done when a test says so."""

from __future__ import annotations

import atexit
from threading import Thread
from unittest.mock import patch

from radixkv.kvcache.storage import StorageWorkers

from ..kvcache.storage.memory import MemoryBackend


class Unthreaded(StorageWorkers):
    """Workers whose thread's work is done when the test says so."""

    def __init__(self) -> None:
        self.memory = MemoryBackend()
        with patch.object(Thread, "start"):
            super().__init__(self.memory, num_threads=1, max_bytes_in_flight=250)
        self._threads = []
        atexit.unregister(self.close)

    def work(self) -> None:
        """Do what is queued."""
        self._closed = True  # so that the thread's loop ends
        self.has_ended = False
        try:
            self._live()
            self.has_ended = True
        finally:
            self._closed = False

"""A backend with checksummed values, whose errors become statuses."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from errno import EIO
from typing import Final

from .errors import BackendError, BackendIOError
from .interface import Backend, Status
from .value_format import HEADER_BYTES, check_value, make_header

_log = logging.getLogger(__name__)
_LOADED: Final = (Status.LOADED, "")


class ChecksummedBackend:
    """Loads and stores checksummed values on the calling thread; catches every backend exception.

    `StorageWorkers` calls it from its threads; an operator's tool may call it directly.
    """

    def __init__(self, backend: Backend) -> None:
        """Wrap a backend. The caller still closes it."""
        self.backend = backend
        self._logged: dict[str, str] = {}  # last logged error per call, until that call succeeds

    def load(self, key: bytes, into: Sequence[memoryview]) -> tuple[Status, str]:
        """Fill the buffers with the payload of key.

        Deletes a value that is corrupt or that the disk cannot read (EIO), so that a later store
        repairs it.

        Returns:
            LOADED, MISSING, CORRUPT or FAILED, and the name of the error or ``Corruption``, if any.
        """
        header = bytearray(HEADER_BYTES)
        try:
            value_bytes = self.backend.get(key, [memoryview(header), *into])
            self._succeeded("load")
            if value_bytes is None:
                return Status.MISSING, ""
            corruption = check_value(key, header, into, value_bytes)
        except Exception as error:  # any error of a backend makes the block FAILED
            if isinstance(error, BackendIOError) and error.errno == EIO:
                self.delete(key)
            return self._failed("load", error)
        if corruption is None:
            return _LOADED
        _log.warning("block %s is corrupt: %s", key.hex(), corruption.value)
        self.delete(key)
        return Status.CORRUPT, corruption.name

    def store(self, key: bytes, parts: Sequence[memoryview]) -> tuple[Status, str]:
        """Write the payload of key, unless the key exists.

        Returns:
            STORED, EXISTS or FAILED, and the name of the error, if any.
        """
        try:
            exists = self.backend.contains([key])[0]
            if not exists:
                self.backend.put(key, [memoryview(make_header(key, parts)), *parts])
        except Exception as error:
            return self._failed("store", error)
        self._succeeded("store")
        return (Status.EXISTS if exists else Status.STORED), ""

    def lookup(self, keys: Sequence[bytes]) -> tuple[list[Status], str]:
        """Return FOUND or MISSING for each key, or FAILED for all, and the name of the error."""
        try:
            exists = self.backend.contains(keys)
            if len(exists) != len(keys):
                raise BackendError(f"{len(exists)} answers for {len(keys)} keys")
        except Exception as error:
            status, name = self._failed("lookup", error)
            return [status] * len(keys), name
        self._succeeded("lookup")
        return [Status.FOUND if found else Status.MISSING for found in exists], ""

    def touch(self, keys: Sequence[bytes]) -> tuple[list[Status], str]:
        """Return TOUCHED for each key, or FAILED for all, and the name of the error."""
        try:
            self.backend.touch(keys)
        except Exception as error:
            status, name = self._failed("touch", error)
            return [status] * len(keys), name
        self._succeeded("touch")
        return [Status.TOUCHED] * len(keys), ""

    def delete(self, key: bytes) -> tuple[Status, str]:
        """Return DELETED, MISSING or FAILED, and the name of the error, if any."""
        try:
            existed = self.backend.delete(key)
        except Exception as error:
            return self._failed("delete", error)
        self._succeeded("delete")
        return (Status.DELETED if existed else Status.MISSING), ""

    def _succeeded(self, call: str) -> None:
        if self._logged:
            self._logged.pop(call, None)

    def _failed(self, call: str, error: Exception) -> tuple[Status, str]:
        # The text of a client library's error may hold a URL with a password; ours never does.
        name = type(error).__name__
        if self._logged.get(call) != name:  # an unreachable server fails every block: log it once
            self._logged[call] = name
            text = f"{name}: {error}" if isinstance(error, BackendError) else name
            _log.warning("%s failed in the backend: %s; more of these are only counted", call, text)
        return Status.FAILED, name

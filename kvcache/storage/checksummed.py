"""A backend with the envelope around its values and its errors made into statuses."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from errno import EIO
from typing import Final

from .errors import BackendError, BackendIOError
from .interface import Backend, Status
from .value_format import (
    HEADER_BYTES,
    check,
    make_header,
)

_log = logging.getLogger(__name__)
_LOADED: Final = (Status.LOADED, "")


class ChecksummedBackend:
    """One call at a time, on the thread that calls. Never raises what a backend raises.

    The driver calls this from its threads; an operator's tool may call it directly.
    """

    def __init__(self, backend: Backend) -> None:
        """Wrap a backend, which stays its owner's to close."""
        self.backend = backend
        self._logged: dict[str, str] = {}  # the error of each kind of call, until one ends well

    def load(self, key: bytes, into: Sequence[memoryview]) -> tuple[Status, str]:
        """Fill the buffers with the payload of key.

        A value that is corrupt, or that its disk does not give, is deleted: a later store then
        repairs it.

        Returns:
            LOADED, MISSING, CORRUPT or FAILED, and the name of the error or of the fault, if any.
        """
        header = bytearray(HEADER_BYTES)
        try:
            value_bytes = self.backend.get(key, [memoryview(header), *into])
            self._ended_well("load")
            if value_bytes is None:
                return Status.MISSING, ""
            fault = check(key, header, into, value_bytes)
        except Exception as error:  # whatever a backend does, the block is FAILED
            if isinstance(error, BackendIOError) and error.errno == EIO:
                self.delete(key)
            return self._failed("load", error)
        if fault is None:
            return _LOADED
        _log.warning("block %s is corrupt: %s", key.hex(), fault.value)
        self.delete(key)
        return Status.CORRUPT, fault.name

    def store(self, key: bytes, parts: Sequence[memoryview]) -> tuple[Status, str]:
        """Write the payload of key, unless it is there.

        Returns:
            STORED, EXISTS or FAILED, and the name of the error, if any.
        """
        try:
            exists = self.backend.contains([key])[0]
            if not exists:
                self.backend.put(key, [memoryview(make_header(key, parts)), *parts])
        except Exception as error:
            return self._failed("store", error)
        self._ended_well("store")
        return (Status.EXISTS if exists else Status.STORED), ""

    def lookup(self, keys: Sequence[bytes]) -> tuple[list[Status], str]:
        """Return FOUND or MISSING for each key, or FAILED for all, and the name of the error."""
        try:
            there = self.backend.contains(keys)
            if len(there) != len(keys):
                raise BackendError(f"{len(there)} answers for {len(keys)} keys")
        except Exception as error:
            status, name = self._failed("lookup", error)
            return [status] * len(keys), name
        self._ended_well("lookup")
        return [Status.FOUND if found else Status.MISSING for found in there], ""

    def touch(self, keys: Sequence[bytes]) -> tuple[list[Status], str]:
        """Return TOUCHED for each key, or FAILED for all, and the name of the error."""
        try:
            self.backend.touch(keys)
        except Exception as error:
            status, name = self._failed("touch", error)
            return [status] * len(keys), name
        self._ended_well("touch")
        return [Status.TOUCHED] * len(keys), ""

    def delete(self, key: bytes) -> tuple[Status, str]:
        """Return DELETED, MISSING or FAILED."""
        try:
            existed = self.backend.delete(key)
        except Exception as error:
            return self._failed("delete", error)
        self._ended_well("delete")
        return (Status.DELETED if existed else Status.MISSING), ""

    def _ended_well(self, what: str) -> None:
        if self._logged:
            self._logged.pop(what, None)

    def _failed(self, what: str, error: Exception) -> tuple[Status, str]:
        # Not the text of a client's error, which may hold a URL with a password; ours never does.
        name = type(error).__name__
        if self._logged.get(what) != name:  # a server that is away fails every block
            self._logged[what] = name
            text = f"{name}: {error}" if isinstance(error, BackendError) else name
            _log.warning("%s failed in the backend: %s; more of these are only counted", what, text)
        return Status.FAILED, name

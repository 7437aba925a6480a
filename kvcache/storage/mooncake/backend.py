"""The backend over Mooncake Store: values in the pooled memory of several machines.

::

    radixkv:3fa0…e1      prefix, then the key in hex: a value, and one byte of no meaning after it,
                         as Mooncake keeps no empty values

Each call has a process of its own, from a pool, that talks to Mooncake (client_main.py says
why): one that does not answer in time is killed, and the block is a miss. The store may still do
what it was asked; that does no harm, as keys name their contents. What is forgotten, and when, is
the master's choice. Needs the extra ``mooncake``, and Debian's libibverbs1.
"""

from __future__ import annotations

import ctypes
import importlib.util
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import Lock
from typing import Final
from urllib.parse import urlsplit

from ..errors import (
    BackendError,
    BackendRefusedError,
    BackendUnreachableError,
    MissingLibraryError,
    MissingPackageError,
    StorageUrlError,
    UnsupportedError,
)
from ..interface import (
    StoredValue,
    scatter,
)
from ..keys import check_key
from ..remote import RequestCounts
from .client_main import NOT_FOUND
from .client_process import ClientProcess

DEFAULT_PORT: Final = 50051
DEFAULT_PREFIX: Final = "radixkv:"
_NO_CONNECTION: Final = "no connection, or it was lost"
_NO_LIST: Final = "a Mooncake store does not list its keys; to remove all, start its master again"
_TRANSFER_FAILED: Final = range(-899, -799)
_RPC_FAILED: Final = range(-999, -899)
_BEING_WRITTEN: Final = -703
_BUSY: Final = (_BEING_WRITTEN, -601)
_BUSY_S: Final = 0.25
"""How long to wait for another writer of the same key. One that died blocks it for much longer."""
_PAUSE_S: Final = 0.001
_TAIL: Final = memoryview(b"\0")


class MooncakeBackend:
    """Values in a Mooncake store. Each thread that calls has a connection of its own."""

    def __init__(
        self,
        host: str,
        port: int = DEFAULT_PORT,
        *,
        prefix: str = DEFAULT_PREFIX,
        timeout_s: float = 1.0,
        connect_timeout_s: float = 5.0,
    ) -> None:
        """Prepare, without connecting: a master that is down now may be up later.

        Args:
            host: of the master.
            port: of the master.
            prefix: of every key in the store.
            timeout_s: how long a request may take.
            connect_timeout_s: how long a connection may take to be made, process and all.

        Raises:
            MissingPackageError: if `mooncake` is not installed.
            MissingLibraryError: if the library that it needs is not.
            ValueError: if a time is not positive.
        """
        for name, value in (("timeout_s", timeout_s), ("connect_timeout_s", connect_timeout_s)):
            if not value > 0:
                raise ValueError(f"{name} must be positive, got {value}")
        _check_installed()
        self._master = (host, port)
        self._prefix = prefix
        self._timeout_s = timeout_s
        self._connect_timeout_s = connect_timeout_s
        self._counts = RequestCounts()
        self._lock = Lock()  # of what follows; held for no I/O
        self._idle: list[ClientProcess] = []  # the last used last: it is warm
        self._closed = False

    # -- Backend

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """See Backend; one request."""
        if not keys:
            return []
        names = "\n".join(map(self._name, keys)).encode()
        with self._helper("looking up") as helper:
            helper.write([memoryview(names)])
            found = helper.ask("exist", "", len(names), self._timeout_s)
            self._check("looking up", found["code"])
        return [digit == "1" for digit in found["found"]]

    def get(self, key: bytes, into: Sequence[memoryview]) -> int | None:
        """See Backend. Of a longer value, only what there is room for is read."""
        name = self._name(key)
        room = sum(len(part) for part in into)
        with self._helper("reading") as helper:
            code = self._ask_until_free(helper, "get", name, room + 1)
            if code in (NOT_FOUND, _BEING_WRITTEN):
                return None
            self._check("reading", code)
            num_bytes = max(0, code - len(_TAIL))
            scatter(helper.view(min(num_bytes, room)), into)
        return num_bytes

    def put(self, key: bytes, parts: Sequence[memoryview]) -> None:
        """See Backend."""
        name = self._name(key)
        with self._helper("writing") as helper:
            num_bytes = helper.write([*parts, _TAIL])
            self._check("writing", self._ask_until_free(helper, "put", name, num_bytes))

    def delete(self, key: bytes) -> bool:
        """See Backend."""
        name = self._name(key)
        with self._helper("deleting") as helper:
            code = self._ask_until_free(helper, "remove", name, 0)
            if code == NOT_FOUND:
                return False
            self._check("deleting", code)
        return True

    def touch(self, keys: Sequence[bytes]) -> None:
        """See Backend. To ask whether a value is there counts as a use of it."""
        self.contains(keys)

    def list_values(self, *, coldest_first: bool = False) -> Iterator[StoredValue]:
        """Refuse: see Backend."""
        raise UnsupportedError(_NO_LIST)

    def stats(self) -> Mapping[str, int]:
        """Return how many requests there were, and how many failed; asks nobody."""
        return self._counts.read()

    def close(self) -> None:
        """End the processes; a call after this ends its own."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for helper in idle:
            helper.kill()

    # -- the parts of these

    def _name(self, key: bytes) -> str:
        return f"{self._prefix}{check_key(key).hex()}"

    @contextmanager
    def _helper(self, doing: str) -> Iterator[ClientProcess]:
        """Lend a process that is connected; one that was not well is not used again."""
        self._counts.ask()
        try:
            with self._lock:
                helper = self._idle.pop() if self._idle else None
            helper = helper or self._start(doing)
            try:
                self._connect(doing, helper)
                yield helper
            except TimeoutError:
                helper.kill()
                reason = f"no answer within {self._timeout_s:g} s"
                raise BackendUnreachableError(doing, reason) from None
            except (OSError, EOFError):
                helper.kill()
                raise BackendUnreachableError(doing, _NO_CONNECTION) from None
            finally:
                self._take_back(helper)
        except BackendError:
            self._counts.fail()
            raise

    def _start(self, doing: str) -> ClientProcess:
        """Start a process, if the master's port is open: without, it would wait for minutes."""
        try:
            with socket.create_connection(self._master, self._connect_timeout_s) as probe:
                local_host: str = probe.getsockname()[0]
        except OSError:
            raise BackendUnreachableError(doing, _NO_CONNECTION) from None
        return ClientProcess(local_host, f"{self._master[0]}:{self._master[1]}")

    def _connect(self, doing: str, helper: ClientProcess) -> None:
        try:
            helper.wait_connected(self._connect_timeout_s)
        except TimeoutError:  # it goes on trying, for a call to come
            reason = f"no connection within {self._connect_timeout_s:g} s"
            raise BackendUnreachableError(doing, reason) from None

    def _take_back(self, helper: ClientProcess) -> None:
        with self._lock:
            keep = helper.alive and not self._closed
            if keep:
                self._idle.append(helper)
        if not keep:
            helper.kill()

    def _ask_until_free(self, helper: ClientProcess, do: str, name: str, num_bytes: int) -> int:
        """Ask again for a moment while somebody else writes the same key; return the code."""
        start = time.monotonic()
        left_s = self._timeout_s
        while True:
            code: int = helper.ask(do, name, num_bytes, left_s)["code"]
            waited_s = time.monotonic() - start
            busy = code in _BUSY or (do == "put" and code == NOT_FOUND)
            left_s = self._timeout_s - waited_s
            if not busy or waited_s > _BUSY_S or left_s < _PAUSE_S:
                return code
            time.sleep(_PAUSE_S)

    def _check(self, doing: str, code: int) -> None:
        if code in _RPC_FAILED:  # the master is gone, and with it what the process knows of it
            raise EOFError
        if code in _TRANSFER_FAILED:
            raise BackendUnreachableError(doing, "the machine that has the value is gone")
        if code < 0:
            raise BackendRefusedError(doing, f"code {code}")


def master_of(url: str) -> tuple[str, int]:
    """Return host and port of the master in a URL.

    Raises:
        StorageUrlError: if it is not ``mooncake://HOST[:PORT]``.
    """
    wrong = StorageUrlError("a Mooncake store's URL is mooncake://HOST[:PORT], of its master")
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:  # its text quotes the URL
        raise wrong from None
    extra = parts.path.strip("/") or parts.query or parts.fragment
    if not host or ":" in host or "@" in parts.netloc or extra:
        raise wrong
    return host, DEFAULT_PORT if port is None else port


def _check_installed() -> None:
    if importlib.util.find_spec("mooncake") is None:
        raise MissingPackageError("mooncake", "mooncake")
    try:
        ctypes.CDLL("libibverbs.so.1")
    except OSError:
        raise MissingLibraryError("libibverbs.so.1", "libibverbs1") from None

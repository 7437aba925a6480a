"""Mooncake backend: values in the pooled memory of several machines.

::

    radixkv:3fa0…e1      prefix, then the key in hex. One padding byte follows the value, because
                         Mooncake stores no empty values

Mooncake's client runs in a pool of subprocesses, one per concurrent call; `client_main` says why. A
client that does not answer in time is killed, and the block is a miss. The store may still execute
the request later. That does no harm, because keys identify their contents. The master decides what
to evict. Needs the extra ``mooncake`` and the Debian package libibverbs1.
"""

from __future__ import annotations

import ctypes
import importlib.util
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from threading import Lock
from typing import Final
from urllib.parse import urlsplit

from ...cleanup import give_back
from ..errors import (
    BackendError,
    BackendIOError,
    BackendRefusedError,
    BackendUnreachableError,
    MissingLibraryError,
    MissingPackageError,
    StorageUrlError,
    UnsupportedError,
)
from ..interface import StoredValue
from ..keys import check_key
from ..remote import DEFAULT_PREFIX, RequestCounts, check_timeouts, scatter
from .client_main import NOT_FOUND
from .client_process import ClientProcess

DEFAULT_PORT: Final = 50051
_NO_CONNECTION: Final = "no connection, or it was lost"
_NO_LIST: Final = "a Mooncake store does not list its keys; to remove all, restart its master"
_TRANSFER_FAILED: Final = range(-899, -799)
_RPC_FAILED: Final = range(-999, -899)
_BEING_WRITTEN: Final = -703
_BUSY: Final = (_BEING_WRITTEN, -601)
_BUSY_S: Final = 0.25
"""Time limit to wait for another writer of the key. A dead writer blocks the key much longer."""
_PAUSE_S: Final = 0.001
_PADDING: Final = memoryview(b"\0")


class MooncakeBackend:
    """Values in a Mooncake store. Each concurrent call uses a separate client process."""

    def __init__(
        self,
        host: str,
        port: int = DEFAULT_PORT,
        *,
        prefix: str = DEFAULT_PREFIX,
        namespace: str | None = None,
        timeout_s: float = 1.0,
        connect_timeout_s: float = 5.0,
    ) -> None:
        """Prepare without connecting: a master that is down now may be up later.

        Args:
            host: host of the master.
            port: port of the master.
            prefix: prefix of every key in the store.
            namespace: digits that follow the prefix.
            timeout_s: time limit of a request.
            connect_timeout_s: time limit to start a client process and connect it.

        Raises:
            MissingPackageError: if ``mooncake`` is not installed.
            MissingLibraryError: if its library libibverbs is not installed.
            ValueError: if a time is not positive.
        """
        check_timeouts(timeout_s, connect_timeout_s)
        _check_installed()
        self._master = (host, port)
        self._prefix = prefix
        self.namespace = namespace
        self._timeout_s = timeout_s
        self._connect_timeout_s = connect_timeout_s
        self._counts = RequestCounts()
        self._lock = Lock()  # guards the attributes below; never held during I/O
        self._idle: list[ClientProcess] = []  # the most recently used last
        self._closed = False

    # -- Backend

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """See Backend; takes one request."""
        if not keys:
            return []
        names = "\n".join(map(self._name, keys)).encode()
        with self._client("looking up") as client:
            client.write([memoryview(names)])
            found = client.ask("exist", "", len(names), self._timeout_s)
            self._check("looking up", found["code"])
        return [digit == "1" for digit in found["found"]]

    def get(self, key: bytes, into: Sequence[memoryview]) -> int | None:
        """See Backend. Reads only the part of a longer value that fits."""
        name = self._name(key)
        room = sum(len(part) for part in into)
        with self._client("reading") as client:
            code = self._ask_until_free(client, "get", name, room + 1)
            if code in (NOT_FOUND, _BEING_WRITTEN):
                return None
            self._check("reading", code)
            num_bytes = max(0, code - len(_PADDING))
            scatter(client.view(min(num_bytes, room)), into)
        return num_bytes

    def put(self, key: bytes, parts: Sequence[memoryview]) -> None:
        """See Backend."""
        name = self._name(key)
        with self._client("writing") as client:
            num_bytes = client.write([*parts, _PADDING])
            self._check("writing", self._ask_until_free(client, "put", name, num_bytes))

    def delete(self, key: bytes) -> bool:
        """See Backend."""
        name = self._name(key)
        with self._client("deleting") as client:
            code = self._ask_until_free(client, "remove", name, 0)
            if code == NOT_FOUND:
                return False
            self._check("deleting", code)
        return True

    def touch(self, keys: Sequence[bytes]) -> None:
        """See Backend. In Mooncake, a lookup counts as a use."""
        self.contains(keys)

    def list_values(self, *, coldest_first: bool = False) -> Iterator[StoredValue]:
        """Raise UnsupportedError: Mooncake cannot list."""
        raise UnsupportedError(_NO_LIST)

    def stats(self) -> Mapping[str, int]:
        """Return the numbers of requests and failed requests."""
        return self._counts.read()

    def close(self) -> None:
        """Kill the idle client processes; a call in progress kills its process at its end."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        give_back(*[client.kill for client in idle])

    # -- internals

    def _name(self, key: bytes) -> str:
        digits = self.namespace
        inner = "" if digits is None else f"{digits}:"
        return f"{self._prefix}{inner}{check_key(key).hex()}"

    @contextmanager
    def _client(self, doing: str) -> Iterator[ClientProcess]:
        """Lend a connected client process; a process that failed is killed, not reused."""
        with self._counts.request():
            with self._lock:
                client = self._idle.pop() if self._idle else None
            client = client or self._start(doing)
            try:
                self._connect(doing, client)
                yield client
            except TimeoutError:
                give_back(client.kill)
                reason = f"no answer within {self._timeout_s:g} s"
                raise BackendUnreachableError(doing, reason) from None
            except (OSError, EOFError):
                give_back(client.kill)
                raise BackendUnreachableError(doing, _NO_CONNECTION) from None
            except BackendError:
                raise
            except BaseException:  # the next request would read the answer to this one
                give_back(client.kill)
                raise
            finally:
                give_back(partial(self._take_back, client))

    def _start(self, doing: str) -> ClientProcess:
        """Start a client process if the master's port is open; else it would hang for minutes."""
        try:
            with socket.create_connection(self._master, self._connect_timeout_s) as probe:
                local_host: str = probe.getsockname()[0]
        except OSError:
            raise BackendUnreachableError(doing, _NO_CONNECTION) from None
        try:
            return ClientProcess(local_host, f"{self._master[0]}:{self._master[1]}")
        except OSError as error:  # no more processes, memory or files
            raise BackendIOError(doing, error.errno) from error

    def _connect(self, doing: str, client: ClientProcess) -> None:
        try:
            client.wait_connected(self._connect_timeout_s)
        except TimeoutError:  # it keeps trying, for a later call
            reason = f"no connection within {self._connect_timeout_s:g} s"
            raise BackendUnreachableError(doing, reason) from None

    def _take_back(self, client: ClientProcess) -> None:
        with self._lock:
            keep = client.alive and not self._closed
            if keep:
                self._idle.append(client)
        if not keep:
            client.kill()

    def _ask_until_free(self, client: ClientProcess, do: str, name: str, num_bytes: int) -> int:
        """Send a request and return its code; retry for up to _BUSY_S while the key is busy."""
        start = time.monotonic()
        left_s = self._timeout_s
        while True:
            code: int = client.ask(do, name, num_bytes, left_s)["code"]
            waited_s = time.monotonic() - start
            busy = code in _BUSY or (do == "put" and code == NOT_FOUND)
            left_s = self._timeout_s - waited_s
            if not busy or waited_s > _BUSY_S or left_s < _PAUSE_S:
                return code
            time.sleep(_PAUSE_S)

    def _check(self, doing: str, code: int) -> None:
        if code in _RPC_FAILED:  # the master is gone; the client must connect anew
            raise EOFError
        if code in _TRANSFER_FAILED:
            raise BackendUnreachableError(doing, "the machine that has the value is gone")
        if code < 0:
            raise BackendRefusedError(doing, f"code {code}")


def master_of(url: str) -> tuple[str, int]:
    """Return the master's host and port from a URL.

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

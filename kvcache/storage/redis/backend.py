"""Redis backend: one string per block in a Redis or Valkey server, shared by all its clients.

::

    radixkv:3fa0…e1                       prefix, then the key in hex
    radixkv:0123456789abcdef:3fa0…e1      in a namespace: its digits end the prefix

One SET writes a value, so a reader sees all of it or nothing, and writing it again does no harm.
(SET NX would keep a corrupt value.) The server decides what to evict by its `maxmemory-policy` and
`ttl_s`. Needs the extra ``redis``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

from ...cleanup import give_back
from ..errors import (
    BackendError,
    BackendRefusedError,
    BackendUnreachableError,
    MissingPackageError,
    UnsupportedError,
)
from ..interface import StoredValue
from ..keys import KEY_BYTES, NAMESPACE_DIGITS, check_key
from ..remote import DEFAULT_PREFIX, RequestCounts, check_timeouts, scatter
from .address import RedisAddress
from .packer import Packer, Value, Word

_NO_ORDER: Final = (
    "a Redis server does not report LRU order: let its maxmemory-policy evict values, or remove all"
)
_WRONG_TYPE: Final = "WRONGTYPE"
_SCAN_COUNT: Final = 1000
_READ_BYTES: Final = 1 << 20
"""Bytes that the client reads from its socket at once; large, because values are large."""


class RedisBackend:
    """Values in a Redis or Valkey server. Each calling thread uses a separate connection.

    Connections are made on demand, and again after the server was away. There are no retries: a
    call without an answer for timeout_s fails, and the block is a miss. The server may still
    execute the request later. That does no harm, because keys identify their contents.
    """

    def __init__(
        self,
        address: RedisAddress,
        *,
        prefix: str = DEFAULT_PREFIX,
        namespace: str | None = None,
        ttl_s: int | None = None,
        timeout_s: float = 1.0,
        connect_timeout_s: float = 1.0,
        ca_file: str | None = None,
    ) -> None:
        """Prepare without connecting: a server that is down now may be up later.

        Args:
            address: address of the server.
            prefix: prefix of every key in the server.
            namespace: digits that follow the prefix, so that an operator can delete a namespace.
            ttl_s: time to keep a value after it was written or touched; None for no limit.
            timeout_s: time limit for the next bytes of an answer.
            connect_timeout_s: time limit for a connection.
            ca_file: PEM file of the certificates that TLS trusts; None for the system's.

        Raises:
            MissingPackageError: if ``redis`` or ``hiredis`` is not installed.
            ValueError: if a time is not positive.
        """
        check_timeouts(timeout_s, connect_timeout_s)
        if ttl_s is not None and ttl_s < 1:
            raise ValueError(f"ttl_s must be at least 1, got {ttl_s}")
        self._address = address
        self._own_prefix = prefix
        self.namespace = namespace
        self._ttl_s = ttl_s
        self._timeout_s = timeout_s
        self._counts = RequestCounts()
        self._client = _client(address, timeout_s, connect_timeout_s, ca_file)

    def __repr__(self) -> str:
        return f"RedisBackend({self._address!r})"

    # -- Backend

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """See Backend; takes one round trip."""
        if not keys:
            return []
        with self._typed("looking up"):
            pipeline = self._client.pipeline(transaction=False)
            for key in keys:
                pipeline.execute_command("EXISTS", self._name(key))
            return [answer == 1 for answer in pipeline.execute()]

    def get(self, key: bytes, into: Sequence[memoryview]) -> int | None:
        """See Backend. The server sends at most one byte more than fits.

        A key of another Redis type, which this backend never writes, counts as an empty value.
        """
        name = self._name(key)
        room = sum(len(part) for part in into)
        with self._typed("reading"):
            # One command, so the answer is consistent; the extra byte shows a longer value.
            value = self._string_command("GETRANGE", name, 0, room)
            if value == b"":
                if not self._command("EXISTS", name):
                    return None
                # Is it empty, or has another client just stored it?
                value = self._string_command("GETRANGE", name, 0, room)
            if value is None:
                return 0
            if not isinstance(value, bytes):
                raise BackendError(f"reading failed: the answer is a {type(value).__name__}")
            if len(value) > room:
                scatter(value, into)
                return max(len(value), int(self._command("STRLEN", name)))
        return scatter(value, into)

    def put(self, key: bytes, parts: Sequence[memoryview]) -> None:
        """See Backend."""
        expiry = () if self._ttl_s is None else ("EX", self._ttl_s)
        with self._typed("writing"):
            self._command("SET", self._name(key), Value(parts), *expiry)

    def delete(self, key: bytes) -> bool:
        """See Backend. The server frees the memory later, on another thread."""
        with self._typed("deleting"):
            return bool(self._command("UNLINK", self._name(key)))

    def touch(self, keys: Sequence[bytes]) -> None:
        """See Backend; takes one round trip. With ttl_s, the time of each value starts again.

        A server knows LRU order to a second, and evicts the coldest of a few sampled keys.
        """
        if not keys:
            return
        names = list(map(self._name, keys))
        with self._typed("touching"):
            if self._ttl_s is None:
                self._command("TOUCH", *names)
                return
            pipeline = self._client.pipeline(transaction=False)
            for name in names:
                pipeline.execute_command("EXPIRE", name, self._ttl_s)
            pipeline.execute()

    def list_values(self, *, coldest_first: bool = False) -> Iterator[StoredValue]:
        """See Backend. Scans a few hundred keys at a time; LRU order is not supported."""
        if coldest_first:
            raise UnsupportedError(_NO_ORDER)
        return (value for _, value in self._list(with_namespaces=False))

    def list_namespaces(self) -> Iterator[tuple[str, StoredValue]]:
        """See SharedBackend; takes one scan, like `list_values`."""
        return self._list(with_namespaces=True)

    def stats(self) -> Mapping[str, int]:
        """Return the numbers of requests and failed requests."""
        return self._counts.read()

    def close(self) -> None:
        """Close the connections; a later call opens new ones."""
        self._client.connection_pool.disconnect()

    # -- internals

    def _list(self, *, with_namespaces: bool) -> Iterator[tuple[str, StoredValue]]:
        pattern = re.sub(rb"([\\*?\[\]^-])", rb"\\\1", self._prefix) + b"*"
        is_ours = re.compile(
            rb"%b(?:([0-9a-f]{%d}):)?([0-9a-f]{%d})"
            % (re.escape(self._prefix), NAMESPACE_DIGITS, 2 * KEY_BYTES)
        )
        seen: set[bytes] = set()  # a scan may name a key twice
        cursor = None
        while cursor != 0:
            with self._typed("listing"):
                cursor, names = self._client.scan(cursor or 0, match=pattern, count=_SCAN_COUNT)
                new = [
                    match
                    for name in set(names) - seen
                    if (match := is_ours.fullmatch(name)) and (with_namespaces or not match[1])
                ]
                pipeline = self._client.pipeline(transaction=False)
                for match in new:
                    pipeline.execute_command("STRLEN", match[0])
                answers = pipeline.execute(raise_on_error=False)
                sizes = [_length_of_string(answer) for answer in answers]
            seen.update(match[0] for match in new)
            for match, num_bytes in zip(new, sizes, strict=True):
                namespace, digits = (match[1] or b"").decode(), match[2].decode()
                yield namespace, StoredValue(bytes.fromhex(digits), num_bytes)

    @property
    def _prefix(self) -> bytes:
        digits = self.namespace
        return (self._own_prefix if digits is None else f"{self._own_prefix}{digits}:").encode()

    def _name(self, key: bytes) -> bytes:
        return self._prefix + check_key(key).hex().encode()

    def _command(self, *words: Word) -> Any:
        return self._client.execute_command(*words)

    def _string_command(self, *words: Word) -> Any:
        """Return the answer to a command on a string; None if the key has another type."""
        from redis import exceptions

        try:
            return self._command(*words)
        except exceptions.ResponseError as error:
            if _code(error) != _WRONG_TYPE:
                raise
            return None

    @contextmanager
    def _typed(self, doing: str) -> Iterator[None]:
        """Count a request, and turn a client's error into a BackendError without its text."""
        from redis import exceptions

        with self._counts.request():
            try:
                yield
            except (exceptions.RedisError, OSError) as error:
                raise self._backend_error(doing, error) from None
            except BaseException:
                # redis-py may have given back a connection whose answer is still to come, and the
                # next command would read it. Other threads do not use idle connections.
                pool = self._client.connection_pool
                give_back(partial(pool.disconnect, inuse_connections=False))
                raise

    def _backend_error(self, doing: str, error: Exception) -> BackendError:
        from redis import exceptions

        # From special to general: the first two are subclasses of ConnectionError.
        if isinstance(error, (exceptions.AuthenticationError, exceptions.AuthorizationError)):
            return BackendRefusedError(doing, "wrong or no username or password")
        if isinstance(error, exceptions.BusyLoadingError):
            return BackendRefusedError(doing, "LOADING")
        if isinstance(error, (exceptions.TimeoutError, TimeoutError)):
            return BackendUnreachableError(doing, f"no answer within {self._timeout_s:g} s")
        if isinstance(error, (exceptions.ConnectionError, OSError)):
            return BackendUnreachableError(doing, "no connection, or it was lost")
        if isinstance(error, exceptions.ResponseError):
            return BackendRefusedError(doing, _code(error))
        return BackendError(f"{doing} failed: {type(error).__name__}")


def _client(
    address: RedisAddress, timeout_s: float, connect_timeout_s: float, ca_file: str | None
) -> Any:
    """Return a client that keeps the time limits and never retries.

    It is untyped here: redis-py types every answer as possibly awaitable.
    """
    try:
        import hiredis  # noqa: F401  redis-py is ten times slower without it on large values
        import redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry
    except ModuleNotFoundError as error:
        raise MissingPackageError(error.name or "redis", "redis") from None
    options: dict[str, Any] = {
        "db": address.db,
        "username": address.username,
        "password": address.password,
        "socket_timeout": timeout_s,
        "socket_connect_timeout": connect_timeout_s,
        "socket_read_size": _READ_BYTES,
        "protocol": 2,  # saves one round trip per connection
        "command_packer": Packer(),
        # By default redis-py retries up to ten times: a call would take many times timeout_s.
        "retry": Retry(NoBackoff(), 0),
    }
    connection: Any
    if address.unix_path is not None:
        connection = redis.UnixDomainSocketConnection
        options |= {"path": address.unix_path}
    elif address.tls:
        connection = redis.SSLConnection
        checks = {"ssl_cert_reqs": "required", "ssl_check_hostname": True, "ssl_ca_certs": ca_file}
        options |= {"host": address.host, "port": address.port, **checks}
    else:
        connection = redis.Connection
        options |= {"host": address.host, "port": address.port}
    pool = redis.ConnectionPool(connection_class=connection, **options)
    return redis.Redis(connection_pool=pool)


def _length_of_string(answer: int | Exception) -> int:
    """Return the answer to STRLEN; 0 for a key of another type."""
    if isinstance(answer, Exception):
        if _code(answer) != _WRONG_TYPE:
            raise answer
        return 0
    return answer


def _code(error: Exception) -> str:
    """Return the error code, such as WRONGTYPE, or else the type name; never the whole text."""
    word = str(error).partition(" ")[0]
    return word if word.isalpha() and word.isupper() else type(error).__name__

"""Object storage backend: S3 and compatible services, a directory, or memory.

::

    PREFIX/3f/3fa0…e1                       two digits of the key, then all of it
    PREFIX/0123456789abcdef/3f/3fa0…e1      in a namespace: its digits end the prefix

One PUT writes an object, so it is visible only when it is complete. Object storage keeps no LRU
order: `touch` does nothing, and a lifecycle rule of the bucket decides what expires. Needs the
extra ``objects``.
"""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from ...cleanup import give_back
from ..errors import (
    BackendError,
    BackendRefusedError,
    MissingPackageError,
    StorageUrlError,
    UnsupportedError,
)
from ..interface import StoredValue
from ..keys import KEY_BYTES, NAMESPACE_DIGITS, check_key
from ..remote import RequestCounts, check_timeouts, scatter

if TYPE_CHECKING:
    from obstore.store import ObjectStore

_MAX_CONCURRENT_HEADS: Final = 16
"""Concurrent requests of one lookup."""
_NO_ORDER: Final = (
    "object storage keeps no LRU order: give the bucket a rule that expires objects, or remove all"
)


class ObjectStorageBackend:
    """Values in an ``obstore`` object store, such as `s3_store` and `memory_store` return.

    Writing a key again replaces its object. That repairs a corrupt object and does no harm
    otherwise, because equal keys mean equal bytes.
    """

    def __init__(
        self, store: ObjectStore, *, prefix: str = "", namespace: str | None = None
    ) -> None:
        """Prepare without connecting.

        Args:
            store: object store; its options limit the time of a request.
            prefix: prefix of every object's path, without a slash at its end.
            namespace: digits that follow the prefix.

        Raises:
            MissingPackageError: if ``obstore`` is not installed.
        """
        _check_installed()
        self._store = store
        self._own_prefix = f"{prefix}/" if prefix else ""
        self.namespace = namespace
        self._heads = ThreadPoolExecutor(_MAX_CONCURRENT_HEADS, "radixkv-head")
        self._counts = RequestCounts()

    # -- Backend

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """See Backend. Sends one request per key, several at once, up to the first missing key.

        All following keys are reported as missing: each request costs money.
        """
        found = [False] * len(keys)
        if len(keys) == 1:
            return [self._exists(self._path(keys[0]))]
        paths = map(self._path, keys)
        first = islice(paths, _MAX_CONCURRENT_HEADS)
        asked: deque[Future[bool]] = deque()
        try:
            asked.extend(self._heads.submit(self._exists, path) for path in first)
            for place in range(len(keys)):
                found[place] = asked[0].result()
                asked.popleft()
                if not found[place]:
                    break
                asked.extend(self._heads.submit(self._exists, path) for path in islice(paths, 1))
        finally:
            _cancel_all(asked)  # no request outlives the call
        return found

    def get(self, key: bytes, into: Sequence[memoryview]) -> int | None:
        """See Backend. Reads the size first, and only a range of an object that does not fit."""
        path = self._path(key)
        room = sum(len(part) for part in into)
        try:
            with self._typed("reading"):
                answer = self._store.get(path)
                size: int = answer.meta["size"]
                if size <= room:
                    return scatter(memoryview(answer.bytes()), into)
                if room:
                    scatter(memoryview(self._store.get_range(path, start=0, end=room)), into)
                return size
        except FileNotFoundError:
            return None

    def put(self, key: bytes, parts: Sequence[memoryview]) -> None:
        """See Backend."""
        with self._typed("writing"):
            # One request of any size: a multipart upload could leave parts behind.
            self._store.put(self._path(key), b"".join(parts), use_multipart=False)

    def delete(self, key: bytes) -> bool:
        """See Backend. Asks for the object first, because S3 does not report whether it existed."""
        path = self._path(key)
        if not self._exists(path):
            return False
        try:
            with self._typed("deleting"):
                self._store.delete(path)
        except FileNotFoundError:
            return False  # somebody else deleted it first
        return True

    def touch(self, keys: Sequence[bytes]) -> None:
        """Do nothing: object storage keeps no LRU order."""

    def list_values(self, *, coldest_first: bool = False) -> Iterator[StoredValue]:
        """See Backend. Reads a page of the list at a time; LRU order is not supported."""
        if coldest_first:
            raise UnsupportedError(_NO_ORDER)
        return (value for _, value in self._list(with_namespaces=False))

    def list_namespaces(self) -> Iterator[tuple[str, StoredValue]]:
        """See SharedBackend; reads the same pages as `list_values`."""
        return self._list(with_namespaces=True)

    def stats(self) -> Mapping[str, int]:
        """Return the numbers of requests and failed requests."""
        return self._counts.read()

    def close(self) -> None:
        """Stop the threads; their current requests end at their time limit at the latest."""
        self._heads.shutdown(wait=False, cancel_futures=True)

    # -- internals

    def _list(self, *, with_namespaces: bool) -> Iterator[tuple[str, StoredValue]]:
        is_ours = re.compile(
            rf"{re.escape(self._prefix)}(?:([0-9a-f]{{{NAMESPACE_DIGITS}}})/)?"
            rf"([0-9a-f]{{2}})/(\2[0-9a-f]{{{2 * KEY_BYTES - 2}}})"
        )
        with self._typed("listing"):
            pages = iter(self._store.list(self._prefix or None))
        while True:
            with self._typed("listing"):
                page = next(pages, None)
            if page is None:
                return
            for each in page:
                match = is_ours.fullmatch(each["path"])
                if match and (with_namespaces or not match[1]):
                    yield match[1] or "", StoredValue(bytes.fromhex(match[3]), each["size"])

    def _exists(self, path: str) -> bool:
        try:
            with self._typed("looking up"):
                self._store.head(path)
        except FileNotFoundError:
            return False
        return True

    @property
    def _prefix(self) -> str:
        digits = self.namespace
        return self._own_prefix if digits is None else f"{self._own_prefix}{digits}/"

    def _path(self, key: bytes) -> str:
        name = check_key(key).hex()
        return f"{self._prefix}{name[:2]}/{name}"

    @contextmanager
    def _typed(self, doing: str) -> Iterator[None]:
        """Count a request, and turn its error into a BackendError without its text: it has URLs."""
        from obstore import exceptions

        with self._counts.request():
            try:
                yield
            except FileNotFoundError:
                raise
            except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError) as error:
                raise BackendRefusedError(doing, type(error).__name__) from None
            except (exceptions.BaseError, OSError) as error:
                raise BackendError(f"{doing} failed: {type(error).__name__}") from None
            except BaseException as error:
                if type(error).__name__ != "PanicException":  # of Rust; obstore has no name for it
                    raise
                raise BackendError(f"{doing} failed: obstore panicked") from None


def s3_store(bucket: str, *, timeout_s: float = 5.0, connect_timeout_s: float = 1.0) -> ObjectStore:
    """Return a bucket of S3 or of a compatible service, without retries.

    The environment sets the endpoint and the credentials: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY,
    AWS_SESSION_TOKEN, AWS_REGION, AWS_ENDPOINT_URL, and AWS_ALLOW_HTTP=true to allow no TLS.

    Args:
        bucket: name of the bucket.
        timeout_s: time limit of a request, from its start to its last byte.
        connect_timeout_s: time limit for a connection.

    Raises:
        MissingPackageError: if ``obstore`` is not installed.
        StorageUrlError: if AWS_ENDPOINT_URL is no address.
        ValueError: if a time is not positive.
    """
    check_timeouts(timeout_s, connect_timeout_s)
    _check_installed()
    _check_endpoint(os.environ.get("AWS_ENDPOINT_URL", ""))
    from obstore.store import S3Store

    return S3Store(
        bucket,
        client_options={
            "timeout": _milliseconds(timeout_s),
            "connect_timeout": _milliseconds(connect_timeout_s),
            # obstore ignores this variable when it is given other options.
            "allow_http": os.environ.get("AWS_ALLOW_HTTP", "").lower() == "true",
        },
        retry_config={"max_retries": 0},
    )


def _check_endpoint(url: str) -> None:
    # obstore takes any text, and panics at the first request. The text may have credentials.
    try:
        parts = urlsplit(url)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname)
    except ValueError:
        is_address = False
    if url and not (is_address and url.isascii() and url.isprintable() and " " not in url):
        raise StorageUrlError("AWS_ENDPOINT_URL is no address with http:// or https://")


def memory_store() -> ObjectStore:
    """Return a store in the memory of this process, for tests and experiments.

    Raises:
        MissingPackageError: if ``obstore`` is not installed.
    """
    _check_installed()
    from obstore.store import MemoryStore

    return MemoryStore()


def _cancel_all(asked: Collection[Future[bool]]) -> None:
    """Cancel requests, and wait for those that have begun."""
    give_back(*[each.cancel for each in asked], partial(wait, asked))


def _milliseconds(time_s: float) -> str:
    return f"{max(1, round(time_s * 1000))}ms"


def _check_installed() -> None:
    try:
        import obstore  # noqa: F401
    except ModuleNotFoundError:
        raise MissingPackageError("obstore", "objects") from None

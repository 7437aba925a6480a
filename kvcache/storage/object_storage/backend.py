"""The backend over object storage: S3 and what speaks like it, a directory, or memory.

::

    PREFIX/3f/3fa0…e1      two digits of the key, then all of it: an object, written by one PUT
    PREFIX/0123456789abcdef/3f/3fa0…e1      in a namespace: its digits end the prefix

An object is there when all of it is. Object storage keeps no order of use, so that `touch` does
nothing: what expires when is a rule of the bucket. Needs the extra ``objects``.
"""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from itertools import islice
from typing import TYPE_CHECKING, Final

from ..errors import BackendError, BackendRefusedError, MissingPackageError, UnsupportedError
from ..interface import (
    StoredValue,
    scatter,
)
from ..keys import KEY_BYTES, NAMESPACE_DIGITS, check_key
from ..remote import RequestCounts

if TYPE_CHECKING:
    from obstore.store import ObjectStore

_AT_ONCE: Final = 16
"""Requests of one lookup."""
_NO_ORDER: Final = (
    "object storage keeps no order of use: give the bucket a rule that expires objects, "
    "or remove all"
)


class ObjectStorageBackend:
    """Values in an object store of `obstore`; `s3_store` and `memory_store` make one.

    Writing a key again replaces its object: that repairs a corrupt one, and does no harm otherwise,
    as equal keys mean equal bytes.
    """

    def __init__(self, store: ObjectStore, *, prefix: str = "") -> None:
        """Prepare, without connecting.

        Args:
            store: where objects are; its own options say how long a request may take.
            prefix: of every object's path, without a slash at its end.

        Raises:
            MissingPackageError: if `obstore` is not installed.
        """
        _check_installed()
        self._store = store
        self._prefix = f"{prefix}/" if prefix else ""
        self._heads = ThreadPoolExecutor(_AT_ONCE, "radixkv-head")
        self._counts = RequestCounts()

    # -- Backend

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """See Backend; a request for each key up to the first missing, and some beyond it at once.

        What follows that is said to be missing: each request costs money.
        """
        found = [False] * len(keys)
        if len(keys) == 1:
            return [self._exists(self._path(keys[0]))]
        paths = map(self._path, keys)
        asked = deque(self._heads.submit(self._exists, path) for path in islice(paths, _AT_ONCE))
        try:
            for place in range(len(keys)):
                found[place] = asked.popleft().result()
                if not found[place]:
                    break
                asked.extend(self._heads.submit(self._exists, path) for path in islice(paths, 1))
        finally:
            for each in asked:
                each.cancel()
            wait(asked)  # no request is left behind that its caller knows nothing of
        return found

    def get(self, key: bytes, into: Sequence[memoryview]) -> int | None:
        """See Backend. The size comes before the bytes; of a larger object, a range is read."""
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
            # One request, whatever the size: no parts of an upload can be left behind.
            self._store.put(self._path(key), b"".join(parts), use_multipart=False)

    def delete(self, key: bytes) -> bool:
        """See Backend. It asks first: S3 does not say whether there was an object."""
        path = self._path(key)
        if not self._exists(path):
            return False
        try:
            with self._typed("deleting"):
                self._store.delete(path)
        except FileNotFoundError:
            return False  # somebody else was faster
        return True

    def touch(self, keys: Sequence[bytes]) -> None:
        """Do nothing: there is no order of use."""

    def list_values(self, *, coldest_first: bool = False) -> Iterator[StoredValue]:
        """See Backend. A page of the list at a time; there is no order of use."""
        if coldest_first:
            raise UnsupportedError(_NO_ORDER)
        return (value for _, value in self._list(with_namespaces=False))

    def list_namespaces(self) -> Iterator[tuple[str, StoredValue]]:
        """See SharedBackend; the same pages as of list_values, which have all names anyway."""
        return self._list(with_namespaces=True)

    def stats(self) -> Mapping[str, int]:
        """Return how many requests there were, and how many failed; asks nobody."""
        return self._counts.read()

    def close(self) -> None:
        """Let go of the threads; their requests end by themselves, at the latest in time."""
        self._heads.shutdown(wait=False, cancel_futures=True)

    # -- the parts of these

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

    def _path(self, key: bytes) -> str:
        name = check_key(key).hex()
        return f"{self._prefix}{name[:2]}/{name}"

    @contextmanager
    def _typed(self, doing: str) -> Iterator[None]:
        """Count a request, and make its error one of ours, without its text: that holds URLs."""
        from obstore import exceptions

        self._counts.ask()
        try:
            yield
        except FileNotFoundError:
            raise
        except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError) as error:
            self._counts.fail()
            raise BackendRefusedError(doing, type(error).__name__) from None
        except (exceptions.BaseError, OSError) as error:
            self._counts.fail()
            raise BackendError(f"{doing} failed: {type(error).__name__}") from None


def s3_store(bucket: str, *, timeout_s: float = 5.0, connect_timeout_s: float = 1.0) -> ObjectStore:
    """Return a bucket of S3, or of a server that speaks like it. Nothing is tried twice.

    Where and who is read from the environment: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY,
    AWS_SESSION_TOKEN, AWS_REGION, AWS_ENDPOINT_URL, and AWS_ALLOW_HTTP=true for one without TLS.

    Args:
        bucket: its name.
        timeout_s: how long a request may take, from its start to its last byte.
        connect_timeout_s: how long to wait for a connection.

    Raises:
        MissingPackageError: if `obstore` is not installed.
        ValueError: if a time is not positive.
    """
    for name, value in (("timeout_s", timeout_s), ("connect_timeout_s", connect_timeout_s)):
        if not value > 0:
            raise ValueError(f"{name} must be positive, got {value}")
    _check_installed()
    from obstore.store import S3Store

    return S3Store(
        bucket,
        client_options={
            "timeout": _milliseconds(timeout_s),
            "connect_timeout": _milliseconds(connect_timeout_s),
            # obstore reads this one from the environment, but not when it is given other options.
            "allow_http": os.environ.get("AWS_ALLOW_HTTP", "").lower() == "true",
        },
        retry_config={"max_retries": 0},
    )


def memory_store() -> ObjectStore:
    """Return a store in the memory of this process, for tests and to try things.

    Raises:
        MissingPackageError: if `obstore` is not installed.
    """
    _check_installed()
    from obstore.store import MemoryStore

    return MemoryStore()


def _milliseconds(time_s: float) -> str:
    return f"{max(1, round(time_s * 1000))}ms"


def _check_installed() -> None:
    try:
        import obstore  # noqa: F401
    except ModuleNotFoundError:
        raise MissingPackageError("obstore", "objects") from None

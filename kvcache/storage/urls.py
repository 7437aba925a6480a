"""Open a backend by URL, as command lines do."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Final
from urllib.parse import SplitResult, unquote, urlsplit

from .errors import StorageUrlError
from .files import FileBackend, Sync
from .interface import Backend
from .keys import NAMESPACE_DIGITS, StorageNamespace
from .workers import StorageWorkers

_MAX_BYTES_OF_FILES: Final = 16 * 2**30
_MAX_BYTES_IN_FLIGHT: Final = 2**30


@dataclass(frozen=True, slots=True)
class BackendOptions:
    """Options that a URL does not carry. None selects the backend's default.

    Attributes:
        max_bytes: byte budget of file:, which requires one.
        sync: durability of file: after a power cut.
        ttl_s: time for which redis: keeps an unused value.
        ca_file: PEM file of the certificates that rediss: trusts.
        timeout_s: time limit of a server's answer; not for file: and memory:.
        connect_timeout_s: time limit of a connection; not for file: and memory:.
        namespace: namespace of the blocks, or the first 16 hex digits of its digest. The digits
            become part of the names in a shared server or bucket, so that an operator can list and
            delete one namespace. file: and memory: ignore it, as nobody shares them. Keys differ
            by namespace in any case.
    """

    max_bytes: int | None = None
    sync: Sync | None = None
    ttl_s: int | None = None
    ca_file: str | None = None
    timeout_s: float | None = None
    connect_timeout_s: float | None = None
    namespace: StorageNamespace | str | None = None

    def given(self) -> dict[str, Any]:
        """Return the options that are not None, without the namespace."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        del values["namespace"]
        return {name: value for name, value in values.items() if value is not None}


def open_backend(url: str, options: BackendOptions | None = None) -> Backend:
    """Open the backend that a URL names, without connecting to its server yet.

    Args:
        url: ``file:///DIRECTORY``, ``redis://HOST[:PORT][/DB]``, ``rediss://…`` (TLS),
            ``unix:///SOCKET`` (Redis), ``s3://BUCKET[/PREFIX]``, ``mooncake://HOST[:PORT]`` (its
            master) or ``memory://``. A Redis password is part of the URL; S3 credentials come from
            the environment.
        options: options that the URL does not carry. An option of another scheme is refused.

    Raises:
        StorageUrlError: if the URL or an option is invalid. The text shows only the scheme.
        MissingPackageError: if the scheme's extra is not installed.
        MissingLibraryError: if a system library is not installed.
        StorageInUseError: if the directory of file: is open already, here or in another process.
        BackendIOError: if that directory cannot be used.
        OpenToOthersError: if other users can access it.
        ValueError: if a time or size is not positive, or sync is unknown.
    """
    _check_breaks(url)
    scheme, separator, _ = url.partition("://")
    if not separator or scheme not in _SCHEMES:
        known = ", ".join(f"{name}://" for name in _SCHEMES)
        raise StorageUrlError(
            f"a storage URL starts with one of {known}; /a/path is file:///a/path"
        )
    open_it, allowed = _SCHEMES[scheme]
    options = options or BackendOptions()
    for name in options.given():
        if name not in allowed:
            raise StorageUrlError(f"{scheme}:// has no option {name}")
    return open_it(url, options)


def open_storage(
    url: str, namespace: StorageNamespace | None, *, max_bytes: int | None = None
) -> StorageWorkers:
    """Open the storage that a URL names, as the commands do; the caller closes it.

    Args:
        url: see `open_backend`.
        namespace: see `BackendOptions`.
        max_bytes: size limit of file:; default: 16 GiB.

    Raises:
        StorageError, ValueError: see `open_backend`.
    """
    if max_bytes is None and url.startswith("file:"):
        max_bytes = _MAX_BYTES_OF_FILES
    backend = open_backend(url, BackendOptions(max_bytes=max_bytes, namespace=namespace))
    return StorageWorkers(backend, max_bytes_in_flight=_MAX_BYTES_IN_FLIGHT)


def directory_of(url: str) -> str | None:
    """Return the path in a file: URL; None for another scheme.

    Raises:
        StorageUrlError: if the path does not name a directory.
    """
    if not url.startswith("file://"):
        return None
    _check_breaks(url)
    parts = _split(url)
    path = unquote(parts.path)
    if parts.netloc or path in ("", "/") or "\0" in path or parts.query or parts.fragment:
        raise StorageUrlError("a directory's URL is file:///DIRECTORY, with its path from the root")
    return path


def is_server_url(url: str) -> bool:
    """Return whether a URL names a server, which may be unreachable."""
    scheme = url.partition("://")[0]
    return scheme in _SCHEMES and "timeout_s" in _SCHEMES[scheme][1]


def namespace_digits(namespace: StorageNamespace | str) -> str:
    """Return the digits that separate a namespace's blocks in a shared server or bucket.

    Raises:
        StorageUrlError: for a text that is not 16 hex digits.
    """
    if isinstance(namespace, StorageNamespace):
        return namespace.digits
    if not re.fullmatch(f"[0-9a-f]{{{NAMESPACE_DIGITS}}}", namespace):
        raise StorageUrlError(f"a namespace is the first {NAMESPACE_DIGITS} digits of its digest")
    return namespace


def _open_files(url: str, options: BackendOptions) -> Backend:
    path = directory_of(url)
    assert path is not None, "the scheme is file"
    if options.max_bytes is None:
        raise StorageUrlError("file:// needs the option max_bytes")
    return FileBackend(path, **options.given())


def _open_redis(url: str, options: BackendOptions) -> Backend:
    from .redis import RedisAddress, RedisBackend

    address, digits = RedisAddress.from_url(url), _digits(options)
    return RedisBackend(address, namespace=digits, **options.given())


def _open_s3(url: str, options: BackendOptions) -> Backend:
    from .object_storage import ObjectStorageBackend, s3_store

    parts = _split(url)
    if not _BUCKET.fullmatch(parts.netloc) or parts.query or parts.fragment:
        raise StorageUrlError("a bucket's URL is s3://BUCKET or s3://BUCKET/PREFIX")
    steps = [step for step in unquote(parts.path).split("/") if step]
    if {".", ".."} & set(steps):
        raise StorageUrlError("a bucket's prefix has no steps . and ..")
    digits = _digits(options)
    store = s3_store(parts.netloc, **options.given())
    return ObjectStorageBackend(store, prefix="/".join(steps), namespace=digits)


def _open_mooncake(url: str, options: BackendOptions) -> Backend:
    from .mooncake import MooncakeBackend, master_of

    return MooncakeBackend(*master_of(url), namespace=_digits(options), **options.given())


def _open_memory(url: str, options: BackendOptions) -> Backend:
    from .object_storage import ObjectStorageBackend, memory_store

    if url != "memory://":
        raise StorageUrlError("the URL of memory:// ends there")
    return ObjectStorageBackend(memory_store())


def _digits(options: BackendOptions) -> str | None:
    return None if options.namespace is None else namespace_digits(options.namespace)


def _check_breaks(url: str) -> None:
    if {"\t", "\r", "\n"} & set(url):  # which urlsplit takes out
        raise StorageUrlError("the storage URL has a tab or a line break: write %09, %0D or %0A")


def _split(url: str) -> SplitResult:
    try:
        return urlsplit(url)
    except ValueError:  # its text quotes the URL
        raise StorageUrlError("the storage URL is malformed") from None


_BUCKET: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}")
"""Names of buckets; not credentials, which would end up in shell histories and logs."""
_SERVER: Final = frozenset({"timeout_s", "connect_timeout_s"})
_SCHEMES: Final[dict[str, tuple[Callable[[str, BackendOptions], Backend], frozenset[str]]]] = {
    "file": (_open_files, frozenset({"max_bytes", "sync"})),
    "redis": (_open_redis, _SERVER | {"ttl_s"}),
    "rediss": (_open_redis, _SERVER | {"ttl_s", "ca_file"}),
    "unix": (_open_redis, _SERVER | {"ttl_s"}),
    "s3": (_open_s3, _SERVER),
    "mooncake": (_open_mooncake, _SERVER),
    "memory": (_open_memory, frozenset()),
}

"""A backend from a URL, so that a command line can name one."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final
from urllib.parse import SplitResult, unquote, urlsplit

from .errors import StorageUrlError
from .files.backend import FileBackend, Sync
from .interface import Backend
from .keys import NAMESPACE_DIGITS, StorageNamespace


@dataclass(frozen=True, slots=True)
class BackendOptions:
    """What a URL does not say. None: not given, so the backend's own default.

    Attributes:
        max_bytes: the budget of file:, which needs one.
        sync: what a power cut may take, of file:.
        ttl_s: how long redis: keeps a value that is not used.
        ca_file: certificates that rediss: trusts, in PEM.
        timeout_s: how long a server may take to answer; not of file: and memory:.
        connect_timeout_s: how long to wait for a connection; not of file: and memory:.
        namespace: whose blocks: they get a name of their own in a shared server or bucket, so that
            an operator can list and delete them alone: the first 16 digits of its digest, which
            may be given in its place. Of no use to file: and memory:, which nobody shares. Keys
            differ by namespace anyway.
    """

    max_bytes: int | None = None
    sync: Sync | None = None
    ttl_s: int | None = None
    ca_file: str | None = None
    timeout_s: float | None = None
    connect_timeout_s: float | None = None
    namespace: StorageNamespace | str | None = None


def open_backend(url: str, options: BackendOptions | None = None) -> Backend:
    """Open the backend that a URL names. Servers are not connected to yet.

    Args:
        url: ``file:///DIRECTORY``, ``redis://HOST[:PORT][/DB]``, ``rediss://…`` (TLS),
            ``unix:///SOCKET`` (Redis), ``s3://BUCKET[/PREFIX]``, ``mooncake://HOST[:PORT]`` (its
            master) or ``memory://``. A password of Redis is in its URL; that of S3 is in the
            environment.
        options: what the URL does not say; one that its scheme does not have is refused.

    Raises:
        StorageUrlError: if the URL or an option is not right. The text has no part of the URL but
            its scheme.
        MissingPackageError: if the scheme's extra is not installed.
        MissingLibraryError: if a library of the system is not.
        StorageInUseError: if the directory of file: is open already, here or in another process.
        BackendIOError: if that directory cannot be used.
        OpenToOthersError: if other users may use it.
        ValueError: if a time or size is not positive, or there is no such sync.
    """
    scheme, separator, _ = url.partition("://")
    if not separator or scheme not in _SCHEMES:
        known = ", ".join(f"{name}://" for name in _SCHEMES)
        raise StorageUrlError(
            f"a storage URL starts with one of {known}; /a/path is file:///a/path"
        )
    open_it, allowed = _SCHEMES[scheme]
    options = options or BackendOptions()
    for name in BackendOptions.__dataclass_fields__:
        if getattr(options, name) is not None and name not in allowed | {"namespace"}:
            raise StorageUrlError(f"{scheme}:// has no option {name}")
    return open_it(url, options)


def directory_of(url: str) -> str | None:
    """Return the path in a URL of file:, and None for another scheme.

    Raises:
        StorageUrlError: if it is no path of a directory.
    """
    if not url.startswith("file://"):
        return None
    parts = _split(url)
    path = unquote(parts.path)
    if parts.netloc or path in ("", "/") or "\0" in path or parts.query or parts.fragment:
        raise StorageUrlError("a directory's URL is file:///DIRECTORY, with its path from the root")
    return path


def is_server_url(url: str) -> bool:
    """Whether what a URL names is a server, which may be away."""
    scheme = url.partition("://")[0]
    return scheme in _SCHEMES and "timeout_s" in _SCHEMES[scheme][1]


def _open_files(url: str, options: BackendOptions) -> Backend:
    path = directory_of(url)
    assert path is not None, "the scheme is file"
    if options.max_bytes is None:
        raise StorageUrlError("file:// needs the option max_bytes")
    return FileBackend(path, max_bytes=options.max_bytes, sync=options.sync or "none")


def _open_redis(url: str, options: BackendOptions) -> Backend:
    from .redis.address import RedisAddress
    from .redis.backend import DEFAULT_PREFIX, RedisBackend

    prefix = DEFAULT_PREFIX
    if options.namespace is not None:
        prefix += f"{namespace_digits(options.namespace)}:"
    return RedisBackend(
        RedisAddress.from_url(url),
        prefix=prefix,
        ttl_s=options.ttl_s,
        ca_file=options.ca_file,
        timeout_s=1.0 if options.timeout_s is None else options.timeout_s,
        connect_timeout_s=1.0 if options.connect_timeout_s is None else options.connect_timeout_s,
    )


def _open_s3(url: str, options: BackendOptions) -> Backend:
    from .object_storage.backend import ObjectStorageBackend, s3_store

    parts = _split(url)
    # Credentials in a URL end up in shell histories and logs.
    if not parts.netloc or set("@:") & set(parts.netloc) or parts.query or parts.fragment:
        raise StorageUrlError("a bucket's URL is s3://BUCKET or s3://BUCKET/PREFIX, no more")
    steps = [step for step in unquote(parts.path).split("/") if step]
    if options.namespace is not None:
        steps.append(namespace_digits(options.namespace))
    store = s3_store(
        parts.netloc,
        timeout_s=5.0 if options.timeout_s is None else options.timeout_s,
        connect_timeout_s=1.0 if options.connect_timeout_s is None else options.connect_timeout_s,
    )
    return ObjectStorageBackend(store, prefix="/".join(steps))


def _open_mooncake(url: str, options: BackendOptions) -> Backend:
    from .mooncake.backend import (
        DEFAULT_PREFIX,
        MooncakeBackend,
        master_of,
    )

    prefix = DEFAULT_PREFIX
    if options.namespace is not None:
        prefix += f"{namespace_digits(options.namespace)}:"
    host, port = master_of(url)
    return MooncakeBackend(
        host,
        port,
        prefix=prefix,
        timeout_s=1.0 if options.timeout_s is None else options.timeout_s,
        connect_timeout_s=5.0 if options.connect_timeout_s is None else options.connect_timeout_s,
    )


def _open_memory(url: str, options: BackendOptions) -> Backend:
    from .object_storage.backend import ObjectStorageBackend, memory_store

    if url != "memory://":
        raise StorageUrlError("memory:// is all of its URL")
    return ObjectStorageBackend(memory_store())


def _split(url: str) -> SplitResult:
    try:
        return urlsplit(url)
    except ValueError:  # its text quotes the URL
        raise StorageUrlError("the storage URL is malformed") from None


def namespace_digits(namespace: StorageNamespace | str) -> str:
    """Return what tells a namespace's blocks apart in the names of a server or bucket.

    Raises:
        StorageUrlError: for a text that is not such digits.
    """
    if isinstance(namespace, StorageNamespace):
        return namespace.digest().hex()[:NAMESPACE_DIGITS]
    if not re.fullmatch(f"[0-9a-f]{{{NAMESPACE_DIGITS}}}", namespace):
        raise StorageUrlError(f"a namespace is the first {NAMESPACE_DIGITS} digits of its digest")
    return namespace


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

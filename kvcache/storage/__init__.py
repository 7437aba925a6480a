"""Storage of KV blocks outside the process: files, Redis, object storage and Mooncake.

`open_backend` opens a backend from a URL, `StorageWorkers` calls it from threads, and `block_keys`
names the blocks. Each backend has a folder. Names load on first use, so that the cache manager can
import `keys` without any backend.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .checksummed import ChecksummedBackend
    from .errors import (
        BackendError,
        BackendFullError,
        BackendIOError,
        BackendRefusedError,
        BackendUnreachableError,
        MissingLibraryError,
        MissingPackageError,
        OpenToOthersError,
        OperationError,
        PayloadError,
        StorageClosedError,
        StorageError,
        StorageInUseError,
        StorageKeyError,
        StorageUrlError,
        UnsupportedError,
    )
    from .files import FileBackend
    from .interface import (
        Backend,
        Block,
        Buffer,
        Completion,
        Kind,
        SharedBackend,
        Status,
        Storage,
        StorageOpId,
        StorageStats,
        StoredValue,
    )
    from .keys import StorageNamespace, block_keys
    from .maintenance import (
        Removed,
        Verified,
        open_existing,
        remove_values,
        verify_values,
    )
    from .urls import BackendOptions, open_backend
    from .workers import StorageWorkers

__all__ = [
    "Backend",
    "BackendError",
    "BackendFullError",
    "BackendIOError",
    "BackendOptions",
    "BackendRefusedError",
    "BackendUnreachableError",
    "Block",
    "Buffer",
    "ChecksummedBackend",
    "Completion",
    "FileBackend",
    "Kind",
    "MissingLibraryError",
    "MissingPackageError",
    "OpenToOthersError",
    "OperationError",
    "PayloadError",
    "Removed",
    "SharedBackend",
    "Status",
    "Storage",
    "StorageClosedError",
    "StorageError",
    "StorageInUseError",
    "StorageKeyError",
    "StorageNamespace",
    "StorageOpId",
    "StorageStats",
    "StorageUrlError",
    "StorageWorkers",
    "StoredValue",
    "UnsupportedError",
    "Verified",
    "block_keys",
    "open_backend",
    "open_existing",
    "remove_values",
    "verify_values",
]

_INTERFACE = "Backend Block Buffer Completion Kind SharedBackend Status Storage StorageOpId "
_INTERFACE += "StorageStats StoredValue"
_MODULES = {
    "checksummed": "ChecksummedBackend",
    "files": "FileBackend",
    "interface": _INTERFACE,
    "keys": "StorageNamespace block_keys",
    "maintenance": "Removed Verified open_existing remove_values verify_values",
    "urls": "BackendOptions open_backend",
    "workers": "StorageWorkers",
}
_LAZY = {name: module for module, names in _MODULES.items() for name in names.split()}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_LAZY.get(name, 'errors')}", __name__), name)

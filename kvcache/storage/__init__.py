"""Storage of KV blocks outside the process: files, Redis, object storage and Mooncake.

`open_backend` opens a backend by URL, `StorageWorkers` calls it from threads, and `block_keys`
names the blocks. Names load on first use, so that the cache manager can import `keys` alone.
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

_MODULES = ("errors", "keys", "interface", "checksummed", "workers", "files", "urls", "maintenance")


def __getattr__(name: str) -> object:
    if name in __all__:
        for module in _MODULES:  # light modules first; only the last ones import a backend
            loaded = vars(import_module(f".{module}", __name__))
            if name in loaded:
                globals()[name] = loaded[name]
                return loaded[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

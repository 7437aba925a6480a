"""Storage of KV blocks outside the process: files, Redis, object storage and Mooncake.

`open_backend` opens a backend by URL, `StorageWorkers` calls it from threads, and `block_keys`
names the blocks. Each backend has a folder; Redis, object storage and Mooncake load on first use.
"""

from __future__ import annotations

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
from .maintenance import Removed, Verified, open_existing, remove_values, verify_values
from .urls import BackendOptions, open_backend, open_storage
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
    "open_storage",
    "remove_values",
    "verify_values",
]

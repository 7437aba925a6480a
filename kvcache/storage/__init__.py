"""KV blocks outside the process: keys, envelope, one interface, and its backends."""

from __future__ import annotations

from .base import (
    Backend,
    Block,
    Buffer,
    Completion,
    Kind,
    Status,
    Storage,
    StorageOpId,
    StorageStats,
    StoredValue,
)
from .checksummed import Sealed
from .errors import (
    BackendError,
    BackendFullError,
    BackendIOError,
    OpenToOthersError,
    OperationError,
    PayloadError,
    StorageClosedError,
    StorageError,
    StorageInUseError,
    StorageKeyError,
    UnsupportedError,
)
from .files.backend import FileBackend
from .keys import StorageNamespace, block_keys
from .maintenance import (
    Removed,
    Verified,
    open_existing,
    remove_values,
    verify_values,
)
from .remote_errors import (
    BackendRefusedError,
    BackendUnreachableError,
    MissingLibraryError,
    MissingPackageError,
    StorageUrlError,
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
    "Completion",
    "FileBackend",
    "Kind",
    "MissingLibraryError",
    "MissingPackageError",
    "OpenToOthersError",
    "OperationError",
    "PayloadError",
    "Removed",
    "Sealed",
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

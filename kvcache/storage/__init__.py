"""KV blocks outside the process: keys, envelope, one interface, and its backends."""

from __future__ import annotations

from .base import (
    Backend,
    Block,
    Buffer,
    Completion,
    Kind,
    OperationId,
    Status,
    Storage,
    StorageStats,
)
from .errors import (
    BackendError,
    BackendFullError,
    BackendIOError,
    OperationError,
    PayloadError,
    StorageClosedError,
    StorageError,
    StorageInUseError,
    StorageKeyError,
)
from .files import FileBackend
from .keys import StorageNamespace, block_keys
from .sealed import Sealed
from .workers import StorageWorkers

__all__ = [
    "Backend",
    "BackendError",
    "BackendFullError",
    "BackendIOError",
    "Block",
    "Buffer",
    "Completion",
    "FileBackend",
    "Kind",
    "OperationError",
    "OperationId",
    "PayloadError",
    "Sealed",
    "Status",
    "Storage",
    "StorageClosedError",
    "StorageError",
    "StorageInUseError",
    "StorageKeyError",
    "StorageNamespace",
    "StorageStats",
    "StorageWorkers",
    "block_keys",
]

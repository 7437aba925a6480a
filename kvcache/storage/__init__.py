"""KV blocks outside the process: keys, envelope, one interface, and its backends."""

from __future__ import annotations

from .base import Backend, Block, Buffer, Completion, Kind, OperationId, Status, Storage
from .base import StorageStats
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
from .keys import StorageNamespace, block_keys

__all__ = [
    "Backend",
    "BackendError",
    "BackendFullError",
    "BackendIOError",
    "Block",
    "Buffer",
    "Completion",
    "Kind",
    "OperationError",
    "OperationId",
    "PayloadError",
    "Status",
    "Storage",
    "StorageClosedError",
    "StorageError",
    "StorageInUseError",
    "StorageKeyError",
    "StorageNamespace",
    "StorageStats",
    "block_keys",
]

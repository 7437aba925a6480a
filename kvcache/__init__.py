"""Paged KV cache with prefix sharing: the manager (no JAX), its tiers, and the arrays of blocks."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from .block_pool import BlockPool
from .block_tables import BlockTables
from .errors import (
    CountError,
    HostConfigError,
    IdError,
    LeaseError,
    NamespaceError,
    OperationResultError,
    OutOfBlocksError,
    PoolDTypeError,
    PoolShapeError,
    RadixKVError,
    RecycleError,
    RequestTooLargeError,
    StorageConfigError,
    TokenError,
)
from .host_tier import HostConfig
from .lease import CacheStats, Epoch, Lease, Match, NextBlock, TierStats
from .manager import CacheManager
from .operations import Operation, OpId, OpKind
from .parking import Parked, ParkedIn
from .prefetch import Prefetch
from .radix_tree import RadixTree
from .tiers import Tiers
from .tokens import Int32Array, Tokens, as_tokens, make_namespace

if TYPE_CHECKING:
    from .arrays import BlockArrays
    from .dispatched import OperationResult, Outcome, TierDriverStats
    from .host_arrays import HostArrays
    from .tier_driver import TierDriver

__all__ = [
    "BlockArrays",
    "BlockPool",
    "BlockTables",
    "CacheManager",
    "CacheStats",
    "CountError",
    "Epoch",
    "HostArrays",
    "HostConfig",
    "HostConfigError",
    "IdError",
    "Int32Array",
    "Lease",
    "LeaseError",
    "Match",
    "NamespaceError",
    "NextBlock",
    "OpId",
    "OpKind",
    "Operation",
    "OperationResult",
    "OperationResultError",
    "OutOfBlocksError",
    "Outcome",
    "Parked",
    "ParkedIn",
    "PoolDTypeError",
    "PoolShapeError",
    "Prefetch",
    "RadixKVError",
    "RadixTree",
    "RecycleError",
    "RequestTooLargeError",
    "StorageConfigError",
    "TierDriver",
    "TierDriverStats",
    "TierStats",
    "Tiers",
    "TokenError",
    "Tokens",
    "as_tokens",
    "make_namespace",
]


# What moves arrays needs JAX; the manager does not, and must import without it.
_LAZY = {
    "BlockArrays": "arrays",
    "HostArrays": "host_arrays",
    "OperationResult": "dispatched",
    "Outcome": "dispatched",
    "TierDriver": "tier_driver",
    "TierDriverStats": "dispatched",
}


def __getattr__(name: str) -> object:
    if name in _LAZY:
        return getattr(import_module(f".{_LAZY[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

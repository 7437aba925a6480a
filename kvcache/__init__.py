"""Paged KV cache with prefix sharing: manager, host and storage tiers, and block arrays.

The names in `__all__` are public. Importing the package loads neither JAX nor storage backends.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from .errors import (
    CountError,
    HostConfigError,
    IdError,
    LeaseError,
    MatchError,
    NamespaceError,
    OperationResultError,
    OutOfBlocksError,
    PoolDTypeError,
    PoolShapeError,
    RadixKVError,
    RecycleError,
    RequestTooLargeError,
    StepError,
    StorageConfigError,
    TokenError,
)
from .events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    KVEvent,
    ReplayBuffer,
)
from .ids import Epoch, OpId
from .manager import CacheManager
from .prefix.block_pool import BlockPool
from .prefix.block_tables import BlockTables
from .prefix.lease import Lease, Match, NextBlock
from .prefix.radix_tree import RadixTree
from .stats import CacheStats, TierStats
from .tiers.api import Tiers
from .tiers.host_tier import HostConfig
from .tiers.operations import Operation, OpKind
from .tiers.parked import Parked, ParkedIn
from .tiers.prefetch import Prefetch
from .tokens import Int32Array, Tokens, as_tokens, make_namespace

if TYPE_CHECKING:
    from .copies.block_arrays import BlockArrays
    from .copies.host_arrays import HostArrays
    from .copies.in_flight import OperationResult, Outcome, TierDriverStats
    from .copies.tier_driver import TierDriver

__all__ = [
    "AllBlocksCleared",
    "BlockArrays",
    "BlockPool",
    "BlockRemoved",
    "BlockStored",
    "BlockTables",
    "CacheManager",
    "CacheStats",
    "CountError",
    "Epoch",
    "EventBatch",
    "HostArrays",
    "HostConfig",
    "HostConfigError",
    "IdError",
    "Int32Array",
    "KVEvent",
    "Lease",
    "LeaseError",
    "Match",
    "MatchError",
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
    "ReplayBuffer",
    "RequestTooLargeError",
    "StepError",
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


# These modules need JAX; the manager does not, and must import without it.
_LAZY = {
    "BlockArrays": "copies.block_arrays",
    "HostArrays": "copies.host_arrays",
    "OperationResult": "copies.in_flight",
    "Outcome": "copies.in_flight",
    "TierDriver": "copies.tier_driver",
    "TierDriverStats": "copies.in_flight",
}


def __getattr__(name: str) -> object:
    if name in _LAZY:
        return getattr(import_module(f".{_LAZY[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

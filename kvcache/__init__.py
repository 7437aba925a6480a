"""Paged KV cache with prefix sharing: the manager (no JAX), its tiers, and the arrays of blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .block_pool import BlockPool
from .block_tables import BlockTables
from .errors import (
    CountError,
    LeaseError,
    NamespaceError,
    OutOfBlocksError,
    RadixKVError,
    RecycleError,
    RequestTooLargeError,
    TokenError,
)
from .lease import CacheStats, Epoch, Lease, Match, NextBlock
from .manager import CacheManager
from .radix_tree import RadixTree
from .tokens import Int32Array, Tokens, as_tokens, make_namespace

if TYPE_CHECKING:
    from .arrays import BlockArrays

__all__ = [
    "BlockArrays",
    "BlockPool",
    "BlockTables",
    "CacheManager",
    "CacheStats",
    "CountError",
    "Epoch",
    "Int32Array",
    "Lease",
    "LeaseError",
    "Match",
    "NamespaceError",
    "NextBlock",
    "OutOfBlocksError",
    "RadixKVError",
    "RadixTree",
    "RecycleError",
    "RequestTooLargeError",
    "TokenError",
    "Tokens",
    "as_tokens",
    "make_namespace",
]


def __getattr__(name: str) -> object:
    # The arrays need JAX; the manager does not, and must import without it.
    if name == "BlockArrays":
        from .arrays import BlockArrays

        return BlockArrays
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

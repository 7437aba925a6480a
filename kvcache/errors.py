"""Exceptions of the cache, as a tree of types. Each error carries its numbers.

::

    RadixKVError
    ├── TokenError            tokens that are not one-dimensional int32
    ├── IdError               block ids, or rows, that are not one-dimensional int32
    ├── CountError            a count that is negative, or not an integer
    ├── NamespaceError        a namespace that is not bytes
    ├── OutOfBlocksError      too few blocks are free or evictable now
    ├── RequestTooLargeError  more blocks than the pool has: never possible
    ├── RecycleError          block ids that were not allocated; the others were recycled
    ├── MatchError            a match that is not a Match
    ├── LeaseError            a lease that was released, is of an older epoch, or is too small
    ├── StepError             the end of a step, and none is in flight
    ├── PoolDTypeError        pools of a dtype that block copies do not support
    ├── PoolShapeError        pools of different shapes, or not in pairs
    ├── HostConfigError       an invalid host tier
    ├── StorageConfigError    storage without a host tier, or an invalid namespace
    └── OperationResultError  not one result per block of an operation

After each of them, except RecycleError, the cache is as it was before the call. A broken invariant
raises an AssertionError instead, and is a bug in radixkv.
"""

from __future__ import annotations

from collections.abc import Sequence


class RadixKVError(Exception):
    """Base of all errors that radixkv raises on purpose."""


class TokenError(RadixKVError, ValueError):
    """Tokens are not a one-dimensional sequence of int32."""


class StepError(RadixKVError, RuntimeError):
    """A step ends, and none is in flight."""


class IdError(RadixKVError, ValueError):
    """Block ids, or rows of block tables, are not a one-dimensional sequence of int32."""


class CountError(RadixKVError, ValueError):
    """A number of blocks or tokens is out of range."""


class NamespaceError(RadixKVError, ValueError):
    """A namespace is not bytes, or its fields cannot be encoded."""


class OutOfBlocksError(RadixKVError):
    """More blocks are needed than are free or evictable now; nothing changed."""

    def __init__(self, needed: int, available: int) -> None:
        super().__init__(f"needs {needed} blocks, but only {available} are free or evictable")
        self.needed = needed
        self.available = available


class RequestTooLargeError(RadixKVError):
    """A request needs more blocks than the pool has; it can never be admitted."""

    def __init__(self, num_tokens: int, needed: int, num_blocks: int) -> None:
        super().__init__(f"{num_tokens} tokens need {needed} blocks, but the pool has {num_blocks}")
        self.num_tokens = num_tokens
        self.needed = needed
        self.num_blocks = num_blocks


class RecycleError(RadixKVError):
    """Some ids were not allocated, or repeated: they are refused, the others are recycled."""

    def __init__(self, refused: Sequence[int], recycled: int) -> None:
        super().__init__(
            f"refused block ids {list(refused)}: not allocated, out of range or repeated; "
            f"the other {recycled} were recycled"
        )
        self.refused = tuple(refused)
        self.recycled = recycled


class MatchError(RadixKVError, TypeError):
    """A match is not the result of `CacheManager.match`."""

    def __init__(self, given: object) -> None:
        super().__init__(f"match must be a Match, got {type(given).__name__}")


class LeaseError(RadixKVError):
    """A lease cannot be used in this way; nothing changed."""


class PoolDTypeError(RadixKVError, ValueError):
    """Device pools of an unsupported dtype."""

    def __init__(self, dtype: str) -> None:
        super().__init__(
            f"dtype must be bfloat16, float16 or float32, got {dtype}: "
            "copies of blocks carry no scales, which quantised pools need"
        )
        self.dtype = dtype


class PoolShapeError(RadixKVError, ValueError):
    """Device pools of different shapes or dtypes, or not in pairs."""

    def __init__(self, num_keys: int, num_values: int, kinds: Sequence[str]) -> None:
        super().__init__(
            "there must be one pool of keys and one of values per layer, all alike, "
            "[blocks, kv_heads, block_size, head_dim]; "
            f"got {num_keys} and {num_values}, {' and '.join(kinds) or 'none'}"
        )


class HostConfigError(RadixKVError, ValueError):
    """The configuration of the host tier is invalid."""


class StorageConfigError(RadixKVError, ValueError):
    """The cache has no storage, or storage does not fit the cache."""


class OperationResultError(RadixKVError):
    """An operation was completed with a number of results other than its number of blocks."""

    def __init__(self, op_id: int, results: int, num_blocks: int) -> None:
        super().__init__(f"operation {op_id} copies {num_blocks} blocks, but got {results} results")
        self.op_id = op_id
        self.results = results
        self.num_blocks = num_blocks

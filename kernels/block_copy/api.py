"""Move whole blocks: within a pool, out of it into contiguous staging, and back.

    copy     pool[sources[i]]  ->  pool[destinations[i]]
    gather   pool[ids[i]]      ->  staging[i]
    scatter  staging[i]        ->  pool[ids[i]]             for i < count

The number of ids is static, so that few shapes are compiled; `count` says how many of them act. An
id outside the pool (negative, or past its last block) makes its entry act like one past `count`.

JAX 0.10's CPU backend has no bfloat16 scatter: there, copy and scatter convert a bfloat16 pool as a
whole.

Each function takes one pool or a tuple of pools that are alike, such as the K and V of all layers:
the same blocks are moved in each, on a GPU by few launches. Blocks of quantised pools are moved as
they are; their scales are the caller's to move.
"""

from typing import TypeVar

import jax
from jaxtyping import Array, Int32, Shaped

from ..argument_checks import (
    KernelArgumentError,
    check_int32,
    check_pool,
    check_shape,
)
from ..backends import (
    Backend,
    choose,
    target,
)
from . import xla as block_copy_xla

Pool = Shaped[Array, "blocks kv_heads block_size head_dim"]
Staging = Shaped[Array, "n kv_heads block_size head_dim"]
Pools = tuple[jax.Array, ...]

LANES = 128
"""Elements of a row, as the Mosaic kernels cut a block."""

PoolOrPools = TypeVar("PoolOrPools", Pool, tuple[Pool, ...])


def copy_blocks(
    blocks: PoolOrPools,
    sources: Int32[Array, " n"],
    destinations: Int32[Array, " n"],
    count: Int32[Array, ""],
    *,
    backend: Backend | None = None,
) -> PoolOrPools:
    """Return the pools with blocks `sources` copied to `destinations`; in place if donated.

    Args:
        blocks: A pool, or a tuple of them.
        sources: Ids to read.
        destinations: Ids to write: distinct, and none of them a source, because backends differ in
            whether a source is read before or after it is overwritten.
        count: How many of the n pairs act, the first ones; the rest may be anything.
        backend: The implementation; None chooses the fastest that serves. Static.

    Raises:
        KernelArgumentError: A shape, dtype or option is wrong; raised while tracing.
    """
    pools = _check_blocks(blocks)
    check_int32("sources", sources, (None,), "n")
    check_int32("destinations", destinations, sources.shape, "n of sources")
    check_int32("count", count, (), "")
    if _use_mosaic(backend, pools, sources):
        from .mosaic import by_launch, copy

        cores = target().num_cores
        copied = by_launch(
            lambda group: copy(group, sources, destinations, count, num_cores=cores), pools
        )
    else:
        copied = tuple(block_copy_xla.copy(each, sources, destinations, count) for each in pools)
    return _alike(blocks, copied)


def gather_blocks(
    blocks: PoolOrPools,
    ids: Int32[Array, " n"],
    count: Int32[Array, ""],
    *,
    backend: Backend | None = None,
) -> PoolOrPools:
    """Return blocks `ids` as one contiguous array (per pool), to be sent or moved to the host.

    Args:
        blocks: A pool, or a tuple of them.
        ids: Ids to read; an id may occur more than once.
        count: How many of the n ids act, the first ones; the rest may be anything and give zeros.
        backend: The implementation; None chooses the fastest that serves. Static.

    Returns:
        Staging, `[n, kv_heads, block_size, head_dim]`, or a tuple of them.

    Raises:
        KernelArgumentError: A shape, dtype or option is wrong; raised while tracing.
    """
    pools = _check_blocks(blocks)
    check_int32("ids", ids, (None,), "n")
    check_int32("count", count, (), "")
    if _use_mosaic(backend, pools, ids):
        from .mosaic import by_launch, gather

        cores = target().num_cores
        gathered = by_launch(lambda group: gather(group, ids, count, num_cores=cores), pools)
    else:
        gathered = tuple(block_copy_xla.gather(each, ids, count) for each in pools)
    return _alike(blocks, gathered)


def scatter_blocks(
    blocks: PoolOrPools,
    staging: PoolOrPools,
    ids: Int32[Array, " n"],
    count: Int32[Array, ""],
    *,
    backend: Backend | None = None,
) -> PoolOrPools:
    """Return the pools with `staging[i]` written to block `ids[i]`; in place if donated.

    Args:
        blocks: A pool, or a tuple of them.
        staging: New contents, in the pool's dtype: what `gather_blocks` returned.
        ids: Ids to write, distinct.
        count: How many of the n entries act, the first ones; the rest may be anything.
        backend: The implementation; None chooses the fastest that serves. Static.

    Raises:
        KernelArgumentError: A shape, dtype or option is wrong; raised while tracing.
    """
    pools = _check_blocks(blocks)
    check_int32("ids", ids, (None,), "n")
    new = _check_staging(staging, pools, ids)
    check_int32("count", count, (), "")
    if _use_mosaic(backend, pools, ids):
        from .mosaic import by_launch, scatter

        cores = target().num_cores
        written = by_launch(
            lambda group, part: scatter(group, part, ids, count, num_cores=cores), pools, new
        )
    else:
        pairs = zip(pools, new, strict=True)
        written = tuple(block_copy_xla.scatter(pool, each, ids, count) for pool, each in pairs)
    return _alike(blocks, written)


def _check_blocks(blocks: jax.Array | Pools) -> Pools:
    pools = blocks if isinstance(blocks, tuple) else (blocks,)
    if not pools:
        raise KernelArgumentError("blocks must be a pool or a tuple of at least one, got ()")
    for pool in pools:
        check_pool("blocks", pool)
        if pool.shape != pools[0].shape or pool.dtype != pools[0].dtype:
            raise KernelArgumentError(
                "blocks must have one shape and dtype, got "
                f"{pools[0].dtype.name}{list(pools[0].shape)} and "
                f"{pool.dtype.name}{list(pool.shape)}"
            )
    return pools


def _check_staging(staging: jax.Array | Pools, pools: Pools, ids: jax.Array) -> Pools:
    new = staging if isinstance(staging, tuple) else (staging,)
    if len(new) != len(pools):
        raise KernelArgumentError(
            f"staging must be an array for each pool of blocks, {len(pools)}, got {len(new)}"
        )
    axes = "n of ids, kv_heads, block_size, head_dim"
    for each in new:
        check_shape("staging", each, (ids.shape[0], *pools[0].shape[1:]), axes)
        if each.dtype != pools[0].dtype:
            raise KernelArgumentError(
                f"staging must have the dtype of blocks, {pools[0].dtype.name}, "
                f"got {each.dtype.name}"
            )
    return new


def _use_mosaic(backend: Backend | None, pools: Pools, ids: jax.Array) -> bool:
    _, kv_heads, block_size, head_dim = pools[0].shape
    elements = kv_heads * block_size * head_dim
    obstacle = None
    if elements % LANES:
        obstacle = (
            f"mosaic needs kv_heads * block_size * head_dim to be a multiple of {LANES}, "
            f"got {elements}"
        )
    elif ids.shape[0] == 0:
        obstacle = "mosaic needs at least one id, got 0"
    return choose(backend, obstacle) == "mosaic"


def _alike(blocks: PoolOrPools, results: Pools) -> PoolOrPools:
    """A tuple for a tuple, one array for one."""
    if isinstance(blocks, tuple):
        return results
    return results[0]

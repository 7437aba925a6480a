"""`copy_blocks`, `gather_blocks` and `scatter_blocks`: move whole blocks.

::

    copy     pool[sources[i]]  ->  pool[destinations[i]]
    gather   pool[ids[i]]      ->  staging[i]
    scatter  staging[i]        ->  pool[ids[i]]             for i < count

The number of ids is static, so that few shapes are compiled; only the first `count` entries are
active. An entry with an id outside the pool is not active either.

Each function takes one pool or a tuple of pools of the same shape and dtype, such as the K and V of
all layers. It moves the same blocks in each, on a GPU with few launches. Blocks of quantised pools
are moved unchanged; the caller moves their scales.

JAX 0.10 has no bfloat16 scatter on CPUs: copy and scatter convert the whole pool there.
"""

from typing import TypeVar

import jax
from jaxtyping import Array, Int32, Shaped

from ..argument_checks import KernelArgumentError, check_int32, check_pool, check_shape
from ..backends import Backend, choose_backend, target_device
from . import xla
from .config import Pools, unsupported

Pool = Shaped[Array, "blocks kv_heads block_size head_dim"]
Staging = Shaped[Array, "n kv_heads block_size head_dim"]
PoolOrPools = TypeVar("PoolOrPools", Pool, tuple[Pool, ...])


def copy_blocks(
    blocks: PoolOrPools,
    sources: Int32[Array, " n"],
    destinations: Int32[Array, " n"],
    count: Int32[Array, ""],
    *,
    backend: Backend | None = None,
) -> PoolOrPools:
    """Return the pools with blocks ``sources`` copied to ``destinations``; in place if donated.

    Args:
        blocks: A pool, or a tuple of them.
        sources: Ids to read.
        destinations: Ids to write: distinct, and none of them a source, because the order of reads
            and writes is undefined.
        count: Number of active pairs; the others may be anything.
        backend: Implementation; None chooses the fastest that supports the arguments. Static.

    Raises:
        KernelArgumentError: A shape, dtype or option is wrong; raised while tracing.
    """
    pools = _check_blocks(blocks)
    check_int32("sources", sources, (None,), "n")
    check_int32("destinations", destinations, sources.shape, "n of sources")
    check_int32("count", count, (), "")
    if _use_mosaic(backend, pools, sources):
        from .mosaic import copy, in_launches

        cores = target_device().num_cores
        copied = in_launches(
            lambda group: copy(group, sources, destinations, count, num_cores=cores), pools
        )
    else:
        copied = tuple(xla.copy(each, sources, destinations, count) for each in pools)
    return _like(blocks, copied)


def gather_blocks(
    blocks: PoolOrPools,
    ids: Int32[Array, " n"],
    count: Int32[Array, ""],
    *,
    backend: Backend | None = None,
) -> PoolOrPools:
    """Return blocks ``ids`` as one contiguous array per pool, to send or to move to the host.

    Args:
        blocks: A pool, or a tuple of them.
        ids: Ids to read; they may repeat.
        count: Number of active ids; the others may be anything, and their staging is zero.
        backend: Implementation; None chooses the fastest that supports the arguments. Static.

    Returns:
        Staging, ``[n, kv_heads, block_size, head_dim]``, or a tuple of them.

    Raises:
        KernelArgumentError: A shape, dtype or option is wrong; raised while tracing.
    """
    pools = _check_blocks(blocks)
    check_int32("ids", ids, (None,), "n")
    check_int32("count", count, (), "")
    if _use_mosaic(backend, pools, ids):
        from .mosaic import gather, in_launches

        cores = target_device().num_cores
        gathered = in_launches(lambda group: gather(group, ids, count, num_cores=cores), pools)
    else:
        gathered = tuple(xla.gather(each, ids, count) for each in pools)
    return _like(blocks, gathered)


def scatter_blocks(
    blocks: PoolOrPools,
    staging: PoolOrPools,
    ids: Int32[Array, " n"],
    count: Int32[Array, ""],
    *,
    backend: Backend | None = None,
) -> PoolOrPools:
    """Return the pools with ``staging[i]`` written to block ``ids[i]``; in place if donated.

    Args:
        blocks: A pool, or a tuple of them.
        staging: New contents in the pool's dtype, as `gather_blocks` returns them.
        ids: Ids to write, distinct.
        count: Number of active entries; the others may be anything.
        backend: Implementation; None chooses the fastest that supports the arguments. Static.

    Raises:
        KernelArgumentError: A shape, dtype or option is wrong; raised while tracing.
    """
    pools = _check_blocks(blocks)
    check_int32("ids", ids, (None,), "n")
    new = _check_staging(staging, pools, ids)
    check_int32("count", count, (), "")
    if _use_mosaic(backend, pools, ids):
        from .mosaic import in_launches, scatter

        cores = target_device().num_cores
        written = in_launches(
            lambda group, part: scatter(group, part, ids, count, num_cores=cores), pools, new
        )
    else:
        pairs = zip(pools, new, strict=True)
        written = tuple(xla.scatter(pool, each, ids, count) for pool, each in pairs)
    return _like(blocks, written)


def _check_blocks(blocks: jax.Array | Pools) -> Pools:
    pools = blocks if isinstance(blocks, tuple) else (blocks,)
    if not pools:
        raise KernelArgumentError("blocks must be a pool or a tuple of at least one, got ()")
    for pool in pools:
        check_pool("blocks", pool)
        if pool.shape != pools[0].shape or pool.dtype != pools[0].dtype:
            raise KernelArgumentError(
                "blocks must have the same shape and dtype, got "
                f"{pools[0].dtype.name}{list(pools[0].shape)} and "
                f"{pool.dtype.name}{list(pool.shape)}"
            )
    return pools


def _check_staging(staging: jax.Array | Pools, pools: Pools, ids: jax.Array) -> Pools:
    new = staging if isinstance(staging, tuple) else (staging,)
    if len(new) != len(pools):
        raise KernelArgumentError(
            f"staging must have one array per pool, {len(pools)}, got {len(new)}"
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
    return choose_backend(backend, unsupported(pools, ids)) == "mosaic"


def _like(blocks: PoolOrPools, results: Pools) -> PoolOrPools:
    """Return a tuple if `blocks` is one, otherwise the only array."""
    if isinstance(blocks, tuple):
        return results
    return results[0]

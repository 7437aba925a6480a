"""Move whole blocks: within a pool, out of it into contiguous staging, and back.

    copy     pool[sources[i]]  ->  pool[destinations[i]]
    gather   pool[ids[i]]      ->  staging[i]
    scatter  staging[i]        ->  pool[ids[i]]             for i < count

The number of ids is static, so that few shapes are compiled; `count` says how many of them act. An
id outside the pool (negative, or past its last block) makes its entry act like one past `count`.

XLA's CPU backend has no bfloat16 scatter: there, copy and scatter convert a bfloat16 pool
as a whole.
"""

from jaxtyping import Array, Float, Int32

from . import block_copy_xla
from .checks import KernelArgumentError, check_int32, check_pool, check_shape


def copy_blocks(
    blocks: Float[Array, "blocks kv_heads block_size head_dim"],
    sources: Int32[Array, " n"],
    destinations: Int32[Array, " n"],
    count: Int32[Array, ""],
) -> Float[Array, "blocks kv_heads block_size head_dim"]:
    """Return the pool with blocks `sources` copied to `destinations`; in place if it is donated.

    Args:
        blocks: The pool.
        sources: Ids to read.
        destinations: Ids to write: distinct, and none of them a source, because backends differ in
            whether a source is read before or after it is overwritten.
        count: How many of the n pairs act, the first ones; the rest may be anything.

    Raises:
        KernelArgumentError: A shape or dtype is wrong; raised while tracing.
    """
    check_pool("blocks", blocks)
    check_int32("sources", sources, (None,), "n")
    check_int32("destinations", destinations, sources.shape, "n of sources")
    check_int32("count", count, (), "")
    return block_copy_xla.copy(blocks, sources, destinations, count)


def gather_blocks(
    blocks: Float[Array, "blocks kv_heads block_size head_dim"],
    ids: Int32[Array, " n"],
    count: Int32[Array, ""],
) -> Float[Array, "n kv_heads block_size head_dim"]:
    """Return blocks `ids` as one contiguous array, to be sent or moved to the host.

    Args:
        blocks: The pool.
        ids: Ids to read; an id may occur more than once.
        count: How many of the n ids act, the first ones; the rest may be anything and give zeros.

    Raises:
        KernelArgumentError: A shape or dtype is wrong; raised while tracing.
    """
    check_pool("blocks", blocks)
    check_int32("ids", ids, (None,), "n")
    check_int32("count", count, (), "")
    return block_copy_xla.gather(blocks, ids, count)


def scatter_blocks(
    blocks: Float[Array, "blocks kv_heads block_size head_dim"],
    staging: Float[Array, "n kv_heads block_size head_dim"],
    ids: Int32[Array, " n"],
    count: Int32[Array, ""],
) -> Float[Array, "blocks kv_heads block_size head_dim"]:
    """Return the pool with `staging[i]` written to block `ids[i]`; in place if it is donated.

    Args:
        blocks: The pool.
        staging: New contents, in the pool's dtype: what `gather_blocks` returned.
        ids: Ids to write, distinct.
        count: How many of the n entries act, the first ones; the rest may be anything.

    Raises:
        KernelArgumentError: A shape or dtype is wrong; raised while tracing.
    """
    check_pool("blocks", blocks)
    check_int32("ids", ids, (None,), "n")
    axes = "n of ids, kv_heads, block_size, head_dim"
    check_shape("staging", staging, (ids.shape[0], *blocks.shape[1:]), axes)
    if staging.dtype != blocks.dtype:
        raise KernelArgumentError(
            f"staging must have the dtype of blocks, {blocks.dtype.name}, got {staging.dtype.name}"
        )
    check_int32("count", count, (), "")
    return block_copy_xla.scatter(blocks, staging, ids, count)

"""`paged_decode`: paged attention for one query token per row."""

from typing import Literal, overload

from jaxtyping import Array, Float, Int32

from ..argument_checks import (
    check_block_tables,
    check_int32,
    check_pools,
    check_queries,
    check_scales,
)
from ..backends import Backend, choose_backend, is_gpu, target_device
from ..online_softmax import check_options
from ..tuning import bucket, tuned
from .batched import decode as decode_batched
from .config import DecodeConfig, choose_config, unsupported
from .xla import decode as decode_xla


@overload
def paged_decode(
    q: Float[Array, "batch q_heads head_dim"],
    k_blocks: Float[Array, "blocks kv_heads block_size head_dim"],
    v_blocks: Float[Array, "blocks kv_heads block_size head_dim"],
    block_tables: Int32[Array, "batch width"],
    lengths: Int32[Array, " batch"],
    *,
    sm_scale: float,
    soft_cap: float | None = None,
    window: int | None = None,
    sinks: Float[Array, " q_heads"] | None = None,
    k_scales: Float[Array, "blocks kv_heads"] | None = None,
    v_scales: Float[Array, "blocks kv_heads"] | None = None,
    return_lse: Literal[False] = False,
    backend: Backend | None = None,
) -> Float[Array, "batch q_heads head_dim"]: ...
@overload
def paged_decode(
    q: Float[Array, "batch q_heads head_dim"],
    k_blocks: Float[Array, "blocks kv_heads block_size head_dim"],
    v_blocks: Float[Array, "blocks kv_heads block_size head_dim"],
    block_tables: Int32[Array, "batch width"],
    lengths: Int32[Array, " batch"],
    *,
    sm_scale: float,
    soft_cap: float | None = None,
    window: int | None = None,
    sinks: Float[Array, " q_heads"] | None = None,
    k_scales: Float[Array, "blocks kv_heads"] | None = None,
    v_scales: Float[Array, "blocks kv_heads"] | None = None,
    return_lse: Literal[True],
    backend: Backend | None = None,
) -> tuple[Float[Array, "batch q_heads head_dim"], Float[Array, "batch q_heads"]]: ...
def paged_decode(
    q: Float[Array, "batch q_heads head_dim"],
    k_blocks: Float[Array, "blocks kv_heads block_size head_dim"],
    v_blocks: Float[Array, "blocks kv_heads block_size head_dim"],
    block_tables: Int32[Array, "batch width"],
    lengths: Int32[Array, " batch"],
    *,
    sm_scale: float,
    soft_cap: float | None = None,
    window: int | None = None,
    sinks: Float[Array, " q_heads"] | None = None,
    k_scales: Float[Array, "blocks kv_heads"] | None = None,
    v_scales: Float[Array, "blocks kv_heads"] | None = None,
    return_lse: bool = False,
    backend: Backend | None = None,
) -> (
    Float[Array, "batch q_heads head_dim"]
    | tuple[Float[Array, "batch q_heads head_dim"], Float[Array, "batch q_heads"]]
):
    """Attention of one query token per row over that row's KV blocks.

    Token ``p`` of row ``b`` lies in the pools at::

        [block_tables[b, p // block_size], kv_head, p % block_size, :]

    and query head ``i`` reads KV head ``i // (q_heads // kv_heads)``. The cost is proportional to
    the sum of the lengths (each rounded up to a chunk), not to the width of the table. The "mosaic"
    backend divides that sum among the thread blocks of the GPU, whichever rows it comes from.
    Memory beyond a row's length is never used: it may hold NaN, and its table entries may be
    anything.

    Args:
        q: Queries, one token per row, bfloat16, float16 or float32; accumulation is in float32.
        k_blocks: Pool of keys: floats, or int8 or float8_e4m3fn with scales.
        v_blocks: Pool of values, of the same shape and dtype.
        block_tables: Block ids of each row. An id outside the pool cannot be rejected while
            tracing; it is clipped to the pool, and that row's result is wrong (see `checked`).
        lengths: KV tokens of each row, including the query's own; 0 marks an inactive row, whose
            output is exactly 0. The output of a row longer than its table is NaN.
        sm_scale: Factor of the logits, usually ``head_dim ** -0.5``. Static.
        soft_cap: Replaces each logit ``x`` by ``soft_cap * tanh(x / soft_cap)``. Static.
        window: Number of latest positions that the query sees, including its own. Blocks entirely
            before the window are not read. Static.
        sinks: One logit per query head, neither scaled nor capped, added to the denominator only.
        k_scales: Dequantisation scales, float32, for quantised pools and only for them:
            ``key = k_blocks[block, head] * k_scales[block, head]``.
        v_scales: The same for the values.
        return_lse: Also return the log-sum-exp of the logits. Static.
        backend: Implementation; None chooses the fastest that supports the arguments. Static.

    Returns:
        The output in the dtype of ``q``; with ``return_lse`` also the natural log of the softmax
        denominator (including sinks) in float32, -inf for inactive rows.

    Raises:
        KernelArgumentError: A shape, dtype or option is wrong; raised while tracing.
    """
    check_pools(k_blocks, v_blocks)
    check_scales(k_blocks, k_scales, v_scales)
    check_queries(q, k_blocks, "batch")
    check_block_tables(block_tables)
    check_int32(
        "block_tables", block_tables, (q.shape[0], block_tables.shape[1]), "batch of q, width"
    )
    check_int32("lengths", lengths, (q.shape[0],), "batch of q")
    options = check_options(sm_scale, soft_cap, window, sinks, q.shape[1])
    scales = None if k_scales is None or v_scales is None else (k_scales, v_scales)
    out: Array
    lse: Array | None
    if choose_backend(backend, unsupported(q, k_blocks)) == "mosaic":
        from .mosaic import decode as decode_mosaic  # slow to import

        out, lse = decode_mosaic(
            q,
            k_blocks,
            v_blocks,
            block_tables,
            lengths,
            sinks,
            scales,
            options=options,
            config=config_for(q.shape[1], k_blocks, block_tables),
            return_lse=return_lse,
        )
    else:
        decode = decode_batched if is_gpu() else decode_xla
        out, lse = decode(q, k_blocks, v_blocks, block_tables, lengths, sinks, options, scales)
    if return_lse:
        assert lse is not None
        return out, lse
    return out


def config_for(q_heads: int, k_blocks: Array, block_tables: Array) -> DecodeConfig:
    """Return the launch configuration for the device being traced for: tuned, or by the rule."""
    _, kv_heads, block_size, head_dim = k_blocks.shape
    batch = block_tables.shape[0]
    table_tokens = block_tables.shape[1] * block_size
    device = target_device()
    found = tuned(
        "paged_decode",
        device.name,
        dtype=k_blocks.dtype.name,
        head_dim=head_dim,
        group=q_heads // kv_heads,
        block_size=block_size,
        rows=bucket(batch * kv_heads),
        tokens=bucket(table_tokens),
    )
    if found is not None:
        return DecodeConfig(**found)
    itemsize = k_blocks.dtype.itemsize
    return choose_config(batch, kv_heads, head_dim, itemsize, device.num_cores)

"""`paged_extend`: paged attention for ragged rows of query tokens."""

from dataclasses import replace
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
from .batched import extend as extend_batched
from .config import ExtendConfig, choose_config, unsupported
from .xla import extend as extend_xla


@overload
def paged_extend(
    q: Float[Array, "tokens q_heads head_dim"],
    k_blocks: Float[Array, "blocks kv_heads block_size head_dim"],
    v_blocks: Float[Array, "blocks kv_heads block_size head_dim"],
    block_tables: Int32[Array, "batch width"],
    kv_lengths: Int32[Array, " batch"],
    q_lengths: Int32[Array, " batch"],
    q_starts: Int32[Array, " batch"],
    *,
    sm_scale: float,
    soft_cap: float | None = None,
    window: int | None = None,
    sinks: Float[Array, " q_heads"] | None = None,
    k_scales: Float[Array, "blocks kv_heads"] | None = None,
    v_scales: Float[Array, "blocks kv_heads"] | None = None,
    return_lse: Literal[False] = False,
    backend: Backend | None = None,
) -> Float[Array, "tokens q_heads head_dim"]: ...
@overload
def paged_extend(
    q: Float[Array, "tokens q_heads head_dim"],
    k_blocks: Float[Array, "blocks kv_heads block_size head_dim"],
    v_blocks: Float[Array, "blocks kv_heads block_size head_dim"],
    block_tables: Int32[Array, "batch width"],
    kv_lengths: Int32[Array, " batch"],
    q_lengths: Int32[Array, " batch"],
    q_starts: Int32[Array, " batch"],
    *,
    sm_scale: float,
    soft_cap: float | None = None,
    window: int | None = None,
    sinks: Float[Array, " q_heads"] | None = None,
    k_scales: Float[Array, "blocks kv_heads"] | None = None,
    v_scales: Float[Array, "blocks kv_heads"] | None = None,
    return_lse: Literal[True],
    backend: Backend | None = None,
) -> tuple[Float[Array, "tokens q_heads head_dim"], Float[Array, "tokens q_heads"]]: ...
def paged_extend(
    q: Float[Array, "tokens q_heads head_dim"],
    k_blocks: Float[Array, "blocks kv_heads block_size head_dim"],
    v_blocks: Float[Array, "blocks kv_heads block_size head_dim"],
    block_tables: Int32[Array, "batch width"],
    kv_lengths: Int32[Array, " batch"],
    q_lengths: Int32[Array, " batch"],
    q_starts: Int32[Array, " batch"],
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
    Float[Array, "tokens q_heads head_dim"]
    | tuple[Float[Array, "tokens q_heads head_dim"], Float[Array, "tokens q_heads"]]
):
    """Causal attention of each row's last ``q_lengths[b]`` tokens over that row's KV blocks.

    The queries of all rows lie in one array, those of row ``b`` from ``q_starts[b]`` on::

        q          | row 0 ........ | row 1 | padding | row 2 ... | padding |
        q_starts   0                ^       .         ^
        position   kv_lengths[b] - q_lengths[b]  ...  kv_lengths[b] - 1      (within row b)

    Token ``p`` of row ``b`` lies in the pools at::

        [block_tables[b, p // block_size], kv_head, p % block_size, :]

    and query head ``i`` reads KV head ``i // (q_heads // kv_heads)``. Write the KV of the query
    tokens into the pools before. Rows of one query cost the KV that they read, as in
    `paged_decode`. Memory beyond a row's ``kv_lengths`` is never used: it may hold NaN, and its
    table entries may be anything.

    Args:
        q: Queries, bfloat16, float16 or float32; accumulation is in float32.
        k_blocks: Pool of keys: floats, or int8 or float8_e4m3fn with scales.
        v_blocks: Pool of values, of the same shape and dtype.
        block_tables: Block ids of each row. An id outside the pool cannot be rejected while
            tracing; it is clipped to the pool, and that row's result is wrong (see `checked`).
        kv_lengths: KV tokens of each row, including its queries. The output of a row longer than
            its table is NaN; a query at a negative position (``q_lengths > kv_lengths``) sees
            nothing.
        q_lengths: Query tokens of each row; 0 marks an inactive row.
        q_starts: Index in ``q`` of each row's first query. Rows must not overlap and must end
            within ``q``, otherwise their outputs are undefined. Inactive rows may start anywhere.
        sm_scale: Factor of the logits, usually ``head_dim ** -0.5``. Static.
        soft_cap: Replaces each logit ``x`` by ``soft_cap * tanh(x / soft_cap)``. Static. The Mosaic
            backend uses the GPU's tanh: relative errors of weights reach ``soft_cap * 2**-11``.
        window: Number of latest positions that a query sees, including its own. Blocks entirely
            before the windows are not read. Static.
        sinks: One logit per query head, neither scaled nor capped, added to the denominator only.
        k_scales: Dequantisation scales, float32, for quantised pools and only for them:
            ``key = k_blocks[block, head] * k_scales[block, head]``. The Hopper kernel rounds these
            keys and values to the dtype of the queries: those of float16 must be below 65,520.
        v_scales: The same for the values.
        return_lse: Also return the log-sum-exp of the logits. Static.
        backend: Implementation; None chooses the fastest that supports the arguments. Static.

    Returns:
        The output in the dtype of ``q``, exactly 0 for tokens of no row; with ``return_lse`` also
        the natural log of the softmax denominator (including sinks) in float32, -inf for tokens
        that see nothing.

    Raises:
        KernelArgumentError: A shape, dtype or option is wrong; raised while tracing.
    """
    check_pools(k_blocks, v_blocks)
    check_scales(k_blocks, k_scales, v_scales)
    check_queries(q, k_blocks, "tokens")
    check_block_tables(block_tables)
    for name, array in (
        ("kv_lengths", kv_lengths),
        ("q_lengths", q_lengths),
        ("q_starts", q_starts),
    ):
        check_int32(name, array, (block_tables.shape[0],), "batch of block_tables")
    options = check_options(sm_scale, soft_cap, window, sinks, q.shape[1])
    arrays = q, k_blocks, v_blocks, block_tables, kv_lengths, q_lengths, q_starts, sinks
    scales = None if k_scales is None or v_scales is None else (k_scales, v_scales)
    if choose_backend(backend, unsupported(q, k_blocks, block_tables.shape[0])) == "mosaic":
        from .mosaic import extend as extend_mosaic  # slow to import

        out: Array
        lse: Array | None
        config = config_for(q, k_blocks)
        out, lse = extend_mosaic(
            *arrays, scales, options=options, return_lse=return_lse, config=config
        )
    else:
        extend = extend_batched if is_gpu() else extend_xla
        out, lse = extend(*arrays, options, scales)
    if return_lse:
        assert lse is not None
        return out, lse
    return out


def config_for(q: Array, k_blocks: Array) -> ExtendConfig:
    """Return the launch configuration for the device being traced for: tuned, or by the rule."""
    _, kv_heads, block_size, head_dim = k_blocks.shape
    device = target_device()
    rule = choose_config(head_dim, device.num_cores)
    found = tuned(
        "paged_extend",
        device.name,
        dtype=k_blocks.dtype.name,
        head_dim=head_dim,
        group=q.shape[1] // kv_heads,
        block_size=block_size,
        tokens=bucket(q.shape[0]),
    )
    return rule if found is None else replace(rule, **found)

"""The Mosaic GPU backend of `paged_extend`, for Hopper: a warp-specialised, persistent kernel.

One thread block per multiprocessor works through its share of the work tiles of `work_list`, as
`shares` divides them; rows of one query token are among them. A work tile is 128 matrix rows:
`tile_tokens` tokens times a `group` of up to 16 query heads of one KV head, head by head, so that
all of them share each KV tile that is read (group 4, 32 tokens)::

    row         0            32           64           96         127
                |   head 0   |   head 1   |   head 2   |   head 3   |
    token        0 ...... 31  0 ...... 31  0 ...... 31  0 ...... 31
    warpgroup   |            0            |            1            |

A thread block has two consumer warpgroups and one producer. While one consumer uses the tensor
cores, the other computes its softmax (ping-pong). K and V pass through pipelines of `stages`
stages of `block_kv` tokens; a `full` barrier hands a stage to the consumers, an `empty` barrier
hands it back::

    producer       K0 V0 | K1 V1 | k_empty[0]: K2, v_empty[0]: V2 | ...
    consumer 0           | QK0  softmax  PV0 QK1  softmax  PV1 QK2 ...
    consumer 1           |     QK0  softmax  PV0 QK1  softmax  PV1 ...

With `ExtendConfig.overlap` they do not alternate, and each overlaps its own work
(`Consumer.attend_ahead`).

One (block, KV head) of a pool is contiguous, so it is one TMA copy. Several small blocks fill a
stage side by side; of a block larger than a stage, a part is copied::

    block_size 32, block_kv 128    | table[4 i] | table[4 i + 1] | ... 2 | ... 3 |    step i

Pool memory that no row has written may hold NaN. A NaN key yields a logit that the mask replaces.
A NaN value would spread (0 * NaN is NaN), so the producer zeroes such rows of V before it hands
the stage over.

Tiles of quantised pools arrive in shared memory of their own, one for K and one for V. The producer
dequantises them into the pipeline, rounded to the dtype of the queries; the consumers are the same
for all pools.

Query tiles start at multiples of 8 tokens but rows start anywhere, so a tile may contain tokens of
two rows. It computes all of them and stores only those of its own row, in runs of a power of two.

A thread block that has only some KV steps of a work tile stores its result in float32, with the
log-sum-exp; the second kernel of `paged_decode` merges these parts.

Source: the pipeline of FlashAttention-3 (arXiv 2407.08608) with the barriers of JAX's
`attention_mgpu`; the stores in powers of two are those of JAX's `ragged_dot_mgpu`.
"""

from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from ..mosaic_compat import Interpret, pl, plgpu, run
from ..online_softmax import AttentionOptions
from ..paged_decode.merge import merge_parts
from . import consumer, producer
from .config import (
    ALIGNMENT,
    ROWS,
    TILE_ROWS,
    WARPGROUPS,
    ExtendConfig,
    tile_heads_of,
    tile_tokens_of,
)
from .kernel_params import KernelParams, KernelRefs
from .shares import Shares, build_shares
from .work_list import WorkItem, WorkList, build_work_list


def kernel(params: KernelParams, *refs: Any) -> None:
    """The kernel body: each warpgroup runs as a consumer or as the producer."""
    q, k, v, tables, items, shares, *rest = refs
    k_scales = rest.pop(0) if params.quantised else None
    v_scales = rest.pop(0) if params.quantised else None
    sinks = rest.pop(0) if params.has_sinks else None
    out = rest.pop(0)
    lse = rest.pop(0) if params.return_lse else None
    named = KernelRefs(q, k, v, tables, items, shares, k_scales, v_scales, sinks, out, lse, *rest)
    warpgroup = lax.axis_index("warpgroup")
    pl.when(warpgroup < WARPGROUPS)(consumer.Consumer(params, named, warpgroup).run)
    pl.when(warpgroup == WARPGROUPS)(producer.Producer(params, named).run)


@partial(jax.jit, static_argnames=("options", "return_lse", "config", "interpret"))
def extend(
    q: Float[Array, "tokens q_heads head_dim"],
    k_blocks: Float[Array, "blocks kv_heads block_size head_dim"],
    v_blocks: Float[Array, "blocks kv_heads block_size head_dim"],
    block_tables: Int32[Array, "batch width"],
    kv_lengths: Int32[Array, " batch"],
    q_lengths: Int32[Array, " batch"],
    q_starts: Int32[Array, " batch"],
    sinks: Float[Array, " q_heads"] | None,
    scales: tuple[Float[Array, "blocks kv_heads"], Float[Array, "blocks kv_heads"]] | None,
    *,
    options: AttentionOptions,
    return_lse: bool,
    config: ExtendConfig,
    interpret: Interpret = None,
) -> tuple[Float[Array, "tokens q_heads head_dim"], Float[Array, "tokens q_heads"] | None]:
    """`paged_extend` without its checks.

    Args:
        q: As in `paged_extend`, like the next seven.
        scales: `k_scales` and `v_scales` of quantised pools.
        options: Scale, soft cap and window.
        return_lse: Whether to compute the log-sum-exp; it is None otherwise.
        config: Launch configuration.
        interpret: Simulate on a CPU.
    """
    num_tokens, q_heads, head_dim = q.shape
    num_blocks, kv_heads, block_size, _ = k_blocks.shape
    out = jnp.zeros_like(q)
    group = tile_heads_of(q_heads // kv_heads)
    head_groups = q_heads // group
    tile_tokens = tile_tokens_of(group)
    params = KernelParams(
        head_groups=head_groups,
        group=group,
        groups_per_kv_head=head_groups // kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        num_blocks=num_blocks,
        dtype=q.dtype,
        pool_dtype=k_blocks.dtype,
        tile_tokens=tile_tokens,
        has_sinks=sinks is not None,
        return_lse=return_lse,
        options=options,
        config=config,
        interpret=interpret,
    )
    padded_tokens = max(-(-num_tokens // ALIGNMENT) * ALIGNMENT, tile_tokens)
    work = build_work_list(
        kv_lengths,
        q_lengths,
        q_starts,
        num_tokens=num_tokens,
        padded_tokens=padded_tokens,
        tile_tokens=tile_tokens,
        block_kv=config.block_kv,
        window=options.window,
        max_kv_length=block_tables.shape[1] * block_size,
    )
    steps = WorkItem(*work.items.T).step_end - WorkItem(*work.items.T).step_begin
    listed = jnp.arange(steps.size, dtype=jnp.int32) < work.num_items
    steps = jnp.where(listed, jnp.maximum(steps, 1), 0)
    divided = build_shares(jnp.repeat(steps, head_groups), config.programs)
    if padded_tokens != num_tokens:
        q = jnp.pad(q, ((0, padded_tokens - num_tokens), (0, 0), (0, 0)))
    updated = [out]
    if return_lse:
        updated.append(jnp.zeros((work.items.shape[0], head_groups, WARPGROUPS, ROWS), jnp.float32))
    inputs = [q, k_blocks, v_blocks, block_tables, work.items, divided.shares]
    inputs.extend(scales or ())
    by_row = None if sinks is None else _sinks_by_row(sinks, params)
    if by_row is not None:
        inputs.append(by_row * consumer.LOG2_E)
    shaped = cast(Any, jax.ShapeDtypeStruct)  # has no types in some versions
    num_parts = 2 * config.programs
    *results, parts, lses = run(
        partial(kernel, params),
        inputs,
        updated,
        (
            shaped((num_parts, WARPGROUPS, ROWS, head_dim), jnp.float32),
            shaped((num_parts, WARPGROUPS, ROWS), jnp.float32),
        ),
        name="paged_extend",
        grid={"program": config.programs},
        warpgroups=WARPGROUPS + 1,
        scratch=params.scratch(),
        interpret=interpret,
        approx_math=True,
        lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
    )
    merged = _merge_into(results, parts, lses, by_row, divided, work, params)
    return merged[0], _lse_by_token(merged[1], work, params) if return_lse else None


def _merge_into(
    results: list[Array],
    parts: Array,
    lses: Array,
    sinks: Array | None,
    divided: Shares,
    work: WorkList,
    params: KernelParams,
) -> list[Array]:
    """Put the merged parts of divided work tiles into the output, and into the log-sum-exps."""
    out, *lse = results
    item, head_group = divided.split // params.head_groups, divided.split % params.head_groups
    merged, merged_lse = merge_parts(
        parts.reshape(-1, TILE_ROWS, params.head_dim),
        lses.reshape(-1, TILE_ROWS),
        divided.parts,
        None if sinks is None else sinks.reshape(-1, TILE_ROWS)[head_group],
        out.dtype,
        params.return_lse,
        params.interpret,
    )
    rows = params.group * params.tile_tokens
    tiles = merged.reshape(-1, TILE_ROWS, params.head_dim)[:, :rows]
    tiles = tiles.reshape(-1, params.group, params.tile_tokens, params.head_dim)
    of = WorkItem(*work.items.at[item].get(mode="fill", fill_value=0).T)  # no valid tokens
    offset = jnp.arange(params.tile_tokens, dtype=jnp.int32)
    valid = (offset >= of.valid_begin[:, None]) & (offset < of.valid_end[:, None])
    token = jnp.where(valid, of.first_token[:, None] + offset, out.shape[0])[:, None]
    head = (head_group * params.group)[:, None] + jnp.arange(params.group, dtype=jnp.int32)
    updated = [out.at[token, head[:, :, None]].set(tiles, mode="drop")]
    if merged_lse is not None:
        shape = -1, WARPGROUPS, ROWS
        updated.append(lse[0].at[item, head_group].set(merged_lse.reshape(shape), mode="drop"))
    return updated


def _sinks_by_row(sinks: Array, params: KernelParams) -> Float[Array, "groups warpgroups rows"]:
    """The sink of each matrix row."""
    by_row = jnp.repeat(sinks.astype(jnp.float32), params.tile_tokens)
    by_row = by_row.reshape(params.head_groups, -1)
    by_row = jnp.pad(by_row, ((0, 0), (0, TILE_ROWS - by_row.shape[1])))
    return by_row.reshape(params.head_groups, WARPGROUPS, ROWS)


def _lse_by_token(
    lse: Array, work: WorkList, params: KernelParams
) -> Float[Array, "tokens q_heads"]:
    """The log-sum-exp of each token, gathered from those of all tiles."""
    tokens = jnp.arange(work.item_of_token.size, dtype=jnp.int32)
    item = jnp.maximum(work.item_of_token, 0)
    offset = jnp.clip(tokens - WorkItem(*work.items.T).first_token[item], 0, params.tile_tokens - 1)
    lse = lse.reshape(-1, params.head_groups, TILE_ROWS)[:, :, : params.group * params.tile_tokens]
    lse = lse.reshape(-1, params.head_groups, params.group, params.tile_tokens)[item, :, :, offset]
    found = work.item_of_token[:, None] >= 0
    return jnp.where(found, lse.reshape(tokens.size, -1), -jnp.inf)

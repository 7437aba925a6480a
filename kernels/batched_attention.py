"""Attention by few large XLA operations, for GPUs on which no kernel of ours runs.

A work item is a query tile with one chunk of the KV that it sees; items are numbered tile by tile::

    KV chunks of the tiles   3      0   2    1
    item                     0 1 2      3 4  5
    tile                     0 0 0      2 2  3

One step gathers the blocks of many items and attends to all of them at once::

    gather K -> logits = q @ K.T -> softmax -> gather V -> weights @ V -> merge by tile

The items are counted on the device, but the host launches the kernels, so their number decides
among three programs, for which the host reads one number from the device::

    items      those of a small step    of a whole step    more
    program    a small step             a whole step       a loop of whole steps

Only the loop waits for the device in each step, which moves hundreds of megabytes. Loops of a
static length for 2, 4, 8, ... steps would not wait, but compute up to twice what there is, and take
three times as long to compile.

Products have operands of 16 bits if the queries have, and float32 sums; else they are of float32.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from .argument_checks import is_quantised
from .manual_axes import vary_like
from .online_softmax import (
    LOWEST,
    V_FACTOR,
    AttentionOptions,
    SoftmaxState,
    empty_state,
    finalize,
    merge,
    optimization_barrier,
)


class BatchSizes(NamedTuple):
    """Sizes of the work (hashable)."""

    chunk_tokens: int
    """KV tokens of a work item, rounded down to blocks, but one block at least."""
    small_step_bytes: int
    """Memory for the keys, values, logits and weights of a small step."""
    step_bytes: int
    """The same of a whole step."""


class Tiles(NamedTuple):
    """Query tiles: consecutive tokens of one row of the block tables."""

    queries: Float[Array, "tiles tile kv_heads group head_dim"]
    positions: Int32[Array, "tiles tile"]
    """Rise from the first token on; tokens that see nothing, at the end, have -1."""
    rows: Int32[Array, " tiles"]
    """Row of the block tables."""


class Pools(NamedTuple):
    """KV of a layer and where to find it, as the kernels take them."""

    k_blocks: Float[Array, "blocks kv_heads block_size head_dim"]
    v_blocks: Float[Array, "blocks kv_heads block_size head_dim"]
    block_tables: Int32[Array, "batch width"]
    scales: tuple[Float[Array, "blocks kv_heads"], Float[Array, "blocks kv_heads"]] | None


class _Chunks(NamedTuple):
    """The KV chunks that the tiles see."""

    blocks: int
    """Blocks of a chunk."""
    tokens: int
    """Tokens of a chunk."""
    first_visible: Int32[Array, "tiles tile"]
    """First position that a token sees."""
    last: Int32[Array, " tiles"]
    """Last position that a tile sees; -1 if none."""
    first: Int32[Array, " tiles"]
    """First chunk that a tile sees."""
    ends: Int32[Array, " tiles"]
    """Items up to this tile, itself included."""
    starts: Int32[Array, " tiles"]
    """Items before this tile."""


class _Items(NamedTuple):
    """Work items that follow one another."""

    tile: Int32[Array, " items"]
    """Query tile; any for items past the last, which see nothing."""
    run: Int32[Array, " items"]
    """Items of the same tile from this one on; 0 or less for items past the last."""
    ids: Int32[Array, "items blocks"]
    """Blocks of the chunk."""
    written: Bool[Array, "items chunk"]
    """Whether a query of the tile may see a token: what is not written may be NaN."""
    seen: Bool[Array, "items tile chunk"]
    """Whether a query sees a token."""


def attend_tiles(
    tiles: Tiles,
    pools: Pools,
    sinks: Float[Array, " q_heads"] | None,
    options: AttentionOptions,
    sizes: BatchSizes,
) -> tuple[Float[Array, "tiles tile q_heads head_dim"], Float[Array, "tiles tile q_heads"]]:
    """Return output and log-sum-exp of query tiles, both float32.

    Args:
        tiles: At least one tile.
        pools: KV.
        sinks: As in `paged_decode`.
        options: Scale, soft cap and window.
        sizes: Sizes of an item and of a step, which has one item at least.
    """
    num_tiles, tile, kv_heads, group, head_dim = tiles.queries.shape
    chunks = _chunks(tiles.positions, pools, options, sizes.chunk_tokens)
    most_chunks = -(-pools.block_tables.shape[1] // chunks.blocks)
    if options.window is not None:
        most_chunks = min(most_chunks, (options.window + tile - 2) // chunks.tokens + 2)
    itemsize = max(each.itemsize for each in _operands(tiles.queries, pools.k_blocks))
    per_token = 2 * head_dim * itemsize + tile * group * (4 + 4 + itemsize)
    item_bytes = kv_heads * chunks.tokens * per_token
    capacity = num_tiles * most_chunks
    steps = sizes.small_step_bytes, sizes.step_bytes
    items = sorted({min(max(1, size // item_bytes), capacity) for size in steps})
    read = jax.tree.leaves((tiles, pools))
    total = chunks.ends[-1]

    step = partial(_step, tiles, pools, chunks, options, most_chunks)
    # Outside of the programs, for all of them: XLA computes it once for all layers of a model.
    first_items = _items(tiles, pools, chunks, 0, items[-1])

    def attend_at_once(num_items: int) -> SoftmaxState:
        return step(0, jax.tree.map(lambda each: each[:num_items], first_items))

    def attend_in_steps(num_items: int) -> SoftmaxState:
        def add_step(index: Array, state: SoftmaxState) -> SoftmaxState:
            base = index * num_items
            return merge(state, step(base, _items(tiles, pools, chunks, base, num_items)))

        state = vary_like(empty_state((num_tiles, kv_heads, tile, group), head_dim), *read)
        num_steps = (total + num_items - 1) // num_items
        final: SoftmaxState = lax.fori_loop(0, num_steps, add_step, state)
        return final

    programs = [partial(attend_at_once, number) for number in items]
    if items[-1] < capacity:
        programs.append(partial(attend_in_steps, items[-1]))
    exceeded = total > jnp.asarray(items[: len(programs) - 1], jnp.int32)
    state: SoftmaxState = lax.switch(exceeded.sum(), programs)
    out, lse = finalize(state, None if sinks is None else sinks.reshape(kv_heads, 1, group))
    out, lse = jnp.moveaxis(out, 1, 2), jnp.moveaxis(lse, 1, 2)
    shape = (num_tiles, tile, kv_heads * group)
    return out.reshape(*shape, head_dim), lse.reshape(shape)


def _operands(q: Array, pool: Array) -> tuple[jnp.dtype, jnp.dtype]:
    """Return the dtypes of the operands of both products.

    Weights of quantised values are bfloat16, because a scale may exceed the range of float16.
    """
    if is_quantised(pool):
        wide = q.dtype.itemsize > 2
        return q.dtype, q.dtype if wide else jnp.dtype(jnp.bfloat16)
    common = jnp.promote_types(q.dtype, pool.dtype)
    return common, common


def _product(
    subscripts: str, a: Array, b: Array, dtype: jnp.dtype
) -> Float[Array, "items kv_heads tile group last"]:
    """A batched product with float32 sums, HIGHEST for float32: a GPU uses TF32 otherwise."""
    precision = lax.Precision.HIGHEST if dtype == jnp.float32 else None
    product: Array = jnp.einsum(
        subscripts,
        a.astype(dtype),
        b.astype(dtype),
        precision=precision,
        preferred_element_type=jnp.float32,
    )
    return product


def _chunks(
    positions: Int32[Array, "tiles tile"],
    pools: Pools,
    options: AttentionOptions,
    chunk_tokens: int,
) -> _Chunks:
    block_size, width = pools.k_blocks.shape[2], pools.block_tables.shape[1]
    blocks = min(max(1, chunk_tokens // block_size), width)
    tokens = blocks * block_size
    first_visible = jnp.zeros_like(positions)
    if options.window is not None:
        # A window of 2**31 - 1 before a negative position is no int32.
        first_visible = jnp.maximum(jnp.maximum(positions, -1) - options.window + 1, 0)
    last = jnp.maximum(positions.max(axis=1), -1)
    first = first_visible[:, 0] // tokens
    number = jnp.maximum((last + tokens) // tokens - first, 0)
    ends = jnp.cumsum(number, dtype=jnp.int32)
    return _Chunks(blocks, tokens, first_visible, last, first, ends, ends - number)


def _items(
    tiles: Tiles, pools: Pools, chunks: _Chunks, base: Array | int, num_items: int
) -> _Items:
    """Return the items `base` and on."""
    num_tiles, (num_blocks, _, block_size, _) = tiles.rows.shape[0], pools.k_blocks.shape
    item = jnp.asarray(base, jnp.int32) + jnp.arange(num_items, dtype=jnp.int32)
    # The default method of searchsorted is a loop; this one is a single kernel.
    tile = jnp.searchsorted(chunks.ends, item, side="right", method="compare_all")
    known = jnp.minimum(tile, num_tiles - 1)  # items past the last see nothing
    last = jnp.where(tile < num_tiles, chunks.last[known], -1)[:, None]
    chunk = (chunks.first[known] + item - chunks.starts[known])[:, None]

    column = chunk * chunks.blocks + jnp.arange(chunks.blocks)
    ids = pools.block_tables.at[tiles.rows[known][:, None], column].get(mode="clip")
    # What is not visible is read from one block, which stays in the cache of the GPU.
    ids = jnp.where(column * block_size <= last, jnp.clip(ids, 0, num_blocks - 1), 0)
    key = chunk * chunks.tokens + jnp.arange(chunks.tokens)
    first_visible = chunks.first_visible[known]
    written = (key >= first_visible[:, :1]) & (key <= last)
    seen = (key[:, None] >= first_visible[..., None]) & (
        key[:, None] <= jnp.minimum(tiles.positions[known], last)[..., None]
    )
    run = jnp.minimum(chunks.ends[known], base + num_items) - item
    return _Items(known, run, ids, written, seen)


def _step(
    tiles: Tiles,
    pools: Pools,
    chunks: _Chunks,
    options: AttentionOptions,
    most_chunks: int,
    base: Array | int,
    items: _Items,
) -> SoftmaxState:
    """Attend to the items `base` and on; return the state of the tiles over them."""
    num_items = items.tile.shape[0]
    num_blocks, kv_heads, block_size, head_dim = pools.k_blocks.shape
    places = items.ids[:, None, :] * kv_heads + jnp.arange(kv_heads, dtype=jnp.int32)[:, None]
    seen = items.seen[:, None, :, None]

    def load(pool: Array) -> Float[Array, "items kv_heads chunk head_dim"]:
        tile_of_block = pool.reshape(num_blocks * kv_heads, block_size * head_dim)
        gathered = tile_of_block.at[places].get(mode="promise_in_bounds")
        return gathered.reshape(num_items, kv_heads, chunks.tokens, head_dim)

    def load_scales(scales: Array) -> Float[Array, "items kv_heads 1 1 chunk"]:
        gathered = scales.reshape(-1).at[places].get(mode="promise_in_bounds")
        return jnp.repeat(gathered, block_size, axis=2)[:, :, None, None]

    of_logits, of_values = _operands(tiles.queries, pools.k_blocks)
    queries = tiles.queries[items.tile]
    logits = _product("nthgd,nhcd->nhtgc", queries, load(pools.k_blocks), of_logits)
    logits = logits * options.sm_scale
    if pools.scales is not None:
        logits = logits * load_scales(pools.scales[0])
    if options.soft_cap is not None:
        logits = options.soft_cap * jnp.tanh(logits / options.soft_cap)
    logits = jnp.where(seen, logits, LOWEST)
    peak = logits.max(axis=-1)
    weights = jnp.exp(logits - peak[..., None])
    total = jnp.where(seen, weights, 0.0).sum(axis=-1)
    if pools.scales is not None:
        weights = weights * load_scales(pools.scales[1])
    weights = jnp.where(seen, weights, 0.0)
    # Values that no query sees may be NaN, and 0 * NaN is NaN.
    values = load(pools.v_blocks).astype(of_values)
    values = jnp.where(items.written[:, None, :, None], values, jnp.zeros((), of_values))
    weighted = _product("nhtgc,nhcd->nhtgd", weights, values, of_values)

    part = SoftmaxState(weighted * V_FACTOR, peak, total)
    begin, end = (jnp.clip(each - base, 0, num_items) for each in (chunks.starts, chunks.ends))
    first = jnp.minimum(begin, num_items - 1)
    longest = min(most_chunks, num_items)
    if tiles.rows.shape[0] <= num_items:
        return _merge_runs(part, first, end - begin, longest)
    runs = _merge_runs(part, jnp.arange(num_items), items.run, longest)

    def of_tiles(x: Array, fill: float) -> Array:
        return jnp.where((begin < end).reshape(-1, *(1,) * (x.ndim - 1)), x[first], fill)

    return SoftmaxState(
        of_tiles(runs.weighted, 0), of_tiles(runs.peak, LOWEST), of_tiles(runs.total, 0)
    )


def _merge_runs(
    part: SoftmaxState,
    first: Int32[Array, " runs"],
    lengths: Int32[Array, " runs"],
    longest: int,
) -> SoftmaxState:
    """Merge the items `first` with those that follow them, `lengths` items for each run.

    The sums have a fixed order, so two calls give the same bits; scattered additions would not.
    """
    # XLA writes the operand of a sum of 32 or more terms to memory, for all runs. Hence two sums.
    terms = min(longest, 16)
    number = jnp.arange(-(-longest // terms) * terms)
    same = number < lengths[:, None]
    item = jnp.minimum(first[:, None] + number, part.peak.shape[0] - 1)

    def masked(x: Array, fill: float) -> Array:
        return jnp.where(same.reshape(*same.shape, *(1,) * (x.ndim - 2)), x, fill)

    peaks = part.peak[item]
    peak = masked(peaks, LOWEST).max(axis=1)
    factor = masked(jnp.exp(peaks - peak[:, None]), 0.0)
    total = masked(factor * part.total[item], 0.0).sum(axis=1)
    weighted = masked(factor[..., None] * part.weighted[item], 0.0)
    weighted = weighted.reshape(first.shape[0], -1, terms, *weighted.shape[2:]).sum(axis=2)
    if weighted.shape[1] > 1:
        (weighted,) = optimization_barrier((weighted,))
    return SoftmaxState(weighted.sum(axis=1), peak, total)

"""The Mosaic GPU backend of `paged_decode`, for Hopper: split-KV attention with pipelined TMA.

A thread block of four warps attends for one (row, KV head, split of the row's KV). The queries of
the KV head are the rows of a WGMMA tile, padded to 64; only the real ones are stored::

                       one pipeline stage: a KV tile of `tile_tokens` tokens, made of TMA boxes
                      .-------------------------------------------------.
                      | block 7     | block 2     | block 9     | ...    |   a box is a block,
      head_dim        | of k, of v  |             |             |        |   or part of a larger
     .-----------.    |-------------'-------------'-------------'--------|
     | query 0   |    |  logits = q @ k.T       64 x tile_tokens         |
     | ...       |    |  masked; online softmax in base 2                |
     | (padding) |    |  weighted += weights @ v    64 x head_dim        |
     '-----------'    '-------------------------------------------------'

A (block, head) tile of a pool is contiguous, so each box is one bulk copy (TMA) that one thread
issues and a barrier counts. The pipeline has `stages` stages::

    step i   commit_smem: all warps have finished tile i - 1
             issue the copies of tile i + stages - 1 into its stage   (block ids were loaded in the
                                                                      step before, except with a
                                                                      head_dim of 256)
             start to load the table entries of tile i + stages
             wait for K of tile i, multiply, softmax, wait for V of tile i, multiply

So `stages - 1` tiles of K and V are always in flight per thread block, and `blocks_per_sm` thread
blocks share a multiprocessor, so that one computes or starts while the other loads::

    pools     head_dim   tile x stages   shared memory   thread blocks   in flight
    16 bit          64        128 x 3          112 KiB               2     128 KiB
    16 bit          80         64 x 3           70 KiB               2      80 KiB
    16 bit          96         64 x 3           84 KiB               2      96 KiB
    16 bit         112         64 x 3           98 KiB               2     112 KiB
    16 bit         128         64 x 3          112 KiB               2     128 KiB
    16 bit         192         64 x 3          168 KiB               1      96 KiB
    16 bit         256         64 x 3          224 KiB               1     128 KiB
    8 bit           64        128 x 4          112 KiB               2      96 KiB
    8 bit          128         64 x 4          112 KiB               2      96 KiB

An H100 needs about 25 KiB in flight per multiprocessor for each microsecond of latency. Small
blocks add copies, not bytes: a tile of 64 tokens in blocks of 16 takes eight copies of 4 KiB.

The tiles of a row's visible tokens are divided evenly among `splits` thread blocks, by the actual
length of the row. With one split the output is final. With more, each thread block stores its own
output and log-sum-exp in float32, and XLA merges them in one pass (two if there are many splits).

Tokens that a row does not see have no effect: only table entries of blocks with visible tokens are
read, the other logits are masked, and the other values are zeroed in shared memory, because they
may be NaN and 0 * NaN is NaN.

All threads convert tiles of quantised pools to 16 bits, exactly, into a second tile. The scales
multiply the logits and the weights instead, in float32.

Source: online softmax as in FlashAttention (arXiv 2205.14135), split KV as in Flash-Decoding;
pipeline and barriers as in JAX's `attention_mgpu`.
"""

import math
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from .. import mosaic_compat as mosaic
from ..merge_states import merge_parts
from ..mosaic_compat import Interpret, pl, plgpu
from ..online_softmax import AttentionOptions
from .config import COLUMNS, DecodeConfig
from .config import WGMMA_ROWS as ROWS

LOWEST = -1e30  # instead of -inf: the difference of two is 0, not NaN
LOG2E = math.log2(math.e)


class WorkTile(NamedTuple):
    """The work of one thread block: a range of KV tiles of one (row, KV head)."""

    row: Any
    head: Any
    split: Any
    fits: Any
    """Whether the row fits its block table; otherwise there is no work and the result is NaN."""
    length: Any
    first_visible: Any
    """First position in the window."""
    first_tile: Any
    """Tile `i` of a row starts at position `i * tile_tokens`."""
    num_tiles: Any


class SoftmaxState(NamedTuple):
    """A softmax in progress, in registers; as in `online_softmax`, but in base 2."""

    weighted: Any
    peak: Any
    total: Any


class Prefetched(NamedTuple):
    """Registers that are loaded one step before they are used."""

    ids: tuple[Any, ...]
    """Block ids of the next tile to copy; empty if they are loaded with its copies."""
    k_scales: tuple[Any, ...]
    """Scales of this tile's blocks, for quantised pools."""
    v_scales: tuple[Any, ...]


@dataclass(frozen=True)
class Kernel:
    """The program of one thread block: static parameters as fields, its steps as methods.

    `refs` holds the references to global memory, shared memory and barriers, by name.
    """

    config: DecodeConfig
    options: AttentionOptions
    group: int
    head_dim: int
    block_size: int
    num_blocks: int
    width: int
    quantised: bool
    has_sinks: bool
    stores_lse: bool
    interpret: Interpret

    @property
    def boxes(self) -> int:
        """TMA boxes of one KV tile, of K or of V."""
        return max(1, self.config.tile_tokens // self.block_size)

    @property
    def box_tokens(self) -> int:
        """Tokens of a TMA box."""
        return min(self.config.tile_tokens, self.block_size)

    @property
    def prefetches_ids(self) -> bool:
        """Whether registers are left for the block ids of one more tile."""
        return self.head_dim < 256

    @property
    def columns(self) -> int:
        """Columns that threads move at a time: whole swizzle tiles."""
        return math.gcd(self.head_dim, COLUMNS)

    def column_chunks(self) -> list[Any]:
        """Column ranges in which threads read and write a tile."""
        return [pl.ds(first, self.columns) for first in range(0, self.head_dim, self.columns)]

    def scratch(self, dtype: Any, pool_dtype: Any) -> dict[str, Any]:
        """Shared memory and barriers by name; `dtype` is that of the queries."""
        tile = (self.config.tile_tokens, self.head_dim)
        ring = plgpu.SMEM(
            (self.config.stages, *tile),
            pool_dtype,
            transforms=mosaic.tiles(pool_dtype, self.head_dim),
        )
        full = plgpu.Barrier(num_arrivals=self.boxes, num_barriers=self.config.stages)
        transforms = mosaic.tiles(dtype, self.head_dim)
        # These share one place, because their lifetimes do not overlap: the queries in row-major
        # order, later the output; a part of a split's output; the queries tiled for WGMMA.
        staged = (
            plgpu.SMEM((ROWS, self.head_dim), dtype),
            plgpu.SMEM((ROWS, self.columns), jnp.float32),
            plgpu.SMEM((ROWS, self.head_dim), dtype, transforms=transforms),
        )
        scratch = {
            "staged": staged if self.interpret is not None else plgpu.RefUnion(*staged),
            "k_ring": ring,
            "v_ring": ring,
            "q_full": plgpu.Barrier(),
            "k_full": full,
            "v_full": full,
        }
        if self.quantised:
            # Weights and values are bfloat16 for any queries, because a weight times a scale may be
            # too small for float16.
            for name, to in (("k_converted", dtype), ("v_converted", jnp.bfloat16)):
                transforms = mosaic.tiles(to, self.head_dim)
                scratch[name] = plgpu.SMEM(tile, to, transforms=transforms)
        return scratch

    def body(self, names: tuple[str, ...], *references: Any) -> None:
        """Attend for one work tile and store the result."""
        refs = SimpleNamespace(**dict(zip(names, references, strict=True)))
        stages = self.config.stages
        work = self.work_tile(refs)
        queries, part, q_tile = refs.staged
        plgpu.copy_gmem_to_smem(
            refs.q.at[work.row, work.head], queries.at[pl.ds(0, self.group)], refs.q_full
        )
        ids = [self.load_ids(refs, work, i) for i in range(stages)]
        for i in range(stages - 1):
            pl.when(i < work.num_tiles)(partial(self.copy, refs, work, i, ids[i]))
        plgpu.barrier_wait(refs.q_full)
        # Rows past the group hold undefined numbers. They affect no other row and are not stored.
        rows = self.cast(queries[...], plgpu.Layout.WGMMA)
        plgpu.commit_smem()  # all warps have read the queries, which the tile overwrites
        q_tile[...] = rows  # visible to WGMMA after the `commit_smem` of the first step
        state = SoftmaxState(
            self.cast(jnp.zeros((ROWS, self.head_dim), jnp.float32), plgpu.Layout.WGMMA),
            self.cast(jnp.full((ROWS,), LOWEST, jnp.float32), plgpu.Layout.WGMMA.reduce(1)),
            self.cast(jnp.zeros((ROWS,), jnp.float32), plgpu.Layout.WGMMA.reduce(1)),
        )
        next_ids = ids[-1] if self.prefetches_ids else ()
        prefetched = Prefetched(next_ids, *self.load_scales(refs, work, ids[0]))

        def step(i: Any, carry: tuple[SoftmaxState, Prefetched]) -> tuple[SoftmaxState, Prefetched]:
            return self.step(refs, work, i, *carry)

        state, _ = lax.fori_loop(0, work.num_tiles, step, (state, prefetched))
        self.store(refs, work, part, queries, state)

    def cast(self, value: Any, layout: Any) -> Any:
        """`value` in a register layout."""
        return mosaic.layout_cast(value, layout, self.interpret)

    def iota(self, shape: tuple[int, ...], dimension: int, layout: Any) -> Any:
        """Indices along a dimension, in a register layout."""
        return mosaic.iota(shape, dimension, layout, self.interpret)

    def work_tile(self, refs: Any) -> WorkTile:
        """Divide the row's visible KV tiles evenly among its splits; the last may get fewer."""
        tile, splits = self.config.tile_tokens, self.config.splits
        row, head, split = (lax.axis_index(name) for name in ("row", "head", "split"))
        length = refs.lengths[row]
        fits = length <= self.width * self.block_size
        length = jnp.where(fits, jnp.maximum(length, 0), 0)
        first_visible = jnp.int32(0)
        if self.options.window is not None:
            first_visible = jnp.maximum(length - self.options.window, 0)
        first = lax.div(first_visible, jnp.int32(tile))
        end = lax.div(length + (tile - 1), jnp.int32(tile))
        share = lax.div(end - first + (splits - 1), jnp.int32(splits))
        first = first + split * share
        num_tiles = jnp.clip(end - first, 0, share)
        return WorkTile(row, head, split, fits, length, first_visible, first, num_tiles)

    def load_ids(self, refs: Any, work: WorkTile, i: Any) -> tuple[Any, ...]:
        """Block ids of the work's tile `i`, clipped to the pool.

        A box without visible tokens gets the id of the nearest block that has some; other table
        entries are not read.
        """
        size = jnp.int32(self.block_size)
        first = lax.div(work.first_visible, size)
        last = lax.div(jnp.maximum(work.length - 1, 0), size)
        start = (work.first_tile + i) * self.config.tile_tokens
        ids = []
        for box in range(self.boxes):
            column = jnp.clip(lax.div(start + box * self.box_tokens, size), first, last)
            ids.append(jnp.clip(refs.table[work.row, column], 0, self.num_blocks - 1))
        return tuple(ids)

    def load_scales(self, refs: Any, work: WorkTile, ids: tuple[Any, ...]) -> tuple[Any, Any]:
        """Scales of the keys and values of a tile's blocks; empty unless quantised."""
        if not self.quantised:
            return (), ()
        k_scales, v_scales = (
            tuple(scales[block, work.head] for block in ids)
            for scales in (refs.k_scales, refs.v_scales)
        )
        return k_scales, v_scales

    def copy(self, refs: Any, work: WorkTile, i: Any, ids: tuple[Any, ...]) -> None:
        """Start the copies of the work's tile `i` into its pipeline stage."""
        stage = lax.rem(jnp.int32(i), jnp.int32(self.config.stages))
        offset: Any = 0
        if self.boxes == 1:
            start = (work.first_tile + i) * self.config.tile_tokens
            offset = pl.multiple_of(lax.rem(start, jnp.int32(self.block_size)), self.box_tokens)
        for pool, ring, full in (
            (refs.k, refs.k_ring, refs.k_full),
            (refs.v, refs.v_ring, refs.v_full),
        ):
            for box, block in enumerate(ids):
                source = pool.at[block, work.head, pl.ds(offset, self.box_tokens)]
                place = pl.ds(box * self.box_tokens, self.box_tokens)
                plgpu.copy_gmem_to_smem(source, ring.at[stage, place], full.at[stage])

    def step(
        self, refs: Any, work: WorkTile, i: Any, state: SoftmaxState, prefetched: Prefetched
    ) -> tuple[SoftmaxState, Prefetched]:
        """Attend to the work's tile `i`."""
        tile_tokens, stages = self.config.tile_tokens, self.config.stages
        stage = lax.rem(i, jnp.int32(stages))
        plgpu.commit_smem()  # all warps have finished tile i - 1: its stage is free
        newest = i + (stages - 1)
        ids = prefetched.ids if self.prefetches_ids else self.load_ids(refs, work, newest)
        pl.when(newest < work.num_tiles)(partial(self.copy, refs, work, newest, ids))
        next_ids = self.load_ids(refs, work, newest + 1) if self.prefetches_ids else ()
        start = (work.first_tile + i) * tile_tokens
        edge = (start < work.first_visible) | (start + tile_tokens > work.length)

        plgpu.barrier_wait(refs.k_full.at[stage])
        k = self.convert(refs.k_ring.at[stage], refs, "k_converted")
        logits = mosaic.dot(refs.staged[2], k, (ROWS, tile_tokens), self.interpret)
        logits = self.scale(logits, prefetched.k_scales)
        logits = lax.cond(edge, partial(self.mask, work, start), lambda x: x, logits)
        peak = jnp.maximum(state.peak, logits.max(axis=1))
        weights = jnp.exp2(logits - lax.broadcast_in_dim(peak, logits.shape, [0]))
        factor = jnp.exp2(state.peak - peak)
        total = state.total * factor + weights.sum(axis=1)
        weighted = state.weighted * lax.broadcast_in_dim(factor, state.weighted.shape, [0])
        if self.quantised:
            weights = weights * self.by_column(prefetched.v_scales)

        plgpu.barrier_wait(refs.v_full.at[stage])
        v = self.convert(refs.v_ring.at[stage], refs, "v_converted")
        pl.when(edge)(partial(self.zero, work, start, v))
        weighted = mosaic.dot_add(weighted, weights.astype(v.dtype), v, self.interpret)
        # Loaded last, to save registers. The ids are in the L1 cache by now.
        scales = self.load_scales(
            refs, work, self.load_ids(refs, work, i + 1) if self.quantised else ()
        )
        return SoftmaxState(weighted, peak, total), Prefetched(next_ids, *scales)

    def convert(self, tile: Any, refs: Any, name: str) -> Any:
        """A tile that WGMMA can read: a quantised one is converted to 16 bits, exactly.

        The scales are applied to logits and weights, in float32.
        """
        if not self.quantised:
            return tile
        converted = getattr(refs, name)
        for columns in self.column_chunks():
            numbers = self.cast(tile[:, columns], plgpu.Layout.WGMMA_UPCAST_4X)
            if numbers.dtype != jnp.int8 and converted.dtype == jnp.bfloat16:
                # There is no direct instruction from float8 to bfloat16.
                numbers = numbers.astype(jnp.float16).astype(jnp.float32)
            converted[:, columns] = numbers.astype(converted.dtype)
        plgpu.commit_smem()
        return converted

    def scale(self, logits: Any, k_scales: tuple[Any, ...]) -> Any:
        """Scale and cap the products of queries and keys: logits in base 2."""
        cap = self.options.soft_cap
        factor: Any = self.options.sm_scale * LOG2E * (1 if cap is None else 2 / cap)
        if self.quantised:
            factor = self.by_column(tuple(scale * factor for scale in k_scales))
        logits = logits * factor
        if cap is None:
            return logits
        # tanh(x) = 1 - 2 / (1 + exp(2 x)), because the GPU's tanh has an error of 2**-11.
        return cap * LOG2E - (2 * cap * LOG2E) / (1 + jnp.exp2(logits))

    def by_column(self, by_box: tuple[Any, ...]) -> Any:
        """Broadcast one scalar per box over its columns of `[ROWS, tile_tokens]`."""
        if len(by_box) == 1:
            return by_box[0]
        layout = plgpu.Layout.WGMMA.reduce(0)
        tile_tokens = self.config.tile_tokens
        column = self.iota((tile_tokens,), 0, layout)
        spread = self.cast(lax.broadcast(by_box[0], (tile_tokens,)), layout)
        for box, value in enumerate(by_box[1:], start=1):
            spread = jnp.where(column >= box * self.box_tokens, value, spread)
        return lax.broadcast_in_dim(spread, (ROWS, tile_tokens), [1])

    def visible(self, work: WorkTile, position: Any) -> Any:
        """Whether the row sees these positions."""
        visible = position < work.length
        if self.options.window is not None:
            visible &= position >= work.first_visible
        return visible

    def mask(self, work: WorkTile, start: Any, logits: Any) -> Any:
        """Mask the logits of tokens that the row does not see."""
        position = start + self.iota(logits.shape, 1, plgpu.Layout.WGMMA)
        return jnp.where(self.visible(work, position), logits, LOWEST)

    def zero(self, work: WorkTile, start: Any, v: Any) -> None:
        """Zero the values of tokens that the row does not see, because 0 * NaN is NaN."""
        shape = (self.config.tile_tokens, self.columns)
        visible = self.visible(work, start + self.iota(shape, 0, plgpu.Layout.WGMMA))
        for columns in self.column_chunks():
            values = self.cast(v[:, columns], plgpu.Layout.WGMMA)
            v[:, columns] = jnp.where(visible, values, jnp.zeros_like(values))
        plgpu.commit_smem()

    def store(self, refs: Any, work: WorkTile, part: Any, out: Any, state: SoftmaxState) -> None:
        """Store output and log-sum-exp: final ones, or those of a split."""
        empty = state.total == 0  # not `> 0`: NaN in, NaN out
        peak, total, factor = state.peak, state.total, jnp.float32(1)
        if self.has_sinks:
            layout = plgpu.Layout.WGMMA.reduce(1)
            sink = mosaic.load(refs.sinks, work.head, layout, self.interpret) * LOG2E
            peak = jnp.maximum(peak, sink)
            factor = jnp.exp2(state.peak - peak)
            total = total * factor + jnp.exp2(sink - peak)
        factor = jnp.where(empty, 0.0, factor / jnp.where(empty, 1.0, total))
        poison = jnp.where(work.fits, 0.0, jnp.nan)
        factor = factor + poison
        weighted = state.weighted * lax.broadcast_in_dim(factor, state.weighted.shape, [0])
        plgpu.commit_smem()  # all warps have finished with the queries, which the output overwrites
        if self.stores_lse:
            lse = jnp.where(empty, -jnp.inf, peak / LOG2E + jnp.log(jnp.where(empty, 1.0, total)))
            refs.lse[work.row, work.head, work.split] = lse + poison
        real = pl.ds(0, self.group)
        target = refs.out.at[work.row, work.head, work.split]
        if self.config.splits == 1:
            # All at once takes too many registers.
            for first in range(0, self.head_dim, self.columns):
                columns = slice(first, first + self.columns)
                out[:, columns] = weighted[:, columns].astype(out.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(out.at[real], target)
        else:
            for first in range(0, self.head_dim, self.columns):
                part[...] = weighted[:, first : first + self.columns]
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(part.at[real], target.at[:, pl.ds(first, self.columns)])
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # `part` may be overwritten
        plgpu.wait_smem_to_gmem(0)


@partial(jax.jit, static_argnames=("options", "config", "return_lse", "interpret"))
def decode(
    q: Float[Array, "batch q_heads head_dim"],
    k_blocks: Float[Array, "blocks kv_heads block_size head_dim"],
    v_blocks: Float[Array, "blocks kv_heads block_size head_dim"],
    block_tables: Int32[Array, "batch width"],
    lengths: Int32[Array, " batch"],
    sinks: Float[Array, " q_heads"] | None,
    scales: tuple[Float[Array, "blocks kv_heads"], Float[Array, "blocks kv_heads"]] | None,
    *,
    options: AttentionOptions,
    config: DecodeConfig,
    return_lse: bool,
    interpret: Interpret = None,
) -> tuple[Float[Array, "batch q_heads head_dim"], Float[Array, "batch q_heads"] | None]:
    """`paged_decode` without its checks; the log-sum-exp is None unless `return_lse`."""
    batch, q_heads, head_dim = q.shape
    num_blocks, kv_heads, block_size, _ = k_blocks.shape
    group = q_heads // kv_heads
    final = config.splits == 1
    queries = q.reshape(batch, kv_heads, group, head_dim)
    # With a head_dim of 256 and other groups, Mosaic's layout inference does not terminate.
    padding = -group % 4 if head_dim == 256 else 0
    if padding:
        queries = jnp.pad(queries, ((0, 0), (0, 0), (0, padding), (0, 0)))
    inputs = {"q": queries, "k": k_blocks, "v": v_blocks, "table": block_tables, "lengths": lengths}
    if scales is not None:
        inputs |= {"k_scales": scales[0], "v_scales": scales[1]}
    sink_rows = None
    if sinks is not None:
        sink_rows = sinks.astype(jnp.float32).reshape(kv_heads, group)
        if final:
            inputs["sinks"] = jnp.pad(sink_rows, ((0, 0), (0, ROWS - group)))
    kernel = Kernel(
        config=config,
        options=options,
        group=group + padding,
        head_dim=head_dim,
        block_size=block_size,
        num_blocks=num_blocks,
        width=block_tables.shape[1],
        quantised=scales is not None,
        has_sinks="sinks" in inputs,
        # With a head_dim of 256, ptxas spills the output of a kernel that stores no lse.
        stores_lse=return_lse or not final or head_dim == 256,
        interpret=interpret,
    )
    out, *lses = _run(kernel, inputs)
    out = out[..., :group, :]
    lse = lses[0][..., :group] if lses else None
    if final:
        out, lse = out[:, :, 0], None if lse is None else lse[:, :, 0]
    else:
        assert lse is not None
        parts = range(config.splits)
        out, lse = merge_parts(
            [out[:, :, i] for i in parts], [lse[:, :, i] for i in parts], sink_rows
        )
    lse = lse.reshape(batch, q_heads) if return_lse and lse is not None else None
    return out.reshape(q.shape).astype(q.dtype), lse


def _run(kernel: Kernel, inputs: dict[str, jax.Array]) -> tuple[jax.Array, ...]:
    """Launch one thread block per (row, KV head, split)."""
    q, splits = inputs["q"], kernel.config.splits
    batch, kv_heads, group, head_dim = q.shape
    shaped = cast(Any, jax.ShapeDtypeStruct)  # has no types in some versions
    kept = (batch, kv_heads, splits, group, head_dim)
    outputs = {"out": shaped(kept, q.dtype if splits == 1 else jnp.float32)}
    if kernel.stores_lse:
        # Including the padding rows: 256 bytes per (row, KV head, split).
        outputs["lse"] = shaped((batch, kv_heads, splits, ROWS), jnp.float32)
    scratch = kernel.scratch(q.dtype, inputs["k"].dtype)
    return mosaic.run(
        partial(kernel.body, (*inputs, *outputs, *scratch)),
        tuple(inputs.values()),
        outputs=tuple(outputs.values()),
        name="paged_decode",
        grid={"row": batch, "head": kv_heads, "split": splits},
        scratch=tuple(scratch.values()),
        interpret=kernel.interpret,
        approx_math=True,
        lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
        reduction_scratch_bytes=0,  # the rows of a WGMMA tile are reduced within a warp
        unsafe_no_auto_barriers=True,  # the kernel calls `commit_smem` where needed
    )

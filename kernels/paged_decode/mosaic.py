"""The Mosaic GPU backend of `paged_decode`, for Hopper: split-KV attention with pipelined TMA.

Persistent thread blocks of four warps work through equal shares of all KV tiles of the batch, as
`work_list` divides them. A work tile is the part of a share that belongs to one (row, KV head). The
queries of the KV head are the rows of a WGMMA tile, padded to 64; only the real ones are stored::

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

After the last step of a work tile, the copies of the next one's first tiles are issued before this
one's output is stored (with a head_dim of 256, afterwards). So `stages - 1` tiles of K and V are
always in flight per thread block, and `blocks_per_sm` thread blocks share a multiprocessor, so that
one computes while the other loads::

    pools     head_dim   tile x stages   shared memory   thread blocks   in flight
    16 bit          64        128 x 3          112 KiB               2     128 KiB
    16 bit          80         64 x 3           70 KiB               2      80 KiB
    16 bit          96         64 x 3           84 KiB               2      96 KiB
    16 bit         112         64 x 3           98 KiB               2     112 KiB
    16 bit         128         64 x 3          112 KiB               2     128 KiB
    16 bit         192         64 x 3          168 KiB               1      96 KiB
    16 bit         256         64 x 3          224 KiB               1     128 KiB
    int8        64, 128   128, 64 x 4          112 KiB               2      96 KiB
    float8      64, 128   128, 64 x 4     96, 104 KiB               2      96 KiB

An H100 needs about 25 KiB in flight per multiprocessor for each microsecond of latency. Small
blocks add copies, not bytes: a tile of 64 tokens in blocks of 16 takes eight copies of 4 KiB.

Each work tile stores its own output and log-sum-exp in float32, and a second kernel
(`merge`) makes the output of each row from those of its work tiles.

Tokens that a row does not see have no effect: only table entries of blocks with visible tokens are
read, the other logits are masked, and the other values are zeroed in shared memory, because they
may be NaN and 0 * NaN is NaN.

All threads convert tiles of int8 pools to 16 bits, exactly, into a second tile. The scales multiply
the logits and the weights instead, in float32.

Of float8 pools, only the values are converted, to float16, for which there is an instruction; the
weights are then multiples of `SoftmaxState.unit`. The tensor cores multiply the keys as they are,
by queries that are sums of float8 numbers (`split_queries`). The products are exact, but Hopper
adds them with 13 bits after the leading one, so the error of a logit is about 2**-10 of its largest
partial sum, like that of queries in bfloat16. The values cannot be multiplied as they are: WGMMA
reads a right operand of 8 bits only if its tokens are contiguous, and Mosaic transposes no bytes.

Sources: online softmax as in FlashAttention (arXiv 2205.14135), split KV as in Flash-Decoding;
pipeline and barriers as in JAX's `attention_mgpu`; the adder of float8: arXiv 2411.10958.
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
from ..mosaic_compat import Interpret, pl, plgpu
from ..online_softmax import AttentionOptions
from .config import COLUMNS, DecodeConfig
from .config import WGMMA_ROWS as ROWS
from .merge import heads_together, merge_parts
from .work_list import Position, Row, build_work_list

LOWEST = -1e30  # instead of -inf: the difference of two is 0, not NaN
LOG2E = math.log2(math.e)
QUERY_PARTS = {"bfloat16": 2, "float16": 3}
"""Number of float8_e4m3fn numbers, of 4 significant bits each, whose sum is a query."""
SMALLEST_QUERY = 2.0**-100
"""Queries that are all smaller lose precision."""
WEIGHT_HEADROOM = 2.0**15
"""Weights are at most this in float16, so they are precise down to 2**-29 of that."""
SMALLEST_UNIT = 2.0**-126


class WorkTile(NamedTuple):
    """A range of KV tiles of one (row, KV head), which one thread block reads."""

    row: Any
    head: Any
    part: Any
    """Index of its result among the parts."""
    fits: Any
    """Whether the row fits its block table; otherwise there is no work and the result is NaN."""
    length: Any
    first_visible: Any
    """First position in the window."""
    first_tile: Any
    """Tile `i` of a row starts at position `i * tile_tokens`."""
    num_tiles: Any
    before: Any
    """Number of tiles of the thread block's earlier work tiles."""


class SoftmaxState(NamedTuple):
    """A softmax in progress, in registers; as in `online_softmax`, but in base 2."""

    weighted: Any
    peak: Any
    total: Any
    unit: Any
    """Unit of `weighted`: 1, but with float8 pools, whose weights are multiplied in float16, the
    largest scale of a block of values so far, over `WEIGHT_HEADROOM`."""


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
    kv_heads: int
    quantised: bool
    float8: bool
    """Whether the numbers of quantised pools are float8_e4m3fn."""
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
        """Whether registers are left for the block ids of one more tile, or beside the output."""
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
        parts = (QUERY_PARTS[jnp.dtype(dtype).name],) if self.float8 else ()
        q_dtype = pool_dtype if self.float8 else dtype
        # These share one place, because their lifetimes do not overlap: the queries in row-major
        # order; some columns of the output; the queries tiled for WGMMA.
        staged = (
            plgpu.SMEM((ROWS, self.head_dim), dtype),
            plgpu.SMEM((ROWS, self.columns), jnp.float32),
            plgpu.SMEM(
                (*parts, ROWS, self.head_dim),
                q_dtype,
                transforms=mosaic.tiles(q_dtype, self.head_dim),
            ),
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
            # Weights and values of int8 pools are bfloat16 for any queries, because a weight times
            # a scale may be too small for float16.
            converted = {"v_converted": jnp.float16 if self.float8 else jnp.bfloat16}
            if not self.float8:
                converted["k_converted"] = dtype
            for name, to in converted.items():
                transforms = mosaic.tiles(to, self.head_dim)
                scratch[name] = plgpu.SMEM(tile, to, transforms=transforms)
        return scratch

    def body(self, names: tuple[str, ...], *references: Any) -> None:
        """Attend for all work tiles of the thread block and store their results."""
        refs = SimpleNamespace(**dict(zip(names, references, strict=True)))
        program = lax.axis_index("program")
        pair, tile, left = (refs.shares[program, field] for field in range(3))
        first = Position(pair, tile, left, jnp.int32(0))
        if self.prefetches_ids:
            pl.when(left > 0)(lambda: self.start(refs, self.work_tile(refs, first)))

        def attend_and_store(position: Position) -> Position:
            work = self.work_tile(refs, position)
            if not self.prefetches_ids:
                self.start(refs, work)
            state = self.attend(refs, work)
            following = position.after(work.num_tiles)
            if self.prefetches_ids:
                # The stage of the last tile, which a warp may still read, is filled by `step`.
                pl.when(following.left > 0)(
                    lambda: self.start(refs, self.work_tile(refs, following))
                )
            self.store(refs, work, state)
            return following

        lax.while_loop(lambda position: position.left > 0, attend_and_store, first)

    def start(self, refs: Any, work: WorkTile) -> None:
        """Start the copies of the first tiles of a work tile, for all stages but one."""
        for i in range(self.config.stages - 1):
            ids = self.load_ids(refs, work, i)
            pl.when(i < work.num_tiles)(partial(self.copy, refs, work, i, ids))

    def attend(self, refs: Any, work: WorkTile) -> SoftmaxState:
        """Attend to the tiles of a work tile, whose first copies have been started."""
        queries = refs.staged[0].at[pl.ds(0, self.group)]
        plgpu.copy_gmem_to_smem(refs.q.at[work.row, work.head], queries, refs.q_full)
        next_ids = self.load_ids(refs, work, self.config.stages - 1) if self.prefetches_ids else ()
        scales = self.load_scales(
            refs, work, self.load_ids(refs, work, 0) if self.quantised else ()
        )
        plgpu.barrier_wait(refs.q_full)
        factor = self.tile_queries(refs)
        state = SoftmaxState(
            self.cast(jnp.zeros((ROWS, self.head_dim), jnp.float32), plgpu.Layout.WGMMA),
            self.cast(jnp.full((ROWS,), LOWEST, jnp.float32), plgpu.Layout.WGMMA.reduce(1)),
            self.cast(jnp.zeros((ROWS,), jnp.float32), plgpu.Layout.WGMMA.reduce(1)),
            jnp.float32(SMALLEST_UNIT if self.float8 else 1),
        )

        def step(i: Any, carry: tuple[SoftmaxState, Prefetched]) -> tuple[SoftmaxState, Prefetched]:
            return self.step(refs, work, i, factor, *carry)

        state, _ = lax.fori_loop(0, work.num_tiles, step, (state, Prefetched(next_ids, *scales)))
        return SoftmaxState(*state)

    def tile_queries(self, refs: Any) -> Any:
        """Store the queries as WGMMA reads them; return the factor of their logits.

        Rows past the group hold undefined numbers. They affect no other row and are not stored.
        """
        cap = self.options.soft_cap
        factor = self.options.sm_scale * LOG2E * (1 if cap is None else 2 / cap)
        queries, _, q_tile = refs.staged
        layout = plgpu.Layout.WGMMA_UPCAST_4X if self.float8 else plgpu.Layout.WGMMA
        rows = self.cast(queries[...], layout)
        plgpu.commit_smem()  # all warps have read the queries, which the tile overwrites
        # What is stored here is visible to WGMMA after the `commit_smem` of the first step.
        if not self.float8:
            q_tile[...] = rows
            return factor
        parts, unit = split_queries(rows, q_tile.dtype)
        for index, part in enumerate(parts):
            q_tile[index] = part
        return self.cast(unit, plgpu.Layout.WGMMA.reduce(1)) * factor

    def cast(self, value: Any, layout: Any) -> Any:
        """`value` in a register layout."""
        return mosaic.layout_cast(value, layout, self.interpret)

    def iota(self, shape: tuple[int, ...], dimension: int, layout: Any) -> Any:
        """Indices along a dimension, in a register layout."""
        return mosaic.iota(shape, dimension, layout, self.interpret)

    def row(self, refs: Any, row: Any) -> Row:
        """What a row sees."""
        return Row.of(
            refs.lengths[row],
            tile_tokens=self.config.tile_tokens,
            window=self.options.window,
            capacity=self.width * self.block_size,
        )

    def work_tile(self, refs: Any, position: Position) -> WorkTile:
        """The work tile at a position of the thread block's share."""
        row = lax.div(position.pair, jnp.int32(self.kv_heads))
        seen = self.row(refs, row)
        return WorkTile(
            row=row,
            head=lax.rem(position.pair, jnp.int32(self.kv_heads)),
            part=position.pair + lax.axis_index("program"),
            fits=seen.fits,
            length=seen.length,
            first_visible=seen.first_visible,
            first_tile=seen.first_tile + position.tile,
            num_tiles=jnp.minimum(seen.num_tiles - position.tile, position.left),
            before=position.before,
        )

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
        stage = lax.rem(work.before + i, jnp.int32(self.config.stages))
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
        self,
        refs: Any,
        work: WorkTile,
        i: Any,
        logit_factor: Any,
        state: SoftmaxState,
        prefetched: Prefetched,
    ) -> tuple[SoftmaxState, Prefetched]:
        """Attend to the work's tile `i`."""
        tile_tokens, stages = self.config.tile_tokens, self.config.stages
        stage = lax.rem(work.before + i, jnp.int32(stages))
        plgpu.commit_smem()  # all warps have finished tile i - 1: its stage is free
        newest = i + (stages - 1)
        ids = prefetched.ids if self.prefetches_ids else self.load_ids(refs, work, newest)
        pl.when(newest < work.num_tiles)(partial(self.copy, refs, work, newest, ids))
        next_ids = self.load_ids(refs, work, newest + 1) if self.prefetches_ids else ()
        start = (work.first_tile + i) * tile_tokens
        edge = (start < work.first_visible) | (start + tile_tokens > work.length)

        plgpu.barrier_wait(refs.k_full.at[stage])
        q, k = [refs.staged[2]], refs.k_ring.at[stage]
        if self.float8:
            q = [q[0].at[part] for part in range(q[0].shape[0])]
        else:
            k = self.convert(k, refs, "k_converted")
        logits = mosaic.dot(q, k, (ROWS, tile_tokens), self.interpret)
        logits = self.scale(logits, logit_factor, prefetched.k_scales)
        logits = lax.cond(edge, partial(self.mask, work, start), lambda x: x, logits)
        peak = jnp.maximum(state.peak, logits.max(axis=1))
        weights = jnp.exp2(logits - lax.broadcast_in_dim(peak, logits.shape, [0]))
        factor = jnp.exp2(state.peak - peak)
        total = state.total * factor + weights.sum(axis=1)
        unit, v_scales = state.unit, prefetched.v_scales
        if self.float8:
            for scale in v_scales:
                unit = jnp.maximum(unit, scale * (1 / WEIGHT_HEADROOM))
            v_scales = tuple(scale / unit for scale in v_scales)
            factor = factor * (state.unit / unit)
        weighted = state.weighted * lax.broadcast_in_dim(factor, state.weighted.shape, [0])
        if self.quantised:
            weights = weights * self.by_column(v_scales)

        plgpu.barrier_wait(refs.v_full.at[stage])
        v = self.convert(refs.v_ring.at[stage], refs, "v_converted")
        pl.when(edge)(partial(self.zero, work, start, v))
        weighted = mosaic.dot_add(weighted, weights.astype(v.dtype), v, self.interpret)
        # Loaded last, to save registers. The ids are in the L1 cache by now.
        scales = self.load_scales(
            refs, work, self.load_ids(refs, work, i + 1) if self.quantised else ()
        )
        return SoftmaxState(weighted, peak, total, unit), Prefetched(next_ids, *scales)

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

    def scale(self, logits: Any, factor: Any, k_scales: tuple[Any, ...]) -> Any:
        """Scale and cap the products of queries and keys: logits in base 2."""
        cap = self.options.soft_cap
        if self.float8:  # a factor for each row
            if len(k_scales) == 1:
                factor = factor * k_scales[0]
            else:
                logits = logits * self.by_column(k_scales)
            factor = lax.broadcast_in_dim(factor, logits.shape, [0])
        elif self.quantised:
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

    def store(self, refs: Any, work: WorkTile, state: SoftmaxState) -> None:
        """Store output and log-sum-exp of a work tile."""
        part = refs.staged[1]
        empty = state.total == 0  # not `> 0`: NaN in, NaN out
        total = jnp.where(empty, 1.0, state.total)
        poison = jnp.where(work.fits, 0.0, jnp.nan)
        weighted = state.weighted * lax.broadcast_in_dim(
            state.unit / total + poison, state.weighted.shape, [0]
        )
        lse = jnp.where(empty, -jnp.inf, state.peak + jnp.log2(total))
        refs.lses[work.part] = lse + poison
        real = pl.ds(0, self.group)
        for first in range(0, self.head_dim, self.columns):
            part[...] = weighted[:, first : first + self.columns]
            plgpu.commit_smem()
            target = refs.parts.at[work.part, :, pl.ds(first, self.columns)]
            plgpu.copy_smem_to_gmem(part.at[real], target)
            # Afterwards, the next columns or the next queries may overwrite the place.
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def split_queries(rows: Any, dtype: Any) -> tuple[list[Any], Any]:
    """Split queries into float8 numbers: `rows` is the sum of the parts, times the unit of a row.

    A part has 4 significant bits and rounds the rest of those before it, so two are exactly a
    bfloat16 number and three a float16 number, unless it is so small that the least float8 number,
    2**-9, is too large. The error of a query is at most 2**-17 of the largest in its row.

    Args:
        rows: Queries, bfloat16 or float16, [rows, head_dim].
        dtype: float8_e4m3fn.

    Returns:
        The parts, and the unit of each row: the power of two with which the largest number of the
        row has 128 to 256 units, of the 448 that float8 can hold.
    """
    left = rows.astype(jnp.float32)
    largest = jnp.maximum(jnp.abs(left).max(axis=1), SMALLEST_QUERY)
    exponent = lax.bitcast_convert_type(largest, jnp.int32) & jnp.int32(0x7F800000)
    unit = lax.bitcast_convert_type(exponent, jnp.float32) * 2.0**-7
    left = left * lax.broadcast_in_dim(1 / unit, left.shape, [0])
    parts = []
    for _ in range(QUERY_PARTS[rows.dtype.name]):
        parts.append(left.astype(dtype))
        left = left - parts[-1].astype(jnp.float16).astype(jnp.float32)
    return parts, unit


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
    queries = q.reshape(batch, kv_heads, group, head_dim)
    # With a head_dim of 256 and other groups, Mosaic's layout inference does not terminate.
    # `merge_parts` reads the outputs of some heads together.
    padding = -group % (4 if head_dim == 256 else heads_together(head_dim))
    if padding:
        queries = jnp.pad(queries, ((0, 0), (0, 0), (0, padding), (0, 0)))
    work = build_work_list(
        lengths,
        kv_heads=kv_heads,
        programs=config.programs,
        tile_tokens=config.tile_tokens,
        window=options.window,
        capacity=block_tables.shape[1] * block_size,
    )
    inputs = {"q": queries, "k": k_blocks, "v": v_blocks, "table": block_tables}
    inputs |= {"lengths": lengths, "shares": work.shares}
    if scales is not None:
        inputs |= {"k_scales": scales[0], "v_scales": scales[1]}
    kernel = Kernel(
        config=config,
        options=options,
        group=group + padding,
        head_dim=head_dim,
        block_size=block_size,
        num_blocks=num_blocks,
        width=block_tables.shape[1],
        kv_heads=kv_heads,
        quantised=scales is not None,
        float8=k_blocks.dtype == jnp.float8_e4m3fn,
        interpret=interpret,
    )
    parts, lses = _run(kernel, inputs)
    if sinks is not None:
        sinks = jnp.pad(sinks.reshape(kv_heads, group), ((0, 0), (0, padding)))
    out, lse = merge_parts(parts, lses, work.parts, sinks, q.dtype, return_lse, interpret)
    out = out.reshape(queries.shape)[..., :group, :].reshape(q.shape)
    if lse is not None:
        lse = lse.reshape(queries.shape[:-1])[..., :group].reshape(batch, q_heads)
    return out, lse


def _run(kernel: Kernel, inputs: dict[str, jax.Array]) -> tuple[jax.Array, ...]:
    """Launch the persistent thread blocks."""
    batch, kv_heads, group, head_dim = inputs["q"].shape
    num_parts = batch * kv_heads + kernel.config.programs
    shaped = cast(Any, jax.ShapeDtypeStruct)  # has no types in some versions
    outputs = {
        "parts": shaped((num_parts, group, head_dim), jnp.float32),
        "lses": shaped((num_parts, ROWS), jnp.float32),
    }
    scratch = kernel.scratch(inputs["q"].dtype, inputs["k"].dtype)
    return mosaic.run(
        partial(kernel.body, (*inputs, *outputs, *scratch)),
        tuple(inputs.values()),
        outputs=tuple(outputs.values()),
        name="paged_decode",
        grid={"program": kernel.config.programs},
        scratch=tuple(scratch.values()),
        interpret=kernel.interpret,
        approx_math=True,
        lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
        reduction_scratch_bytes=0,  # the rows of a WGMMA tile are reduced within a warp
        unsafe_no_auto_barriers=True,  # the kernel calls `commit_smem` where needed
    )

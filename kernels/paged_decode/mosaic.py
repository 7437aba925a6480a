"""The Mosaic GPU backend of `paged_decode`, for Hopper.

One thread block of four warps attends for one (row, KV head, split of the row's tokens). The
queries of the KV head are the rows of a WGMMA tile, padded to 64; only the real ones are stored:

                       one slot of the ring: a tile of KV, `tile_tokens` wide, in pieces
                      .-------------------------------------------------.
                      | block 7     | block 2     | block 9     | ...    |   a piece is a block,
      head_dim        | of k, of v  |             |             |        |   or part of a larger
     .-----------.    |-------------'-------------'-------------'--------|
     | query 0   |    |  logits = q @ k.T       64 x tile_tokens         |
     | ...       |    |  masked; running softmax in base 2               |
     | (padding) |    |  weighted += weights @ v    64 x head_dim        |
     '-----------'    '-------------------------------------------------'

A (block, head) tile of a pool is one contiguous box, so a piece is one bulk copy (TMA). One thread
issues them, a barrier counts them, and no warp touches a byte on its way. The ring has `stages`
slots:

    step i   commit_smem: all warps are done with tile i - 1
             its slot takes the copies of tile i + stages - 1      (ids loaded one step before,
                                                                    but for a head_dim of 256)
             table entries of tile i + stages start to load
             wait for K of tile i, multiply, softmax, wait for V of tile i, multiply

So `stages - 1` tiles of K and V are always in flight for each thread block, and `blocks_per_sm`
thread blocks share a multiprocessor, one computing or starting while the other streams:

    pools     head_dim   tile x stages   shared memory   thread blocks   in flight
    16 bit          64        128 x 3          112 KiB               2     128 KiB
    16 bit         128         64 x 3          112 KiB               2     128 KiB
    16 bit         256         64 x 3          224 KiB               1     128 KiB
    8 bit           64        128 x 4          112 KiB               2      96 KiB
    8 bit          128         64 x 4          112 KiB               2      96 KiB

An H100 needs about 25 KiB in flight per multiprocessor for each microsecond of latency. Small
blocks cost copies, not bytes: a tile of 64 tokens in blocks of 16 is eight copies of 4 KiB.

A row's visible tokens are divided evenly, in tiles, among `splits` thread blocks, by its real
length. With one split the output is final; with more, each stores its own output and log-sum-exp,
float32, and XLA merges them in one pass, or two where the splits are many.

Nothing outside a row's visible tokens is used: only table entries of blocks with visible tokens
are followed, the other logits are masked, and the other values, which may be NaN and would be
multiplied by a weight of 0, are cleared in shared memory.

Numbers of quantised pools are widened to 16 bits, exactly, by all threads, from the ring into a
tile beside it; their scales multiply logits and weights, in float32.

Source: online softmax as in FlashAttention (arXiv 2205.14135), split KV as in Flash-Decoding; ring
and barriers as in JAX's `attention_mgpu`.
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
from ..mosaic_compat import (
    Interpret,
    pl,
    plgpu,
)
from ..online_softmax import AttentionOptions
from .config import WGMMA_ROWS as ROWS
from .config import DecodeConfig

LOWEST = -1e30  # in place of -inf: the difference of two is 0, not NaN
LOG2E = math.log2(math.e)
CHUNK = 64  # columns that threads move between registers and shared memory at once


class Span(NamedTuple):
    """The work of one thread block: some tiles of one (row, KV head)."""

    row: Any
    head: Any
    split: Any
    fits: Any
    """Whether the row's length fits its table; if not there is no work, and the result is NaN."""
    length: Any
    first_visible: Any
    """First position inside the window."""
    first_tile: Any
    """Tile `i` holds positions from `i * tile_tokens`."""
    num_tiles: Any


class Softmax(NamedTuple):
    """A softmax in progress, in registers; as `SoftmaxState`, in base 2."""

    weighted: Any
    peak: Any
    total: Any


class Ahead(NamedTuple):
    """What was loaded one step before it is used."""

    fetched: tuple[Any, ...]
    """Block ids of the next tile whose copies start; none where they are loaded with it."""
    k_scales: tuple[Any, ...]
    """Scales of this tile's blocks; quantised pools only."""
    v_scales: tuple[Any, ...]


@dataclass(frozen=True)
class Kernel:
    """The program of one thread block: everything static about it, and its steps as methods.

    `m` holds the references to global and shared memory, by name.
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
    def pieces(self) -> int:
        """Bulk copies of one tile."""
        return max(1, self.config.tile_tokens // self.block_size)

    @property
    def piece_tokens(self) -> int:
        """Tokens that one bulk copy brings."""
        return min(self.config.tile_tokens, self.block_size)

    @property
    def loads_ids_ahead(self) -> bool:
        """Whether registers are left for the ids of the tile after the newest."""
        return self.head_dim < 256

    def column_chunks(self) -> list[Any]:
        """Columns of a tile that are in registers at once, where threads change it."""
        return [pl.ds(first, CHUNK) for first in range(0, self.head_dim, CHUNK)]

    def scratch(self, dtype: Any, pool_dtype: Any) -> dict[str, Any]:
        """Shared memory of one thread block, by name; `dtype` is that of the queries."""
        tile = (self.config.tile_tokens, self.head_dim)
        ring = plgpu.SMEM(
            (self.config.stages, *tile), pool_dtype, transforms=mosaic.tiles(pool_dtype)
        )
        full = plgpu.Barrier(num_arrivals=self.pieces, num_barriers=self.config.stages)
        # One after the other in one place: the queries as they lie in global memory, which the
        # output replaces; a part of the output; the queries as WGMMA takes them.
        staged = (
            plgpu.SMEM((ROWS, self.head_dim), dtype),
            plgpu.SMEM((ROWS, CHUNK), jnp.float32),
            plgpu.SMEM((ROWS, self.head_dim), dtype, transforms=mosaic.tiles(dtype)),
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
            # Weights and values are bfloat16 whatever the queries are: a weight times a scale may
            # be too small for float16.
            for name, wide in (("k_wide", dtype), ("v_wide", jnp.bfloat16)):
                scratch[name] = plgpu.SMEM(tile, wide, transforms=mosaic.tiles(wide))
        return scratch

    def body(self, names: tuple[str, ...], *references: Any) -> None:
        """Attend, and store what came out."""
        m = SimpleNamespace(**dict(zip(names, references, strict=True)))
        stages = self.config.stages
        span = self.find_span(m)
        queries, part, q_tile = m.staged
        plgpu.copy_gmem_to_smem(
            m.q.at[span.row, span.head], queries.at[pl.ds(0, self.group)], m.q_full
        )
        ids = [self.load_ids(m, span, i) for i in range(stages)]
        for i in range(stages - 1):
            pl.when(i < span.num_tiles)(partial(self.fetch, m, span, i, ids[i]))
        plgpu.barrier_wait(m.q_full)
        # Rows past the group are whatever was in memory. They meet no other row, nor the output.
        rows = self.cast(queries[...], plgpu.Layout.WGMMA)
        plgpu.commit_smem()  # all warps have read the queries, in whose place the tile lies
        q_tile[...] = rows  # for WGMMA once the first step has called `commit_smem`
        state = Softmax(
            self.cast(jnp.zeros((ROWS, self.head_dim), jnp.float32), plgpu.Layout.WGMMA),
            self.cast(jnp.full((ROWS,), LOWEST, jnp.float32), plgpu.Layout.WGMMA.reduce(1)),
            self.cast(jnp.zeros((ROWS,), jnp.float32), plgpu.Layout.WGMMA.reduce(1)),
        )
        fetched = ids[-1] if self.loads_ids_ahead else ()
        ahead = Ahead(fetched, *self.load_scales(m, span, ids[0]))

        def step(i: Any, carry: tuple[Softmax, Ahead]) -> tuple[Softmax, Ahead]:
            return self.step(m, span, i, *carry)

        state, _ = lax.fori_loop(0, span.num_tiles, step, (state, ahead))
        self.store(m, span, part, queries, state)

    def cast(self, value: Any, layout: Any) -> Any:
        """`value` in a register layout."""
        return mosaic.layout_cast(value, layout, self.interpret)

    def iota(self, shape: tuple[int, ...], dimension: int, layout: Any) -> Any:
        """Indices along a dimension, in a register layout."""
        return mosaic.iota(shape, dimension, layout, self.interpret)

    def find_span(self, m: Any) -> Span:
        """Divide the row's visible tiles among its splits, the last ones getting what is left."""
        tile, splits = self.config.tile_tokens, self.config.splits
        row, head, split = (lax.axis_index(name) for name in ("row", "head", "split"))
        length = m.lengths[row]
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
        return Span(row, head, split, fits, length, first_visible, first, num_tiles)

    def load_ids(self, m: Any, span: Span, i: Any) -> tuple[Any, ...]:
        """Block ids of the span's tile `i`.

        A piece without a visible token gets the id of the nearest block with one: what a row's
        table holds elsewhere is not looked at. Ids are moved into the pool.
        """
        size = jnp.int32(self.block_size)
        first = lax.div(span.first_visible, size)
        last = lax.div(jnp.maximum(span.length - 1, 0), size)
        start = (span.first_tile + i) * self.config.tile_tokens
        ids = []
        for piece in range(self.pieces):
            column = jnp.clip(lax.div(start + piece * self.piece_tokens, size), first, last)
            ids.append(jnp.clip(m.table[span.row, column], 0, self.num_blocks - 1))
        return tuple(ids)

    def load_scales(self, m: Any, span: Span, ids: tuple[Any, ...]) -> tuple[Any, Any]:
        """Scales of the keys and of the values of a tile's blocks, if the pools are quantised."""
        if not self.quantised:
            return (), ()
        k_scales, v_scales = (
            tuple(scales[block, span.head] for block in ids) for scales in (m.k_scales, m.v_scales)
        )
        return k_scales, v_scales

    def fetch(self, m: Any, span: Span, i: Any, ids: tuple[Any, ...]) -> None:
        """Start the copies of the span's tile `i` into its slot."""
        slot = lax.rem(jnp.int32(i), jnp.int32(self.config.stages))
        offset: Any = 0
        if self.pieces == 1:
            start = (span.first_tile + i) * self.config.tile_tokens
            offset = pl.multiple_of(lax.rem(start, jnp.int32(self.block_size)), self.piece_tokens)
        for pool, ring, full in ((m.k, m.k_ring, m.k_full), (m.v, m.v_ring, m.v_full)):
            for piece, block in enumerate(ids):
                source = pool.at[block, span.head, pl.ds(offset, self.piece_tokens)]
                place = pl.ds(piece * self.piece_tokens, self.piece_tokens)
                plgpu.copy_gmem_to_smem(source, ring.at[slot, place], full.at[slot])

    def step(
        self, m: Any, span: Span, i: Any, state: Softmax, ahead: Ahead
    ) -> tuple[Softmax, Ahead]:
        """Attend to the span's tile `i`."""
        tile_tokens, stages = self.config.tile_tokens, self.config.stages
        slot = lax.rem(i, jnp.int32(stages))
        plgpu.commit_smem()  # all warps are done with tile i - 1: its slot may be filled
        newest = i + (stages - 1)
        ids = ahead.fetched if self.loads_ids_ahead else self.load_ids(m, span, newest)
        pl.when(newest < span.num_tiles)(partial(self.fetch, m, span, newest, ids))
        fetched = self.load_ids(m, span, newest + 1) if self.loads_ids_ahead else ()
        start = (span.first_tile + i) * tile_tokens
        edge = (start < span.first_visible) | (start + tile_tokens > span.length)

        plgpu.barrier_wait(m.k_full.at[slot])
        k = self.widen(m.k_ring.at[slot], m, "k_wide")
        logits = mosaic.dot(m.staged[2], k, (ROWS, tile_tokens), self.interpret)
        logits = self.scale(logits, ahead.k_scales)
        logits = lax.cond(edge, partial(self.mask, span, start), lambda x: x, logits)
        peak = jnp.maximum(state.peak, logits.max(axis=1))
        weights = jnp.exp2(logits - lax.broadcast_in_dim(peak, logits.shape, [0]))
        factor = jnp.exp2(state.peak - peak)
        total = state.total * factor + weights.sum(axis=1)
        weighted = state.weighted * lax.broadcast_in_dim(factor, state.weighted.shape, [0])
        if self.quantised:
            weights = weights * self.of_columns(ahead.v_scales)

        plgpu.barrier_wait(m.v_full.at[slot])
        v = self.widen(m.v_ring.at[slot], m, "v_wide")
        pl.when(edge)(partial(self.clear, span, start, v))
        weighted = mosaic.dot_add(weighted, weights.astype(v.dtype), v, self.interpret)
        # Last, so that few registers are taken. The ids are in the nearest cache by now.
        scales = self.load_scales(m, span, self.load_ids(m, span, i + 1) if self.quantised else ())
        return Softmax(weighted, peak, total), Ahead(fetched, *scales)

    def widen(self, tile: Any, m: Any, name: str) -> Any:
        """The tile as WGMMA takes it: itself, or the numbers of a quantised one in 16 bits, exact.

        Scales are applied to logits and weights instead, in float32.
        """
        if not self.quantised:
            return tile
        wide = getattr(m, name)
        for columns in self.column_chunks():
            numbers = self.cast(tile[:, columns], plgpu.Layout.WGMMA_UPCAST_4X)
            if numbers.dtype != jnp.int8 and wide.dtype == jnp.bfloat16:
                numbers = numbers.astype(jnp.float16).astype(jnp.float32)  # no direct instruction
            wide[:, columns] = numbers.astype(wide.dtype)
        plgpu.commit_smem()
        return wide

    def scale(self, logits: Any, k_scales: tuple[Any, ...]) -> Any:
        """Products of queries and keys as logits of base 2."""
        cap = self.options.soft_cap
        factor: Any = self.options.sm_scale * LOG2E * (1 if cap is None else 2 / cap)
        if self.quantised:
            factor = self.of_columns(tuple(scale * factor for scale in k_scales))
        logits = logits * factor
        if cap is None:
            return logits
        # tanh(x) = 1 - 2 / (1 + exp(2 x)): the GPU's own tanh has an error of 2**-11.
        return cap * LOG2E - (2 * cap * LOG2E) / (1 + jnp.exp2(logits))

    def of_columns(self, of_pieces: tuple[Any, ...]) -> Any:
        """Spread one scalar for each piece over the columns of `[ROWS, tile_tokens]`."""
        if len(of_pieces) == 1:
            return of_pieces[0]
        layout = plgpu.Layout.WGMMA.reduce(0)
        tile_tokens = self.config.tile_tokens
        column = self.iota((tile_tokens,), 0, layout)
        spread = self.cast(lax.broadcast(of_pieces[0], (tile_tokens,)), layout)
        for piece, value in enumerate(of_pieces[1:], start=1):
            spread = jnp.where(column >= piece * self.piece_tokens, value, spread)
        return lax.broadcast_in_dim(spread, (ROWS, tile_tokens), [1])

    def visible(self, span: Span, position: Any) -> Any:
        """Whether the span's row sees these positions."""
        visible = position < span.length
        if self.options.window is not None:
            visible &= position >= span.first_visible
        return visible

    def mask(self, span: Span, start: Any, logits: Any) -> Any:
        """Logits without those of tokens outside the span's row."""
        position = start + self.iota(logits.shape, 1, plgpu.Layout.WGMMA)
        return jnp.where(self.visible(span, position), logits, LOWEST)

    def clear(self, span: Span, start: Any, v: Any) -> None:
        """Zero the values of tokens outside the span's row: 0 * NaN is NaN."""
        shape = (self.config.tile_tokens, CHUNK)
        visible = self.visible(span, start + self.iota(shape, 0, plgpu.Layout.WGMMA))
        for columns in self.column_chunks():
            values = self.cast(v[:, columns], plgpu.Layout.WGMMA)
            v[:, columns] = jnp.where(visible, values, jnp.zeros_like(values))
        plgpu.commit_smem()

    def store(self, m: Any, span: Span, part: Any, out: Any, state: Softmax) -> None:
        """Store the output and log-sum-exp of the span, final ones if nobody shares its row."""
        empty = state.total == 0  # not `> 0`: NaN in, NaN out
        peak, total, factor = state.peak, state.total, jnp.float32(1)
        if self.has_sinks:
            layout = plgpu.Layout.WGMMA.reduce(1)
            sink = mosaic.load(m.sinks, span.head, layout, self.interpret) * LOG2E
            peak = jnp.maximum(peak, sink)
            factor = jnp.exp2(state.peak - peak)
            total = total * factor + jnp.exp2(sink - peak)
        factor = jnp.where(empty, 0.0, factor / jnp.where(empty, 1.0, total))
        poison = jnp.where(span.fits, 0.0, jnp.nan)
        factor = factor + poison
        weighted = state.weighted * lax.broadcast_in_dim(factor, state.weighted.shape, [0])
        plgpu.commit_smem()  # all warps are done with the queries, which the output replaces
        if self.stores_lse:
            lse = jnp.where(empty, -jnp.inf, peak / LOG2E + jnp.log(jnp.where(empty, 1.0, total)))
            m.lse[span.row, span.head, span.split] = lse + poison
        real = pl.ds(0, self.group)
        target = m.out.at[span.row, span.head, span.split]
        if self.config.splits == 1:
            for first in range(0, self.head_dim, CHUNK):  # a copy in 16 bits would not fit beside
                columns = slice(first, first + CHUNK)
                out[:, columns] = weighted[:, columns].astype(out.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(out.at[real], target)
        else:
            for first in range(0, self.head_dim, CHUNK):
                part[...] = weighted[:, first : first + CHUNK]
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(part.at[real], target.at[:, pl.ds(first, CHUNK)])
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
    """`paged_decode` without its checks; the second result is None unless `return_lse`."""
    batch, q_heads, head_dim = q.shape
    num_blocks, kv_heads, block_size, _ = k_blocks.shape
    group = q_heads // kv_heads
    final = config.splits == 1
    queries = q.reshape(batch, kv_heads, group, head_dim)
    # With a head_dim of 256 and other groups, Mosaic's search for layouts does not come to an end.
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
        # With a head_dim of 256 ptxas finds no registers for the output of a kernel without it.
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
    """Launch a thread block for each (row, KV head, split)."""
    q, splits = inputs["q"], kernel.config.splits
    batch, kv_heads, group, head_dim = q.shape
    shaped = cast(Any, jax.ShapeDtypeStruct)  # has no types in some versions
    kept = (batch, kv_heads, splits, group, head_dim)
    outputs = {"out": shaped(kept, q.dtype if splits == 1 else jnp.float32)}
    if kernel.stores_lse:
        # 256 bytes for each: not worth leaving the padding out.
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
        unsafe_no_auto_barriers=True,  # `commit_smem` stands where one is needed
    )

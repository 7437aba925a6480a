"""The Mosaic GPU backend of latent attention, for Hopper: FlashMLA's tiles, in two warpgroups.

A thread block attends for one (query token, 64 query heads, split of the token's KV). All heads
share the latents, so the heads are the rows of the WGMMA tiles, and a tile of latents in shared
memory is both keys and values::

                       one pipeline stage: 64 latents, made of TMA boxes
                      .---------------------------------------------------.
                      | values: 512 columns                      | rotary |
     .-------------.  |                                          | 64     |
     | 64 heads    |  |------------------------------------------'--------|
     | of queries, |  |  logits = q @ latents.T       64 x 64             |   warpgroup 0
     | 576 columns |  |  masked; online softmax in base 2                 |
     '-------------'  |  weighted += weights @ values[:, :256]            |
                      |  weighted += weights @ values[:, 256:]            |   warpgroup 1
                      '---------------------------------------------------'

The output takes 64 x 512 float32, too much for the registers of one warpgroup, so each has half of
the columns. Warpgroup 0 computes the logits and the softmax and leaves the weights in shared
memory; warpgroup 1 also issues the copies. They wait for the barriers before a colon and arrive at
those after an arrow::

    warpgroup 0   full[i]: logits, softmax -> weights_full         first half  -> empty[i]
    warpgroup 1   weights_full: read them -> weights_empty         second half -> empty[i]
                  empty[i]: copy tile i + 2 into the stage of tile i

Shared memory: 72 KiB of queries, two stages of 72 KiB, 8 KiB of weights. The output is staged where
the queries were.

Of a causal chunk of queries, each token is a row with its own length: with 64 query heads or more
its tiles are full, and the rows of neighbouring tokens find the latents in the L2 cache.

Tokens past the length have no effect: their logits are masked, and their latents, which may be NaN,
are zeroed in shared memory. Splits store float32 parts, which XLA merges.

Source: FlashMLA (github.com/deepseek-ai/FlashMLA), first version: tiles, halves of the output.
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
from .config import (
    COLUMNS,
    HALF,
    LATENT_DIM,
    ROWS,
    STAGES,
    TILE_TOKENS,
    VALUE_DIM,
    LatentConfig,
)

LOWEST = -1e30  # instead of -inf: the difference of two is 0, not NaN
LOG2E = math.log2(math.e)
MATRIX = plgpu.Layout.WGMMA
ROW_VECTOR = plgpu.Layout.WGMMA.reduce(1)


class WorkTile(NamedTuple):
    """The work of one thread block: a range of KV tiles of one query token."""

    token: Any
    heads: Any
    """Index of the 64 query heads."""
    split: Any
    row: Any
    """Row of the block table."""
    fits: Any
    """Whether the row fits its block table; otherwise there is no work and the result is NaN."""
    length: Any
    first_tile: Any
    num_tiles: Any


class SoftmaxState(NamedTuple):
    """A softmax in progress, in registers of warpgroup 0, in base 2."""

    weighted: Any
    """[ROWS, HALF]"""
    peak: Any
    total: Any


@dataclass(frozen=True)
class Kernel:
    """The program of one thread block: static parameters as fields, its steps as methods."""

    config: LatentConfig
    sm_scale: float
    block_size: int
    num_blocks: int
    width: int
    dtype: Any
    interpret: Interpret

    @property
    def boxes(self) -> int:
        """TMA boxes of a tile."""
        return max(1, TILE_TOKENS // self.block_size)

    @property
    def box_tokens(self) -> int:
        """Tokens of a TMA box."""
        return min(TILE_TOKENS, self.block_size)

    def scratch(self) -> dict[str, Any]:
        """Shared memory and barriers by name."""
        transforms = mosaic.tiles(self.dtype, LATENT_DIM)
        tiled = partial(plgpu.SMEM, dtype=self.dtype, transforms=transforms)
        # These share one place, because their lifetimes do not overlap: the queries; later the
        # output, or a part of a split's output.
        staged = (
            tiled((1, ROWS, LATENT_DIM)),
            plgpu.SMEM((2, ROWS, HALF), self.dtype),
            plgpu.SMEM((2, ROWS, COLUMNS), jnp.float32),
        )
        return {
            "staged": staged if self.interpret is not None else plgpu.RefUnion(*staged),
            "ring": tiled((STAGES, TILE_TOKENS, LATENT_DIM)),
            "weights": tiled((ROWS, TILE_TOKENS)),
            "factor": plgpu.SMEM((1, ROWS), jnp.float32),
            "q_full": plgpu.Barrier(),
            "full": plgpu.Barrier(num_arrivals=self.boxes, num_barriers=STAGES),
            "empty": plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
            "weights_full": plgpu.Barrier(),
            "weights_empty": plgpu.Barrier(),
        }

    def body(self, names: tuple[str, ...], *references: Any) -> None:
        """Attend for one work tile and store the result."""
        refs = SimpleNamespace(**dict(zip(names, references, strict=True)))
        work = self.work_tile(refs)
        warpgroup = lax.axis_index("warpgroup")
        pl.when(warpgroup == 0)(partial(self.lead, refs, work))
        pl.when(warpgroup == 1)(partial(self.follow, refs, work))

    def cast(self, value: Any, layout: Any) -> Any:
        """`value` in a register layout."""
        return mosaic.layout_cast(value, layout, self.interpret)

    def work_tile(self, refs: Any) -> WorkTile:
        """Divide the token's KV tiles evenly among its splits; the last may get fewer."""
        token, split, heads = (lax.axis_index(name) for name in ("token", "split", "heads"))
        length = refs.lengths[token]
        fits = length <= self.width * self.block_size
        length = jnp.where(fits, jnp.maximum(length, 0), 0)
        end = lax.div(length + (TILE_TOKENS - 1), jnp.int32(TILE_TOKENS))
        splits = jnp.int32(self.config.splits)
        share = lax.div(end + (splits - 1), splits)
        first = split * share
        num_tiles = jnp.clip(end - first, 0, share)
        return WorkTile(token, heads, split, refs.rows[token], fits, length, first, num_tiles)

    def stage(self, i: Any) -> Any:
        """Pipeline stage of the work's tile `i`."""
        return lax.rem(jnp.int32(i), jnp.int32(STAGES))

    def copy(self, refs: Any, work: WorkTile, i: Any) -> None:
        """Start the copies of the work's tile `i` into its pipeline stage.

        A box past the length gets the row's last block; other table entries are not read.
        """
        size, stage = jnp.int32(self.block_size), self.stage(i)
        start = (work.first_tile + i) * TILE_TOKENS
        last = lax.div(work.length - 1, size)
        offset: Any = 0
        if self.boxes == 1:
            offset = pl.multiple_of(lax.rem(start, size), self.box_tokens)
        for box in range(self.boxes):
            column = jnp.minimum(lax.div(start + box * self.box_tokens, size), last)
            block = jnp.clip(refs.table[work.row, column], 0, self.num_blocks - 1)
            source = refs.latents.at[block, 0, pl.ds(offset, self.box_tokens)]
            place = pl.ds(box * self.box_tokens, self.box_tokens)
            plgpu.copy_gmem_to_smem(source, refs.ring.at[stage, place], refs.full.at[stage])

    def lead(self, refs: Any, work: WorkTile) -> None:
        """Warpgroup 0: logits, softmax, and the first half of the output."""
        queries = refs.staged[0].at[0]
        heads = pl.ds(pl.multiple_of(work.heads * ROWS, ROWS), ROWS)
        plgpu.copy_gmem_to_smem(refs.q.at[work.token, heads], queries, refs.q_full)
        plgpu.barrier_wait(refs.q_full)
        state = SoftmaxState(
            self.cast(jnp.zeros((ROWS, HALF), jnp.float32), MATRIX),
            self.cast(jnp.full((ROWS,), LOWEST, jnp.float32), ROW_VECTOR),
            self.cast(jnp.zeros((ROWS,), jnp.float32), ROW_VECTOR),
        )
        state = lax.fori_loop(0, work.num_tiles, partial(self.lead_step, refs, work), state)
        empty = state.total == 0  # not `> 0`: NaN in, NaN out
        poison = jnp.where(work.fits, 0.0, jnp.nan)
        total = jnp.where(empty, 1.0, state.total)
        factor = jnp.where(empty, 0.0, 1.0 / total) + poison
        refs.factor[0] = factor
        plgpu.barrier_arrive(refs.weights_full)
        lse = jnp.where(empty, -jnp.inf, state.peak / LOG2E + jnp.log(total)) + poison
        refs.lse[work.token, work.split, work.heads] = lse
        self.store(refs, work, 0, state.weighted, factor)

    def lead_step(self, refs: Any, work: WorkTile, i: Any, state: SoftmaxState) -> SoftmaxState:
        """Attend to the work's tile `i`."""
        stage = self.stage(i)
        visible = work.length - (work.first_tile + i) * TILE_TOKENS
        edge = visible < TILE_TOKENS
        plgpu.barrier_wait(refs.full.at[stage])
        pl.when(edge)(partial(self.zero, refs.ring.at[stage], visible))
        shape = (ROWS, TILE_TOKENS)
        # The index is 0, which the compiler cannot know. With a constant it would keep the
        # addresses of all parts of the queries in registers through the loop, and spill.
        queries = refs.staged[0].at[jnp.minimum(work.row + i, 0)]
        logits = mosaic.dot(queries, refs.ring.at[stage], shape, self.interpret)
        logits = logits * (self.sm_scale * LOG2E)
        logits = lax.cond(edge, partial(self.mask, visible), lambda x: x, logits)
        peak = jnp.maximum(state.peak, logits.max(axis=1))
        weights = jnp.exp2(logits - lax.broadcast_in_dim(peak, shape, [0]))
        factor = jnp.exp2(state.peak - peak)
        total = state.total * factor + weights.sum(axis=1)
        narrow = weights.astype(self.dtype)
        refs.weights[...] = narrow
        refs.factor[0] = factor
        plgpu.barrier_arrive(refs.weights_full)
        weighted = self.add(refs, stage, 0, state.weighted, narrow, factor)
        plgpu.barrier_wait(refs.weights_empty)
        return SoftmaxState(weighted, peak, total)

    def follow(self, refs: Any, work: WorkTile) -> None:
        """Warpgroup 1: the copies, and the second half of the output."""
        for i in range(STAGES):
            pl.when(i < work.num_tiles)(partial(self.copy, refs, work, i))
        weighted = self.cast(jnp.zeros((ROWS, HALF), jnp.float32), MATRIX)
        step = partial(self.follow_step, refs, work)
        weighted = lax.fori_loop(0, work.num_tiles, step, weighted)
        plgpu.barrier_wait(refs.weights_full)
        factor = mosaic.load(refs.factor, 0, ROW_VECTOR, self.interpret)
        self.store(refs, work, 1, weighted, factor)

    def follow_step(self, refs: Any, work: WorkTile, i: Any, weighted: Any) -> Any:
        """Attend to the work's tile `i`, then replace it by tile `i + STAGES`."""
        stage = self.stage(i)
        plgpu.barrier_wait(refs.full.at[stage])
        plgpu.barrier_wait(refs.weights_full)
        factor = mosaic.load(refs.factor, 0, ROW_VECTOR, self.interpret)
        narrow = self.cast(refs.weights[...], MATRIX)
        plgpu.barrier_arrive(refs.weights_empty)
        weighted = self.add(refs, stage, 1, weighted, narrow, factor)
        plgpu.barrier_wait(refs.empty.at[stage])
        pl.when(i + STAGES < work.num_tiles)(partial(self.copy, refs, work, i + STAGES))
        return weighted

    def add(
        self, refs: Any, stage: Any, half: int, weighted: Any, weights: Any, factor: Any
    ) -> Any:
        """`weighted * factor + weights @ values`, of one half of the columns."""
        weighted = weighted * lax.broadcast_in_dim(factor, weighted.shape, [0])
        values = refs.ring.at[stage, :, pl.ds(half * HALF, HALF)]
        weighted = mosaic.dot_add(weighted, weights, values, self.interpret)
        if self.interpret is not None:
            plgpu.commit_smem()  # see `dot_add`
        plgpu.barrier_arrive(refs.empty.at[stage])
        return weighted

    def mask(self, visible: Any, logits: Any) -> Any:
        """Mask the logits past the first `visible` tokens of a tile."""
        token = mosaic.iota(logits.shape, 1, MATRIX, self.interpret)
        return jnp.where(token < visible, logits, LOWEST)

    def zero(self, tile: Any, visible: Any) -> None:
        """Zero the latents past the first `visible` tokens of a tile, because 0 * NaN is NaN."""
        token = mosaic.iota((TILE_TOKENS, COLUMNS), 0, MATRIX, self.interpret)
        for first in range(0, LATENT_DIM, COLUMNS):
            part = tile.at[:, pl.ds(first, COLUMNS)]
            values = self.cast(part[...], MATRIX)
            part[...] = jnp.where(token < visible, values, jnp.zeros_like(values))
        plgpu.commit_smem()

    def store(self, refs: Any, work: WorkTile, half: int, weighted: Any, factor: Any) -> None:
        """Store one half of the output's columns: the final ones, or those of a split."""
        _, out, part = refs.staged
        weighted = weighted * lax.broadcast_in_dim(factor, weighted.shape, [0])
        heads = pl.ds(pl.multiple_of(work.heads * ROWS, ROWS), ROWS)
        target = refs.out.at[work.token, work.split, heads]
        if self.config.splits == 1:
            for first in range(0, HALF, COLUMNS):  # all at once takes too many registers
                columns = slice(first, first + COLUMNS)
                out[half, :, columns] = weighted[:, columns].astype(out.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(out.at[half], target.at[:, pl.ds(half * HALF, HALF)])
        else:
            for first in range(0, HALF, COLUMNS):
                part[half] = weighted[:, first : first + COLUMNS]
                plgpu.commit_smem()
                columns = pl.ds(half * HALF + first, COLUMNS)
                plgpu.copy_smem_to_gmem(part.at[half], target.at[:, columns])
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # `part` may be overwritten
        plgpu.wait_smem_to_gmem(0)


def decode(
    q: Float[Array, "batch q_heads latent_dim"],
    latents: Float[Array, "blocks 1 block_size latent_dim"],
    block_tables: Int32[Array, "batch width"],
    lengths: Int32[Array, " batch"],
    **static: Any,
) -> tuple[Float[Array, "batch q_heads value_dim"], Float[Array, "batch q_heads"]]:
    """`latent_decode` without its checks; `static` as of `attend`."""
    rows = jnp.arange(q.shape[0], dtype=jnp.int32)
    attended: tuple[Array, Array] = attend(q, latents, block_tables, rows, lengths, **static)
    return attended


def extend(
    q: Float[Array, "tokens q_heads latent_dim"],
    latents: Float[Array, "blocks 1 block_size latent_dim"],
    block_tables: Int32[Array, "batch width"],
    kv_lengths: Int32[Array, " batch"],
    q_lengths: Int32[Array, " batch"],
    q_starts: Int32[Array, " batch"],
    **static: Any,
) -> tuple[Float[Array, "tokens q_heads value_dim"], Float[Array, "tokens q_heads"]]:
    """`latent_extend` without its checks; `static` as of `attend`."""
    token = jnp.arange(q.shape[0], dtype=jnp.int32)
    offset = token[:, None] - q_starts
    inside = (offset >= 0) & (offset < q_lengths)
    rows = jnp.argmax(inside, axis=1).astype(jnp.int32)
    lengths = (kv_lengths - q_lengths)[rows] + offset[token, rows] + 1
    # A row that does not fit its table is NaN as a whole.
    fits = kv_lengths <= block_tables.shape[1] * latents.shape[2]
    lengths = jnp.where(fits[rows], lengths, jnp.iinfo(jnp.int32).max)  # type: ignore[no-untyped-call]
    lengths = jnp.where(inside.any(axis=1), lengths, 0)
    attended: tuple[Array, Array] = attend(q, latents, block_tables, rows, lengths, **static)
    return attended


@partial(jax.jit, static_argnames=("sm_scale", "config", "interpret"))
def attend(
    q: Float[Array, "tokens q_heads latent_dim"],
    latents: Float[Array, "blocks 1 block_size latent_dim"],
    block_tables: Int32[Array, "batch width"],
    rows: Int32[Array, " tokens"],
    lengths: Int32[Array, " tokens"],
    *,
    sm_scale: float,
    config: LatentConfig,
    interpret: Interpret = None,
) -> tuple[Float[Array, "tokens q_heads value_dim"], Float[Array, "tokens q_heads"]]:
    """Attention of each query token over the first `lengths` tokens of a row of the block table."""
    num_tokens, q_heads, _ = q.shape
    num_blocks, _, block_size, _ = latents.shape
    q = jnp.pad(q, ((0, 0), (0, -q_heads % ROWS), (0, 0)))
    kernel = Kernel(
        config=config,
        sm_scale=sm_scale,
        block_size=block_size,
        num_blocks=num_blocks,
        width=block_tables.shape[1],
        dtype=q.dtype,
        interpret=interpret,
    )
    inputs = {
        "q": q, "latents": latents, "table": block_tables, "rows": rows, "lengths": lengths
    }  # fmt: skip
    shaped = cast(Any, jax.ShapeDtypeStruct)  # has no types in some versions
    splits, tiles = config.splits, q.shape[1] // ROWS
    outputs = {
        "out": shaped(
            (num_tokens, splits, q.shape[1], VALUE_DIM), q.dtype if splits == 1 else jnp.float32
        ),
        "lse": shaped((num_tokens, splits, tiles, ROWS), jnp.float32),
    }
    scratch = kernel.scratch()
    out, lse = mosaic.run(
        partial(kernel.body, (*inputs, *outputs, *scratch)),
        tuple(inputs.values()),
        outputs=tuple(outputs.values()),
        name="latent_attention",
        # The last axis is the fastest: neighbours share a row's latents in the L2 cache.
        grid={"token": num_tokens, "split": splits, "heads": tiles},
        warpgroups=2,
        scratch=tuple(scratch.values()),
        interpret=interpret,
        approx_math=True,
        lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
        reduction_scratch_bytes=0,  # the rows of a WGMMA tile are reduced within a warp
        unsafe_no_auto_barriers=True,  # each warpgroup hands over by barriers
    )
    lse = lse.reshape(num_tokens, splits, -1)
    if splits == 1:
        out, lse = out[:, 0], lse[:, 0]
    else:
        parts = range(splits)
        out, lse = merge_parts([out[:, i] for i in parts], [lse[:, i] for i in parts])
    return out[:, :q_heads].astype(q.dtype), lse[:, :q_heads]

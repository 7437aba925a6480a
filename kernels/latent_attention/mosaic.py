"""The Mosaic GPU backend of latent attention, for Hopper: FlashMLA's tiles, in two warpgroups.

Persistent thread blocks work through equal shares of all KV tiles of the query tokens, as the work
list of `paged_decode` divides them. A work tile is the part of a share that belongs to one token; a
thread block attends for 64 query heads, and those of the other heads take the same share at the
same time, so that they find the latents in the L2 cache. All heads share the latents, so the heads
are the rows of the WGMMA tiles, and a tile of latents in shared memory is both keys and values::

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

After the last tile of a work tile, warpgroup 1 starts the copies of the next one before it stores
its half, and warpgroup 0 waits for that store before it loads the next queries into the same place.

Shared memory: 72 KiB of queries, two stages of 72 KiB, 8 KiB of weights. The output is staged where
the queries were.

Of a causal chunk of queries, each token is a row with its own length: with 64 query heads or more
its tiles are full. The tokens of a chunk are dealt to the shares in turn, so that neighbours are
read at about the same time, from the L2 cache.

Tokens past the length have no effect: their logits are masked, and their latents, which may be NaN,
are zeroed in shared memory. The output of a token that lies in one share is stored as it is. Others
store float32 parts, which the second kernel of `paged_decode` merges.

Source: FlashMLA (github.com/deepseek-ai/FlashMLA), first version: tiles, halves of the output.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int32

from .. import mosaic_compat as mosaic
from ..mosaic_compat import Interpret, pl, plgpu, when
from ..paged_decode.merge import merge_parts
from ..paged_decode.work_list import Position, Row, build_work_list
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
    """A range of KV tiles of one query token, which the thread blocks of one share read."""

    token: Any
    heads: Any
    """The 64 query heads of the thread block."""
    part: Any
    """Index of its result among the parts, unless it is whole."""
    whole: Any
    """Whether it has all tiles of the token."""
    row: Any
    """Row of the block table."""
    fits: Any
    """Whether the row fits its block table; otherwise there is no work and the result is NaN."""
    length: Any
    first_tile: Any
    num_tiles: Any
    before: Any
    """Number of tiles of the thread block's earlier work tiles."""


class SoftmaxState(NamedTuple):
    """A softmax in progress, in registers of warpgroup 0, in base 2."""

    weighted: Any
    """[ROWS, HALF]"""
    peak: Any
    total: Any


@dataclass(frozen=True)
class Kernel:
    """The program of one thread block: static parameters as fields, its steps as methods."""

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
        """Attend for all work tiles of the thread block and store their results."""
        refs = SimpleNamespace(**dict(zip(names, references, strict=True)))
        warpgroup = lax.axis_index("warpgroup")
        pl.when(warpgroup == 0)(partial(self.run_share, refs, self.lead, self.finish_lead))
        pl.when(warpgroup == 1)(
            partial(self.run_share, refs, self.follow, self.finish_follow, self.start)
        )

    def run_share(
        self,
        refs: Any,
        attend: Callable[[Any, WorkTile], Any],
        finish: Callable[[Any, WorkTile, Any], None],
        start: Callable[[Any, WorkTile], None] = lambda refs, work: None,
    ) -> None:
        """Attend for the work tiles of the share; the next one starts before each is finished."""
        pair, tile, left = (refs.shares[lax.axis_index("share"), field] for field in range(3))
        first = Position(pair, tile, left, jnp.int32(0))
        pl.when(left > 0)(lambda: start(refs, self.work_tile(refs, first)))

        def step(position: Position) -> Position:
            work = self.work_tile(refs, position)
            state = attend(refs, work)
            following = position.after(work.num_tiles)
            pl.when(following.left > 0)(lambda: start(refs, self.work_tile(refs, following)))
            finish(refs, work, state)
            return following

        lax.while_loop(lambda position: position.left > 0, step, first)

    def cast(self, value: Any, layout: Any) -> Any:
        """`value` in a register layout."""
        return mosaic.layout_cast(value, layout, self.interpret)

    def work_tile(self, refs: Any, position: Position) -> WorkTile:
        """The work tile at a position of the share."""
        pair = position.pair
        capacity = self.width * self.block_size
        row = Row.of(refs.lengths[pair], tile_tokens=TILE_TOKENS, window=None, capacity=capacity)
        return WorkTile(
            token=refs.tokens[pair],
            heads=lax.axis_index("heads"),
            part=refs.parts_of_pairs[pair, 0] - pair + lax.axis_index("share"),
            whole=refs.parts_of_pairs[pair, 1] == 1,
            row=refs.rows[pair],
            fits=row.fits,
            length=row.length,
            first_tile=position.tile,
            num_tiles=jnp.minimum(row.num_tiles - position.tile, position.left),
            before=position.before,
        )

    def stage(self, work: WorkTile, i: Any) -> Any:
        """Pipeline stage of the work's tile `i`."""
        return lax.rem(work.before + i, jnp.int32(STAGES))

    def copy(self, refs: Any, work: WorkTile, i: Any) -> None:
        """Start the copies of the work's tile `i` into its pipeline stage.

        A box past the length gets the row's last block; other table entries are not read.
        """
        size, stage = jnp.int32(self.block_size), self.stage(work, i)
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

    def start(self, refs: Any, work: WorkTile) -> None:
        """Warpgroup 1: start the copies of the first tiles of a work tile."""
        for i in range(STAGES):
            pl.when(i < work.num_tiles)(partial(self.copy, refs, work, i))

    def lead(self, refs: Any, work: WorkTile) -> SoftmaxState:
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
        return SoftmaxState(*state)

    def finish_lead(self, refs: Any, work: WorkTile, state: SoftmaxState) -> None:
        """Store the first half of the output, and the log-sum-exp: of parts in base 2."""
        empty = state.total == 0  # not `> 0`: NaN in, NaN out
        poison = jnp.where(work.fits, 0.0, jnp.nan)
        total = jnp.where(empty, 1.0, state.total)
        factor = jnp.where(empty, 0.0, 1.0 / total) + poison
        refs.factor[0] = factor
        plgpu.barrier_arrive(refs.weights_full)
        lse = jnp.where(empty, -jnp.inf, state.peak + jnp.log2(total)) + poison

        @when(work.whole)
        def store_final() -> None:
            refs.lse[work.token, work.heads] = lse / LOG2E

        @when(~work.whole)
        def store_part() -> None:
            refs.lses[work.part, work.heads] = lse

        self.store(refs, work, 0, state.weighted, factor)
        plgpu.barrier_wait(refs.weights_empty)  # also: the other half is stored

    def lead_step(self, refs: Any, work: WorkTile, i: Any, state: SoftmaxState) -> SoftmaxState:
        """Attend to the work's tile `i`."""
        stage = self.stage(work, i)
        visible = work.length - (work.first_tile + i) * TILE_TOKENS
        edge = visible < TILE_TOKENS
        plgpu.barrier_wait(refs.full.at[stage])
        pl.when(edge)(partial(self.zero, refs.ring.at[stage], visible))
        shape = (ROWS, TILE_TOKENS)
        # The index is 0, which the compiler cannot know. With a constant it would keep the
        # addresses of all parts of the queries in registers through the loop, and spill.
        queries = refs.staged[0].at[jnp.minimum(work.row + i, 0)]
        logits = mosaic.dot([queries], refs.ring.at[stage], shape, self.interpret)
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

    def follow(self, refs: Any, work: WorkTile) -> Any:
        """Warpgroup 1: the copies, and the second half of the output."""
        weighted = self.cast(jnp.zeros((ROWS, HALF), jnp.float32), MATRIX)
        return lax.fori_loop(0, work.num_tiles, partial(self.follow_step, refs, work), weighted)

    def finish_follow(self, refs: Any, work: WorkTile, weighted: Any) -> None:
        """Store the second half of the output."""
        plgpu.barrier_wait(refs.weights_full)
        factor = mosaic.load(refs.factor, 0, ROW_VECTOR, self.interpret)
        self.store(refs, work, 1, weighted, factor)
        plgpu.barrier_arrive(refs.weights_empty)

    def follow_step(self, refs: Any, work: WorkTile, i: Any, weighted: Any) -> Any:
        """Attend to the work's tile `i`, then replace it by tile `i + STAGES`."""
        stage = self.stage(work, i)
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
        mosaic.release(refs.empty.at[stage], self.interpret)
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
        """Store one half of the output's columns: the final ones, or those of a part."""
        _, out, part = refs.staged
        weighted = weighted * lax.broadcast_in_dim(factor, weighted.shape, [0])
        heads = pl.ds(pl.multiple_of(work.heads * ROWS, ROWS), ROWS)

        @when(work.whole)
        def store_final() -> None:
            for first in range(0, HALF, COLUMNS):  # all at once takes too many registers
                columns = slice(first, first + COLUMNS)
                out[half, :, columns] = weighted[:, columns].astype(out.dtype)
            plgpu.commit_smem()
            target = refs.out.at[work.token, heads, pl.ds(half * HALF, HALF)]
            plgpu.copy_smem_to_gmem(out.at[half], target)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the next queries may overwrite it

        @when(~work.whole)
        def store_part() -> None:
            for first in range(0, HALF, COLUMNS):
                part[half] = weighted[:, first : first + COLUMNS]
                plgpu.commit_smem()
                target = refs.parts.at[work.part, heads, pl.ds(half * HALF + first, COLUMNS)]
                plgpu.copy_smem_to_gmem(part.at[half], target)
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # so may the next columns


def decode(
    q: Float[Array, "batch q_heads latent_dim"],
    latents: Float[Array, "blocks 1 block_size latent_dim"],
    block_tables: Int32[Array, "batch width"],
    lengths: Int32[Array, " batch"],
    **static: Any,
) -> tuple[Float[Array, "batch q_heads value_dim"], Float[Array, "batch q_heads"] | None]:
    """`latent_decode` without its checks; `static` as of `attend`."""
    rows = jnp.arange(q.shape[0], dtype=jnp.int32)
    attended: tuple[Array, Array | None] = attend(q, latents, block_tables, rows, lengths, **static)
    return attended


def extend(
    q: Float[Array, "tokens q_heads latent_dim"],
    latents: Float[Array, "blocks 1 block_size latent_dim"],
    block_tables: Int32[Array, "batch width"],
    kv_lengths: Int32[Array, " batch"],
    q_lengths: Int32[Array, " batch"],
    q_starts: Int32[Array, " batch"],
    **static: Any,
) -> tuple[Float[Array, "tokens q_heads value_dim"], Float[Array, "tokens q_heads"] | None]:
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
    attended: tuple[Array, Array | None] = attend(q, latents, block_tables, rows, lengths, **static)
    return attended


@partial(jax.jit, static_argnames=("sm_scale", "config", "return_lse", "interpret"))
def attend(
    q: Float[Array, "tokens q_heads latent_dim"],
    latents: Float[Array, "blocks 1 block_size latent_dim"],
    block_tables: Int32[Array, "batch width"],
    rows: Int32[Array, " tokens"],
    lengths: Int32[Array, " tokens"],
    *,
    sm_scale: float,
    config: LatentConfig,
    return_lse: bool,
    interpret: Interpret = None,
) -> tuple[Float[Array, "tokens q_heads value_dim"], Float[Array, "tokens q_heads"] | None]:
    """Attention of each query token over the first `lengths` tokens of a row of the block table.

    The log-sum-exp is None unless `return_lse`.
    """
    num_tokens, q_heads, _ = q.shape
    num_blocks, _, block_size, _ = latents.shape
    q = jnp.pad(q, ((0, 0), (0, -q_heads % ROWS), (0, 0)))
    # Neighbours among the tokens begin different shares.
    tokens = jnp.asarray(
        np.argsort(np.arange(num_tokens) % config.shares, kind="stable"), jnp.int32
    )
    rows, lengths = rows[tokens], lengths[tokens]
    work = build_work_list(
        lengths,
        kv_heads=1,
        programs=config.shares,
        tile_tokens=TILE_TOKENS,
        window=None,
        capacity=block_tables.shape[1] * block_size,
    )
    kernel = Kernel(
        sm_scale=sm_scale,
        block_size=block_size,
        num_blocks=num_blocks,
        width=block_tables.shape[1],
        dtype=q.dtype,
        interpret=interpret,
    )
    inputs = {"q": q, "latents": latents, "table": block_tables, "tokens": tokens}
    inputs |= {"rows": rows, "lengths": lengths}
    inputs |= {"shares": work.shares, "parts_of_pairs": work.parts}
    shaped = cast(Any, jax.ShapeDtypeStruct)  # has no types in some versions
    num_parts, tiles = 2 * config.shares, q.shape[1] // ROWS
    outputs = {
        "out": shaped((num_tokens, q.shape[1], VALUE_DIM), q.dtype),
        "lse": shaped((num_tokens, tiles, ROWS), jnp.float32),
        "parts": shaped((num_parts, q.shape[1], VALUE_DIM), jnp.float32),
        "lses": shaped((num_parts, tiles, ROWS), jnp.float32),
    }
    scratch = kernel.scratch()
    out, lse, parts, lses = mosaic.run(
        partial(kernel.body, (*inputs, *outputs, *scratch)),
        tuple(inputs.values()),
        outputs=tuple(outputs.values()),
        name="latent_attention",
        # The last axis is the fastest: neighbours share their latents in the L2 cache.
        grid={"share": config.shares, "heads": tiles},
        warpgroups=2,
        scratch=tuple(scratch.values()),
        interpret=interpret,
        approx_math=True,
        lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
        reduction_scratch_bytes=0,  # the rows of a WGMMA tile are reduced within a warp
        unsafe_no_auto_barriers=True,  # each warpgroup hands over by barriers
    )
    split, parts_of_split = work.split_pairs()
    merged, merged_lse = merge_parts(
        parts, lses.reshape(num_parts, -1), parts_of_split, None, q.dtype, return_lse, interpret
    )
    of_split = tokens.at[split].get(mode="fill", fill_value=num_tokens)
    out = out.at[of_split].set(merged.reshape(-1, *out.shape[1:]), mode="drop")
    if merged_lse is None:
        return out[:, :q_heads], None
    lse = lse.reshape(num_tokens, -1).at[of_split].set(merged_lse, mode="drop")
    return out[:, :q_heads], lse[:, :q_heads]

"""References, static parameters and tile scheduling of the Mosaic `paged_extend`."""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from ..mosaic_compat import Interpret, plgpu, tiles
from ..online_softmax import AttentionOptions
from .config import COLUMNS, ROWS, WARPGROUPS, ExtendConfig
from .shares import Share
from .work_list import WorkItem

MATRIX = plgpu.Layout.WGMMA


class KernelRefs(NamedTuple):
    """References to global memory, shared memory and barriers, in the order of the launch."""

    q: Any
    k: Any
    v: Any
    tables: Any
    items: Any
    shares: Any
    k_scales: Any
    v_scales: Any
    """As in `paged_extend` for quantised pools, else None."""
    sinks: Any
    """[head_groups, WARPGROUPS, ROWS] float32, or None."""
    out: Any
    lse: Any
    """[items, head_groups, WARPGROUPS, ROWS] float32, or None."""
    parts: Any
    """[parts, WARPGROUPS, ROWS, head_dim] float32: results of parts of divided work tiles."""
    part_lses: Any
    """[parts, WARPGROUPS, ROWS] float32, in base 2."""
    shared_q: Any
    """[WARPGROUPS, ROWS, head_dim]"""
    shared_k: Any
    shared_v: Any
    """[stages, block_kv, head_dim]"""
    shared_out: Any
    """[WARPGROUPS, ROWS, out_columns], not tiled, so that any range of rows can be copied."""
    shared_lse: Any
    """[WARPGROUPS, ROWS] float32"""
    q_full: Any
    """One barrier per warpgroup; the barriers below have one per pipeline stage."""
    k_full: Any
    v_full: Any
    """One barrier more than stages: the producer waits on the last for tiles that it zeroes."""
    k_empty: Any
    v_empty: Any
    ping_pong: Any
    """Both consumer warpgroups arrive; then one enters the tensor cores and the other leaves."""
    quantised_k: Any = None
    quantised_v: Any = None
    """[block_kv, head_dim]: tiles of quantised pools before the producer dequantises them."""
    quantised_full: Any = None
    """One barrier for K, one for V."""


class WorkTile(NamedTuple):
    """What a thread block computes at a time: a query tile for one group of query heads.

    Or a part of it: the KV steps of `item` are those of the part.
    """

    item_index: Array
    head_group: Array
    item: WorkItem
    whole: Array
    """Whether it has all KV steps of the query tile."""
    part: Array
    """Index of its result among the parts, unless it is whole."""


@dataclass(frozen=True)
class KernelParams:
    """Static parameters of a launch, and the quantities that follow from them."""

    head_groups: int
    """Groups of query heads; each has its own work tiles."""
    group: int
    """Query heads of a group, which share a KV head."""
    groups_per_kv_head: int
    head_dim: int
    block_size: int
    num_blocks: int
    dtype: Any
    pool_dtype: Any
    tile_tokens: int
    has_sinks: bool
    return_lse: bool
    options: AttentionOptions
    config: ExtendConfig
    interpret: Interpret

    @property
    def quantised(self) -> bool:
        """Whether the pools hold 1-byte numbers."""
        return bool(self.pool_dtype != self.dtype)

    @property
    def registers(self) -> tuple[int, int]:
        """Registers per thread of a consumer and of the producer.

        Three warpgroups of 168 registers have 128 * (2 * 224 + 56) together. The producer needs
        more if a step has many blocks, or to dequantise; consumers need more if the output is wide.
        """
        if self.quantised:
            return 208, 88
        return (216, 72) if self.head_dim <= 128 and self.copies_per_stage > 4 else (224, 56)

    @property
    def copies_per_stage(self) -> int:
        """TMA copies that fill a pipeline stage of K or of V."""
        return max(1, self.config.block_kv // self.block_size)

    @property
    def columns(self) -> int:
        """Columns that the producer has in registers at a time: whole swizzle tiles."""
        return math.gcd(self.head_dim, COLUMNS)

    @property
    def out_columns(self) -> int:
        """Columns of the output staged at a time: all of them if shared memory suffices."""
        return self.head_dim if self.head_dim <= (64 if self.quantised else 128) else 64

    def q_copies(self, warpgroup: int) -> list[tuple[int, int, int, int]]:
        """TMA copies that fill a warpgroup's rows of Q.

        Returns:
            For each: first row, query head, first token of the tile, number of rows.
        """
        copies = []
        for g in range(self.group):
            start = g * self.tile_tokens
            begin = max(start, warpgroup * ROWS)
            end = min(start + self.tile_tokens, (warpgroup + 1) * ROWS)
            if begin < end:  # a head may have rows in both warpgroups
                copies.append((begin - warpgroup * ROWS, g, begin - start, end - begin))
        return copies

    @property
    def q_arrivals(self) -> int:
        """Arrivals of `q_full`; a warpgroup with fewer copies makes the other arrivals itself."""
        return max(len(self.q_copies(w)) for w in range(WARPGROUPS))

    def scratch(self) -> tuple[Any, ...]:
        """Shared memory and barriers, in the order of `KernelRefs`."""
        stages = self.config.stages
        matrix = partial(plgpu.SMEM, dtype=self.dtype, transforms=tiles(self.dtype, self.head_dim))
        ring = matrix((stages, self.config.block_kv, self.head_dim))
        empty = plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=stages)
        arrivals = 1 if self.quantised else self.copies_per_stage
        quantised: tuple[Any, ...] = ()
        if self.quantised:
            shape = self.config.block_kv, self.head_dim
            transforms = tiles(self.pool_dtype, self.head_dim)
            tile = plgpu.SMEM(shape, self.pool_dtype, transforms=transforms)
            full = plgpu.Barrier(num_arrivals=self.copies_per_stage, num_barriers=2)
            quantised = tile, tile, full
        return (
            matrix((WARPGROUPS, ROWS, self.head_dim)),
            ring,
            ring,
            plgpu.SMEM((WARPGROUPS, ROWS, self.out_columns), self.dtype),
            plgpu.SMEM((WARPGROUPS, ROWS), jnp.float32),
            plgpu.Barrier(num_arrivals=self.q_arrivals, num_barriers=WARPGROUPS),
            plgpu.Barrier(num_arrivals=arrivals, num_barriers=stages),
            plgpu.Barrier(num_arrivals=arrivals, num_barriers=stages + 1),
            empty,
            empty,
            plgpu.Barrier(num_arrivals=WARPGROUPS),
            *quantised,
        )

    def work_tile(self, refs: KernelRefs, index: Array) -> WorkTile:
        """The work tile of this number of this thread block."""
        program = lax.axis_index("program")
        share = Share(*(refs.shares[program, field] for field in range(len(Share._fields))))
        piece = share.piece(index, program, self.config.programs)
        number = lax.div(piece.tile, jnp.int32(self.head_groups))
        head_group = lax.rem(piece.tile, jnp.int32(self.head_groups))
        item = WorkItem(*(refs.items[number, field] for field in range(len(WorkItem._fields))))
        steps = item.step_end - item.step_begin
        begin = item.step_begin + piece.begin
        end = item.step_begin + jnp.minimum(piece.end, steps)
        of_piece = item._replace(
            step_begin=begin,
            full_begin=jnp.clip(item.full_begin, begin, end),
            full_end=jnp.clip(item.full_end, begin, end),
            step_end=end,
        )
        whole = (piece.begin == 0) & (piece.end >= steps)
        return WorkTile(number, head_group, of_piece, whole, piece.part)

    def num_work_tiles(self, refs: KernelRefs) -> Array:
        """Number of work tiles of this thread block."""
        number: Array = refs.shares[lax.axis_index("program"), Share._fields.index("num_pieces")]
        return number

    def stage(self, step: Array) -> Array:
        """Pipeline stage of a KV step, counted over all work tiles of the thread block."""
        return lax.rem(step, jnp.int32(self.config.stages))

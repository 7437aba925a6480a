"""What the warpgroups of the Mosaic `paged_extend` share: their memory, and what is whose work."""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from ..mosaic_compat import (
    Interpret,
    plgpu,
    tiles,
)
from ..online_softmax import AttentionOptions
from .config import (
    ROWS,
    WARPGROUPS,
    ExtendConfig,
)
from .work_list import WorkItem, snake

MATRIX = plgpu.Layout.WGMMA


class Memory(NamedTuple):
    """What the warpgroups of a thread block see: global memory, shared memory, barriers."""

    q: Any
    k: Any
    v: Any
    tables: Any
    items: Any
    num_items: Any
    k_scales: Any
    v_scales: Any
    """Of quantised pools, as in `paged_extend`; else None."""
    sinks: Any
    """[kv_heads, WARPGROUPS, ROWS] float32, or None."""
    out: Any
    lse: Any
    """[items, kv_heads, WARPGROUPS, ROWS] float32, or None."""
    shared_q: Any
    """[WARPGROUPS, ROWS, head_dim]"""
    shared_k: Any
    shared_v: Any
    """[stages, block_kv, head_dim]"""
    shared_out: Any
    """[WARPGROUPS, ROWS, out_columns], not tiled: any run of rows can be copied."""
    shared_lse: Any
    """[WARPGROUPS, ROWS] float32"""
    q_full: Any
    """Per warpgroup; the others per slot."""
    k_full: Any
    v_full: Any
    """One more than slots: the last is for a tile that the copier itself waits for."""
    k_free: Any
    v_free: Any
    turn: Any
    """Both warpgroups arrive, then both go on, one to the tensor cores and one from them."""
    raw_k: Any = None
    raw_v: Any = None
    """[block_kv, head_dim]: numbers of quantised pools, which the copier widens; else None."""
    raw_full: Any = None
    """Of K, and of V."""


class Piece(NamedTuple):
    """What a thread block does in one turn: a tile for a KV head."""

    number: Array
    """Of the tile, in the work list."""
    head: Array
    item: WorkItem


@dataclass(frozen=True)
class Launch:
    """The static numbers of a launch, and what follows from them."""

    kv_heads: int
    group: int
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
        """Of a thread that multiplies, and of one that copies.

        128 * (2 * 224 + 56) is what three warpgroups of 168 registers have together. The copier
        needs more where a step has more blocks, those that multiply where the output is wide.
        """
        return (216, 72) if self.head_dim <= 128 else (224, 56)

    @property
    def block_copies(self) -> int:
        """Copies that fill a slot."""
        return max(1, self.config.block_kv // self.block_size)

    @property
    def out_columns(self) -> int:
        """Columns of the output that are staged at a time: all if shared memory has the room."""
        return self.head_dim if self.head_dim <= (64 if self.quantised else 128) else 64

    def q_copies(self, warpgroup: int) -> list[tuple[int, int, int, int]]:
        """Copies that fill a warpgroup's rows of Q: (first row, query head, first slot, rows)."""
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
        """Arrivals that fill a warpgroup's rows of Q; one with fewer copies arrives itself."""
        return max(len(self.q_copies(w)) for w in range(WARPGROUPS))

    def scratch(self) -> tuple[Any, ...]:
        """Shared memory and barriers, in the order of `Memory`."""
        stages = self.config.stages
        matrix = partial(plgpu.SMEM, dtype=self.dtype, transforms=tiles(self.dtype))
        ring = matrix((stages, self.config.block_kv, self.head_dim))
        free = plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=stages)
        arrivals = 1 if self.quantised else self.block_copies
        raw: tuple[Any, ...] = ()
        if self.quantised:
            shape = self.config.block_kv, self.head_dim
            numbers = plgpu.SMEM(shape, self.pool_dtype, transforms=tiles(self.pool_dtype))
            came = plgpu.Barrier(num_arrivals=self.block_copies, num_barriers=2)
            raw = numbers, numbers, came
        return (
            matrix((WARPGROUPS, ROWS, self.head_dim)),
            ring,
            ring,
            plgpu.SMEM((WARPGROUPS, ROWS, self.out_columns), self.dtype),
            plgpu.SMEM((WARPGROUPS, ROWS), jnp.float32),
            plgpu.Barrier(num_arrivals=self.q_arrivals, num_barriers=WARPGROUPS),
            plgpu.Barrier(num_arrivals=arrivals, num_barriers=stages),
            plgpu.Barrier(num_arrivals=arrivals, num_barriers=stages + 1),
            free,
            free,
            plgpu.Barrier(num_arrivals=WARPGROUPS),
            *raw,
        )

    def piece(self, m: Memory, turn: Array) -> Piece:
        """The work of a turn of this thread block."""
        index = snake(turn, lax.axis_index("program"), self.config.programs)
        number = lax.div(index, jnp.int32(self.kv_heads))
        head = lax.rem(index, jnp.int32(self.kv_heads))
        fields = range(len(WorkItem._fields))
        return Piece(number, head, WorkItem(*(m.items[number, field] for field in fields)))

    def turns(self, m: Memory) -> Array:
        """How many turns this thread block has."""
        pieces = m.num_items[0] * self.kv_heads
        whole = lax.div(pieces, jnp.int32(self.config.programs))
        last = snake(whole, lax.axis_index("program"), self.config.programs)
        turns: Array = whole + (last < pieces).astype(jnp.int32)
        return turns

    def slot(self, step: Array) -> Array:
        """Slot of a ring, by the number of steps that the thread block took before."""
        return lax.rem(step, jnp.int32(self.config.stages))

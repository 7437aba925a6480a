"""The warpgroup of the Mosaic `paged_extend` that copies; `paged_extend_mosaic` draws its part."""

from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from .extend_work import WorkItem
from .mosaic import iota, load, pl, plgpu
from .paged_extend_config import ROWS
from .paged_extend_launch import MATRIX, Launch, Memory


class Copier(NamedTuple):
    """Fills the rings of K and V of a thread block."""

    launch: Launch
    m: Memory

    def run(self) -> None:
        """Fill the rings, tile after tile."""
        launch, m = self
        if launch.interpret is None:
            plgpu.set_max_registers(launch.registers[1], action="decrease")

        def tile(turn: Array, before: Array) -> Array:
            _, head, item = launch.piece(m, turn)
            step = partial(self.copy_step, head, item, before - item.begin)
            pl.loop(item.begin, item.end)(step)
            return before + item.end - item.begin

        def drain(step: Array) -> None:
            plgpu.barrier_wait(m.k_free.at[launch.slot(step)])
            plgpu.barrier_wait(m.v_free.at[launch.slot(step)])

        total = lax.fori_loop(0, launch.turns(m), tile, jnp.int32(0))
        # Not to leave while the others still hand slots back.
        pl.loop(jnp.maximum(total - launch.config.stages, 0), total)(drain)

    def copy_step(self, head: Array, item: WorkItem, offset: Array, i: Array) -> None:
        """Copy K and V of step `i` of a tile, which is step `offset + i` of the thread block."""
        launch, m = self
        stages, block_kv = launch.config.stages, launch.config.block_kv
        block_size = jnp.int32(launch.block_size)
        rows = min(block_kv, launch.block_size)
        slot = launch.slot(offset + i)
        sources = []
        for j in range(launch.block_copies):
            token = i * block_kv + j * rows
            # Blocks that the row does not use are not read, whatever its table says there.
            first, last = lax.div(item.kv_begin, block_size), lax.div(item.kv_end - 1, block_size)
            column = jnp.clip(lax.div(token, block_size), first, last)
            block = jnp.clip(m.tables[item.row, column], 0, launch.num_blocks - 1)
            start = 0
            if launch.block_size > block_kv:
                start = pl.multiple_of(lax.rem(token, block_size), block_kv)
            sources.append((block, head, pl.ds(start, rows)))

        def fill(ring: Any, pool: Any, full: Any) -> None:
            for j, source in enumerate(sources):
                place = ring.at[slot, pl.ds(j * rows, rows)]
                plgpu.copy_gmem_to_smem(pool.at[source], place, full)

        again = offset + i >= stages
        pl.when(again)(lambda: plgpu.barrier_wait(m.k_free.at[slot]))
        fill(m.shared_k, m.k, m.k_full.at[slot])
        pl.when(again)(lambda: plgpu.barrier_wait(m.v_free.at[slot]))
        unwritten = (i * block_kv < item.kv_begin) | ((i + 1) * block_kv > item.kv_end)
        fill(m.shared_v, m.v, m.v_full.at[jnp.where(unwritten, stages, slot)])

        def clean() -> None:
            plgpu.barrier_wait(m.v_full.at[stages])
            self.zero_unwritten(m.shared_v.at[slot], item, i * block_kv)
            plgpu.commit_smem()  # of zeroes
            for _ in range(launch.block_copies):
                plgpu.barrier_arrive(m.v_full.at[slot])

        pl.when(unwritten)(clean)

    def zero_unwritten(self, v: Any, item: WorkItem, first: Array) -> None:
        """Zero the rows of a tile of V that hold positions outside of [kv_begin, kv_end)."""
        launch = self.launch
        columns = 64  # at a time: the copier has few registers
        for row in range(0, launch.config.block_kv, ROWS):
            position = first + row + iota((ROWS, columns), 0, MATRIX, launch.interpret)
            written = (position >= item.kv_begin) & (position < item.kv_end)
            for column in range(0, launch.head_dim, columns):
                part = (pl.ds(row, ROWS), pl.ds(column, columns))
                value = load(v, part, MATRIX, launch.interpret)
                v[part] = jnp.where(written, value, jnp.zeros_like(value))

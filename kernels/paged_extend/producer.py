"""The warpgroup of the Mosaic `paged_extend` that copies; `paged_extend_mosaic` draws its part."""

from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from ..mosaic_compat import (
    iota,
    layout_cast,
    load,
    pl,
    plgpu,
)
from .config import ROWS
from .launch import (
    MATRIX,
    Launch,
    Memory,
)
from .work_list import WorkItem

NARROW = plgpu.Layout.WGMMA_UPCAST_4X
"""Of 1-byte numbers, from which 16-bit ones are made without moving between threads."""


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
            if launch.quantised:
                for of_k in (True, False):
                    first = partial(self.fetch, of_k, head, item, item.begin)
                    pl.when(item.begin < item.end)(first)
                step = partial(self.widen_step, head, item, before - item.begin)
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
        slot = launch.slot(offset + i)
        sources = self.sources(head, item, i)
        again = offset + i >= stages
        pl.when(again)(lambda: plgpu.barrier_wait(m.k_free.at[slot]))
        self.fill(m.shared_k.at[slot], m.k, sources, m.k_full.at[slot])
        pl.when(again)(lambda: plgpu.barrier_wait(m.v_free.at[slot]))
        unwritten = (i * block_kv < item.kv_begin) | ((i + 1) * block_kv > item.kv_end)
        full = m.v_full.at[jnp.where(unwritten, stages, slot)]
        self.fill(m.shared_v.at[slot], m.v, sources, full)

        def clean() -> None:
            plgpu.barrier_wait(m.v_full.at[stages])
            self.zero_unwritten(m.shared_v.at[slot], item, i * block_kv)
            plgpu.commit_smem()  # of zeroes
            for _ in range(launch.block_copies):
                plgpu.barrier_arrive(m.v_full.at[slot])

        pl.when(unwritten)(clean)

    def sources(self, head: Array, item: WorkItem, i: Array) -> list[tuple[Any, ...]]:
        """Where the parts of step `i` of a tile lie in the pools."""
        launch, m = self
        block_size = jnp.int32(launch.block_size)
        rows = min(launch.config.block_kv, launch.block_size)
        sources = []
        for j in range(launch.block_copies):
            token = i * launch.config.block_kv + j * rows
            # Blocks that the row does not use are not read, whatever its table says there.
            first, last = lax.div(item.kv_begin, block_size), lax.div(item.kv_end - 1, block_size)
            column = jnp.clip(lax.div(token, block_size), first, last)
            block = jnp.clip(m.tables[item.row, column], 0, launch.num_blocks - 1)
            start = 0
            if launch.block_size > launch.config.block_kv:
                start = pl.multiple_of(lax.rem(token, block_size), rows)
            sources.append((block, head, pl.ds(start, rows)))
        return sources

    def fill(self, place: Any, pool: Any, sources: list[tuple[Any, ...]], full: Any) -> None:
        """Start to copy the parts of a step."""
        rows = self.launch.config.block_kv // len(sources)
        for j, source in enumerate(sources):
            plgpu.copy_gmem_to_smem(pool.at[source], place.at[pl.ds(j * rows, rows)], full)

    def fetch(self, of_k: bool, head: Array, item: WorkItem, i: Array) -> None:
        """Start to copy the numbers of step `i` of a tile, of a quantised pool."""
        m = self.m
        raw, pool = (m.raw_k, m.k) if of_k else (m.raw_v, m.v)
        self.fill(raw, pool, self.sources(head, item, i), m.raw_full.at[0 if of_k else 1])

    def widen_step(self, head: Array, item: WorkItem, offset: Array, i: Array) -> None:
        """As `copy_step`, of quantised pools: widen the numbers that came, and fetch the next."""
        launch, m = self
        slot = launch.slot(offset + i)
        again = offset + i >= launch.config.stages
        for of_k, free, wide, full in (
            (True, m.k_free, m.shared_k, m.k_full),
            (False, m.v_free, m.shared_v, m.v_full),
        ):
            pl.when(again)(partial(plgpu.barrier_wait, free.at[slot]))
            plgpu.barrier_wait(m.raw_full.at[0 if of_k else 1])
            self.widen(of_k, wide.at[slot], head, item, i)
            plgpu.commit_smem()  # of widened numbers; all threads have read the raw ones
            plgpu.barrier_arrive(full.at[slot])
            following = partial(self.fetch, of_k, head, item, i + 1)
            pl.when(i + 1 < item.end)(following)

    def widen(self, of_k: bool, wide: Any, head: Array, item: WorkItem, i: Array) -> None:
        """Numbers times the scale of their block, 0 where no row has written values."""
        launch, m = self
        interpret, rows = launch.interpret, launch.config.block_kv // launch.block_copies
        raw, scales = (m.raw_k, m.k_scales) if of_k else (m.raw_v, m.v_scales)
        factors = [scales[block, head] for block, *_ in self.sources(head, item, i)]
        columns = 64  # at a time, as below
        for row in range(0, launch.config.block_kv, ROWS):
            index = row + iota((ROWS,), 0, NARROW.reduce(1), interpret)
            factor = layout_cast(
                jnp.zeros((ROWS,), jnp.float32) + factors[row // rows], NARROW.reduce(1), interpret
            )
            for j in range(row // rows + 1, -(-(row + ROWS) // rows)):
                factor = jnp.where(index >= j * rows, factors[j], factor)
            factor = lax.broadcast_in_dim(factor, (ROWS, columns), [0])
            position = (
                i * launch.config.block_kv + row + iota((ROWS, columns), 0, NARROW, interpret)
            )
            written = (position >= item.kv_begin) & (position < item.kv_end)
            for column in range(0, launch.head_dim, columns):
                part = (pl.ds(row, ROWS), pl.ds(column, columns))
                numbers = layout_cast(raw[part], NARROW, interpret)
                if numbers.dtype != jnp.int8:
                    numbers = numbers.astype(jnp.float16)  # no direct instruction
                values = numbers.astype(jnp.float32) * factor
                if not of_k:
                    values = jnp.where(written, values, jnp.zeros_like(values))
                wide[part] = values.astype(wide.dtype)

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

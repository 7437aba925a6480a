"""The producer warpgroup of the Mosaic `paged_extend`: copies K and V into the pipeline."""

from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from ..mosaic_compat import iota, layout_cast, load, pl, plgpu, when
from .config import ROWS
from .kernel_params import MATRIX, KernelParams, KernelRefs
from .work_list import WorkItem

QUANTISED = plgpu.Layout.WGMMA_UPCAST_4X
"""Register layout of 1-byte numbers that becomes WGMMA's without moves between threads."""


class Producer(NamedTuple):
    """Fills the K and V pipelines of a thread block; `mosaic` draws its part."""

    params: KernelParams
    refs: KernelRefs

    def run(self) -> None:
        """Copy the KV steps of all work tiles."""
        params, refs = self
        if params.interpret is None:
            plgpu.set_max_registers(params.registers[1], action="decrease")

        def tile(index: Array, before: Array) -> Array:
            work = params.work_tile(refs, index)
            item = work.item
            head = lax.div(work.head_group, jnp.int32(params.groups_per_kv_head))
            offset = before - item.step_begin
            step = partial(self.copy_step, head, item, offset)
            if params.quantised:
                for is_k in (True, False):

                    @when(item.step_begin < item.step_end)
                    def load_first(is_k: bool = is_k) -> None:
                        self.load_quantised(is_k, head, item, item.step_begin)

                step = partial(self.dequantise_step, head, item, offset)
            pl.loop(item.step_begin, item.step_end)(step)
            return offset + item.step_end

        def tail(step: Array) -> None:
            plgpu.barrier_wait(refs.k_empty.at[params.stage(step)])
            plgpu.barrier_wait(refs.v_empty.at[params.stage(step)])

        total = lax.fori_loop(0, params.num_work_tiles(refs), tile, jnp.int32(0))
        # The producer must not exit before the consumers have released all stages.
        pl.loop(jnp.maximum(total - params.config.stages, 0), total)(tail)

    def copy_step(self, head: Array, item: WorkItem, offset: Array, i: Array) -> None:
        """Copy K and V of step `i` of a tile, which is step `offset + i` of the thread block."""
        params, refs = self
        stages, block_kv = params.config.stages, params.config.block_kv
        stage = params.stage(offset + i)
        sources = self.sources(head, item, i)
        reused = offset + i >= stages

        @when(reused)
        def wait_for_k_stage() -> None:
            plgpu.barrier_wait(refs.k_empty.at[stage])

        self.copy(refs.shared_k.at[stage], refs.k, sources, refs.k_full.at[stage])

        @when(reused)
        def wait_for_v_stage() -> None:
            plgpu.barrier_wait(refs.v_empty.at[stage])

        unwritten = (i * block_kv < item.kv_begin) | ((i + 1) * block_kv > item.kv_end)
        full = refs.v_full.at[jnp.where(unwritten, stages, stage)]
        self.copy(refs.shared_v.at[stage], refs.v, sources, full)

        @when(unwritten)
        def zero_and_release() -> None:
            plgpu.barrier_wait(refs.v_full.at[stages])
            self.zero_unwritten(refs.shared_v.at[stage], item, i * block_kv)
            plgpu.commit_smem()  # of zeros
            for _ in range(params.copies_per_stage):
                plgpu.barrier_arrive(refs.v_full.at[stage])

    def sources(self, head: Array, item: WorkItem, i: Array) -> list[tuple[Any, ...]]:
        """Index into the pools of each copy of step `i` of a tile."""
        params, refs = self
        block_size = jnp.int32(params.block_size)
        rows = min(params.config.block_kv, params.block_size)
        sources = []
        for j in range(params.copies_per_stage):
            token = i * params.config.block_kv + j * rows
            # Only table entries of blocks that the row uses are read.
            first, last = lax.div(item.kv_begin, block_size), lax.div(item.kv_end - 1, block_size)
            column = jnp.clip(lax.div(token, block_size), first, last)
            block = jnp.clip(refs.tables[item.row, column], 0, params.num_blocks - 1)
            start = 0
            if params.block_size > params.config.block_kv:
                start = pl.multiple_of(lax.rem(token, block_size), rows)
            sources.append((block, head, pl.ds(start, rows)))
        return sources

    def copy(self, target: Any, pool: Any, sources: list[tuple[Any, ...]], full: Any) -> None:
        """Start the copies of a step; each arrives at the barrier `full`."""
        rows = self.params.config.block_kv // len(sources)
        for j, source in enumerate(sources):
            plgpu.copy_gmem_to_smem(pool.at[source], target.at[pl.ds(j * rows, rows)], full)

    def load_quantised(self, is_k: bool, head: Array, item: WorkItem, i: Array) -> None:
        """Start to copy K or V of step `i` of a tile from a quantised pool."""
        refs = self.refs
        tile, pool = (refs.quantised_k, refs.k) if is_k else (refs.quantised_v, refs.v)
        self.copy(tile, pool, self.sources(head, item, i), refs.quantised_full.at[0 if is_k else 1])

    def dequantise_step(self, head: Array, item: WorkItem, offset: Array, i: Array) -> None:
        """`copy_step` for quantised pools: dequantise step `i` and start to copy step `i + 1`."""
        params, refs = self
        stage = params.stage(offset + i)
        reused = offset + i >= params.config.stages
        for is_k, empty, target, full in (
            (True, refs.k_empty, refs.shared_k, refs.k_full),
            (False, refs.v_empty, refs.shared_v, refs.v_full),
        ):

            @when(reused)
            def wait_for_stage(empty: Any = empty) -> None:
                plgpu.barrier_wait(empty.at[stage])

            plgpu.barrier_wait(refs.quantised_full.at[0 if is_k else 1])
            self.dequantise(is_k, target.at[stage], head, item, i)
            # Publishes the dequantised tile; all threads have read the quantised one.
            plgpu.commit_smem()
            plgpu.barrier_arrive(full.at[stage])
            following = i + 1

            @when(following < item.step_end)
            def load_next(is_k: bool = is_k, following: Array = following) -> None:
                self.load_quantised(is_k, head, item, following)

    def dequantise(self, is_k: bool, target: Any, head: Array, item: WorkItem, i: Array) -> None:
        """Multiply a tile by the scales of its blocks; values that no row has written become 0."""
        params, refs = self
        interpret, rows = params.interpret, params.config.block_kv // params.copies_per_stage
        tile = refs.quantised_k if is_k else refs.quantised_v
        scales = refs.k_scales if is_k else refs.v_scales
        factors = [scales[block, head] for block, *_ in self.sources(head, item, i)]
        for row in range(0, params.config.block_kv, ROWS):
            index = row + iota((ROWS,), 0, QUANTISED.reduce(1), interpret)
            factor = jnp.zeros((ROWS,), jnp.float32) + factors[row // rows]
            factor = layout_cast(factor, QUANTISED.reduce(1), interpret)
            for j in range(row // rows + 1, -(-(row + ROWS) // rows)):
                factor = jnp.where(index >= j * rows, factors[j], factor)
            factor = lax.broadcast_in_dim(factor, (ROWS, params.columns), [0])
            first = i * params.config.block_kv + row
            written = self.written(item, first, QUANTISED)
            for column in range(0, params.head_dim, params.columns):
                part = (pl.ds(row, ROWS), pl.ds(column, params.columns))
                numbers = layout_cast(tile[part], QUANTISED, interpret)
                if numbers.dtype != jnp.int8:
                    # There is no direct instruction from float8 to float32.
                    numbers = numbers.astype(jnp.float16)
                values = numbers.astype(jnp.float32) * factor
                if not is_k:
                    values = jnp.where(written, values, jnp.zeros_like(values))
                target[part] = values.astype(target.dtype)

    def zero_unwritten(self, v: Any, item: WorkItem, first: Array) -> None:
        """Zero the rows of a tile of V at positions outside [kv_begin, kv_end)."""
        params = self.params
        for row in range(0, params.config.block_kv, ROWS):
            written = self.written(item, first + row, MATRIX)
            for column in range(0, params.head_dim, params.columns):
                part = (pl.ds(row, ROWS), pl.ds(column, params.columns))
                value = load(v, part, MATRIX, params.interpret)
                v[part] = jnp.where(written, value, jnp.zeros_like(value))

    def written(self, item: WorkItem, first: Array, layout: Any) -> Array:
        """Mask of the ROWS positions from `first` on that lie in [kv_begin, kv_end)."""
        shape = ROWS, self.params.columns
        position = first + iota(shape, 0, layout, self.params.interpret)
        return (position >= item.kv_begin) & (position < item.kv_end)

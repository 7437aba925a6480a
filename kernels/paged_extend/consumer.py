"""The consumer warpgroups of the Mosaic `paged_extend`: WGMMA and softmax of 64 rows of a tile."""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, TypeVar

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from ..mosaic_compat import (
    T,
    dot_add,
    dot_beside,
    iota,
    layout_cast,
    load,
    pl,
    plgpu,
    release,
    when,
)
from ..online_softmax import optimization_barrier
from .config import ALIGNMENT, ROWS, WARPGROUPS
from .kernel_params import MATRIX, KernelParams, KernelRefs, WorkTile
from .work_list import WorkItem

S = TypeVar("S", "SoftmaxState", "Ahead")

LOG2_E = math.log2(math.e)
LOWEST = -1e30
"""Initial softmax peak: finite, so that differences are never NaN."""

ROW_VECTOR = plgpu.Layout.WGMMA.reduce(1)


class SoftmaxState(NamedTuple):
    """A softmax in progress, as in `online_softmax` but in base 2."""

    weighted: Array
    """[ROWS, head_dim]"""
    peak: Array
    total: Array
    """[ROWS]"""


class Ahead(NamedTuple):
    """A softmax in progress, and the logits of the next step."""

    weighted: Array
    peak: Array
    total: Array
    logits: Array
    """[ROWS, block_kv]"""


class Consumer(NamedTuple):
    """Attends for 64 matrix rows of each work tile; `mosaic` draws its part."""

    params: KernelParams
    refs: KernelRefs
    warpgroup: Array
    """0 or 1."""

    def run(self) -> None:
        """Attend for all work tiles of the thread block."""
        params, refs, warpgroup = self
        if params.interpret is None:
            plgpu.set_max_registers(params.registers[0], action="increase")
        number = params.num_work_tiles(refs)

        @when(number > 0)
        def load_first_q() -> None:
            self.load_q(jnp.int32(0))

        def tile(index: Array, before: Array) -> Array:
            item = params.work_tile(refs, index).item
            plgpu.barrier_wait(refs.q_full.at[warpgroup])
            # Warpgroup 0 enters the tensor cores first in each tile, and hands them over last.
            if not params.config.overlap:
                pl.when(warpgroup == 1)(self.ping_pong)
            state = self.attend(item, before)
            if not params.config.overlap:
                pl.when(warpgroup == 0)(self.ping_pong)

            @when(index + 1 < number)
            def load_next_q() -> None:
                self.load_q(index + 1)

            work = params.work_tile(refs, index)  # loaded again, to save registers
            self.store(work, state)
            return before + work.item.step_end - work.item.step_begin

        lax.fori_loop(0, number, tile, jnp.int32(0))
        plgpu.wait_smem_to_gmem(0)

    def load_q(self, index: Array) -> None:
        """Start to copy this warpgroup's queries of a work tile."""
        params, refs, warpgroup = self
        work = params.work_tile(refs, index)

        for w in range(WARPGROUPS):

            @when(warpgroup == w)
            def load_for(w: int = w) -> None:
                copies = params.q_copies(w)
                for _ in range(params.q_arrivals - len(copies)):
                    plgpu.barrier_arrive(refs.q_full.at[w])
                for row, g, token, rows in copies:
                    first = pl.multiple_of(work.item.first_token + token, ALIGNMENT)
                    source = refs.q.at[pl.ds(first, rows), work.head_group * params.group + g]
                    target = refs.shared_q.at[w, pl.ds(row, rows)]
                    plgpu.copy_gmem_to_smem(source, target, refs.q_full.at[w])

    def ping_pong(self) -> None:
        """Hand the tensor cores to the other warpgroup, or wait until it hands them over."""
        plgpu.barrier_arrive(self.refs.ping_pong)
        plgpu.barrier_wait(self.refs.ping_pong)

    def attend(self, item: WorkItem, before: Array) -> SoftmaxState:
        """Softmax over all KV steps of a tile; `before` counts the steps of earlier tiles."""
        params, refs, _ = self
        rows = jnp.zeros((ROWS,), jnp.float32)
        zeros = jnp.zeros((ROWS, params.head_dim), jnp.float32)
        state = SoftmaxState(
            layout_cast(zeros, MATRIX, params.interpret),
            layout_cast(rows + LOWEST, ROW_VECTOR, params.interpret),
            layout_cast(rows, ROW_VECTOR, params.interpret),
        )

        some = item.step_begin < item.step_end
        # The difference takes one register through the loops, its terms two.
        offset = before - item.step_begin
        if params.config.overlap:
            attend = partial(self.attend_ahead, item, offset)
            return SoftmaxState(*lax.cond(some, attend, lambda state: state, state))

        @when(some)
        def wait_for_k() -> None:
            plgpu.barrier_wait(refs.k_full.at[params.stage(before)])

        return self.over_steps(item, partial(self.attend_step, item, offset), state)

    def over_steps(self, item: WorkItem, step: Callable[[bool, Array, S], S], state: S) -> S:
        """The state after `step(masked, i, state)` for all KV steps of a tile."""
        masked, full = partial(step, True), partial(step, False)
        if self.params.options.window is not None:
            state = lax.fori_loop(item.step_begin, item.full_begin, masked, state)
        state = lax.fori_loop(item.full_begin, item.full_end, full, state)
        state = lax.fori_loop(item.full_end, item.step_end, masked, state)
        return state

    def logits(self, step: Array, overlapped: Callable[[], T]) -> tuple[Array, T]:
        """Q @ K of a step, counted over all work tiles, and what `overlapped` returns meanwhile."""
        params, refs, warpgroup = self
        stage = params.stage(step)
        q_index = warpgroup
        if params.head_dim > 128:
            # Adds 0, which the compiler cannot know. With a constant index it keeps the addresses
            # of all parts of Q through the loops: about 20 registers, which spill.
            q_index += jnp.minimum(step, 0)
        q, k = refs.shared_q.at[q_index], refs.shared_k.at[stage]
        size = (ROWS, params.config.block_kv)
        logits, beside = dot_beside([q], k, size, params.interpret, overlapped)
        release(refs.k_empty.at[stage], params.interpret)
        return logits, beside

    def softmax(
        self, item: WorkItem, masked: bool, i: Array, logits: Array, state: SoftmaxState
    ) -> tuple[Array, SoftmaxState]:
        """The weights of a step, and the state before them, scaled to the new peak.

        The exponent of each weight is one multiply-add of its logit.
        """
        options = self.params.options
        weighted, peak, total = state
        scale = options.sm_scale * LOG2_E
        if options.soft_cap is not None:
            # One instruction, as in FlashInfer and FlashAttention 3. Its relative error of 2**-11
            # makes one of weights of up to soft_cap * 2**-11: 2.4 % at a cap of 50.
            logits = jnp.tanh(logits * (options.sm_scale / options.soft_cap))
            scale = options.soft_cap * LOG2_E
        if masked:
            logits = self.mask(logits, item, i)
        new_peak = jnp.maximum(peak, logits.max(axis=1) * scale)
        factor = jnp.exp2(peak - new_peak)
        weights = jnp.exp2(logits * scale - lax.broadcast_in_dim(new_peak, logits.shape, [0]))
        weighted *= lax.broadcast_in_dim(factor, weighted.shape, [0])
        return weights, SoftmaxState(weighted, new_peak, total * factor)

    def attend_ahead(self, item: WorkItem, offset: Array, state: SoftmaxState) -> SoftmaxState:
        """`attend` to one step or more, with the next logits ahead of each softmax.

        ::

            tensor cores   QK0 | QK1      PV0 | QK2      PV1 | PV2
            softmax            | 0            | 1            | 2
        """
        params, refs, _ = self

        def weigh(masked: bool, i: Array, ahead: Ahead) -> tuple[Array, SoftmaxState]:
            state = SoftmaxState(*ahead[:3])
            weights, state = self.softmax(item, masked, i, ahead.logits, state)
            narrow = weights.astype(params.dtype)
            return narrow, state._replace(total=state.total + weights.sum(axis=1))

        def add(i: Array, narrow: Array, state: SoftmaxState) -> SoftmaxState:
            stage = params.stage(offset + i)
            full, values = refs.v_full.at[stage], refs.shared_v.at[stage]
            plgpu.barrier_wait(full)
            weighted = dot_add(state.weighted, narrow, values, params.interpret)
            release(refs.v_empty.at[stage], params.interpret)
            return state._replace(weighted=weighted)

        def step(masked: bool, i: Array, ahead: Ahead) -> Ahead:
            following = offset + i + 1
            plgpu.barrier_wait(refs.k_full.at[params.stage(following)])
            logits, (narrow, state) = self.logits(following, partial(weigh, masked, i, ahead))
            return Ahead(*add(i, narrow, state), logits)

        first = offset + item.step_begin
        plgpu.barrier_wait(refs.k_full.at[params.stage(first)])
        logits, _ = self.logits(first, lambda: ())
        last = item.step_end - 1
        before_last = item._replace(
            full_begin=jnp.minimum(item.full_begin, last),
            full_end=jnp.minimum(item.full_end, last),
            step_end=last,
        )
        ahead = self.over_steps(before_last, step, Ahead(*state, logits))
        return add(last, *weigh(True, last, ahead))

    def attend_step(
        self, item: WorkItem, offset: Array, masked: bool, i: Array, state: SoftmaxState
    ) -> SoftmaxState:
        """One KV step: Q @ K, softmax, weights @ V. The caller has waited for K.

        The other warpgroup may enter the tensor cores as soon as this one has issued its products.
        """
        params, refs, _ = self
        stage = params.stage(offset + i)
        logits, _ = self.logits(offset + i, self.ping_pong)
        weights, (weighted, new_peak, total) = self.softmax(item, masked, i, logits, state)
        narrow = weights.astype(params.dtype)

        def wait_for_v_and_turn() -> None:
            plgpu.barrier_arrive(refs.ping_pong)
            plgpu.barrier_wait(refs.v_full.at[stage])
            plgpu.barrier_wait(refs.ping_pong)

        # The place of the sum decides how many registers are live across the wait.
        if params.head_dim <= 128:
            total += weights.sum(axis=1)
            weighted, total, new_peak, narrow = optimization_barrier(
                (weighted, total, new_peak, narrow)
            )
            wait_for_v_and_turn()
        else:
            wait_for_v_and_turn()
            total += weights.sum(axis=1)

        def wait_for_next_k() -> None:
            next_k = refs.k_full.at[params.stage(offset + i + 1)]

            @when(i + 1 < item.step_end)
            def wait() -> None:
                plgpu.barrier_wait(next_k)

        values = refs.shared_v.at[stage]
        weighted = dot_add(weighted, narrow, values, params.interpret, wait_for_next_k)
        release(refs.v_empty.at[stage], params.interpret)
        return SoftmaxState(weighted, new_peak, total)

    def mask(self, logits: Array, item: WorkItem, i: Array) -> Array:
        """Set the logits of keys of step `i` that a row's token does not see to -inf."""
        params = self.params
        row = self.warpgroup * ROWS + iota((ROWS,), 0, ROW_VECTOR, params.interpret)
        if params.tile_tokens & (params.tile_tokens - 1) == 0:
            token = row & (params.tile_tokens - 1)
        else:
            token = lax.rem(row, jnp.full_like(row, params.tile_tokens))
        position = item.position + token - i * params.config.block_kv
        position = lax.broadcast_in_dim(position, logits.shape, [0])
        key = iota((ROWS, params.config.block_kv), 1, MATRIX, params.interpret)
        visible = key <= position
        if params.options.window is not None:
            visible &= key > position - params.options.window
        return jnp.where(visible, logits, -jnp.inf)

    def store(self, work: WorkTile, state: SoftmaxState) -> None:
        """Normalise and store the tile; a row that saw nothing gets 0, and -inf as lse."""
        params, refs, warpgroup = self
        weighted, peak, total = state
        empty = total == 0.0
        valid = jnp.where(work.item.fits != 0, 1.0, jnp.nan).astype(jnp.float32)
        factor = valid
        if refs.sinks is not None:
            sink = load(refs.sinks.at[work.head_group], warpgroup, ROW_VECTOR, params.interpret)
            sink += jnp.where(work.whole, 0.0, -jnp.inf)  # the merge of parts adds it
            new_peak = jnp.maximum(peak, sink)
            factor = jnp.exp2(peak - new_peak)
            total = total * factor + jnp.exp2(sink - new_peak)
            peak = new_peak
            factor *= valid
        total = jnp.where(empty, jnp.ones_like(total), total)
        result = weighted * lax.broadcast_in_dim(factor / total, weighted.shape, [0])
        log = jnp.where(empty, -jnp.inf, peak + jnp.log2(total)) * valid

        @when(~work.whole)
        def store_part() -> None:
            refs.parts[work.part, warpgroup] = result
            refs.part_lses[work.part, warpgroup] = log

        @when(work.whole)
        def store_whole() -> None:
            self.store_whole(work, result, log)

    def store_whole(self, work: WorkTile, result: Array, log: Array) -> None:
        """Store the output of a tile, and its log-sum-exp, which is in base 2 here."""
        params, refs, warpgroup = self
        for column in range(0, params.head_dim, params.out_columns):
            # The previous copies must have read the staging memory.
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            part = result[:, column : column + params.out_columns]
            refs.shared_out[warpgroup] = part.astype(params.dtype)
            plgpu.commit_smem()  # of output
            pl.loop(0, params.group)(partial(self.store_head, work.head_group, work.item, column))
        if refs.lse is not None:
            refs.shared_lse[warpgroup] = log * (1 / LOG2_E)
            plgpu.commit_smem()  # of lse
            target = refs.lse.at[work.item_index, work.head_group, warpgroup]
            plgpu.copy_smem_to_gmem(refs.shared_lse.at[warpgroup], target)

    def store_head(self, head_group: Array, item: WorkItem, column: int, g: Array) -> None:
        """Copy the valid tokens of query head `g` of the group to the output, and nothing else.

        A copy has a static size, so a range of tokens is cut into powers of two: 13 = 8 + 4 + 1.
        """
        params, refs, warpgroup = self
        # In rows of this warpgroup, which holds only a part of some heads.
        start = g * params.tile_tokens - warpgroup * ROWS
        begin = jnp.maximum(start + item.valid_begin, 0)
        end = jnp.minimum(start + item.valid_end, ROWS)
        length = jnp.maximum(end - begin, 0)

        most = min(params.tile_tokens, ROWS)
        for n in reversed(range(most.bit_length())):

            @when(length & (1 << n) != 0)
            def copy(size: int = 1 << n) -> None:
                row = begin + (length & ~(2 * size - 1))
                tokens = pl.ds(item.first_token + row - start, size)
                columns = pl.ds(column, params.out_columns)
                target = refs.out.at[tokens, head_group * params.group + g, columns]
                plgpu.copy_smem_to_gmem(refs.shared_out.at[warpgroup, pl.ds(row, size)], target)

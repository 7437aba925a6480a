"""The Mosaic GPU backend of `paged_extend`, for Hopper: TMA copies, WGMMA, alternating warpgroups.

One thread block per multiprocessor works through the tiles of `extend_work`, in snake order. A tile
is 128 matrix rows: `tile_tokens` tokens times the `group` query heads of one KV head, head by head,
so that all of them share each KV tile that is read (group 4, 32 tokens):

    row         0            32           64           96         127
                |   head 0   |   head 1   |   head 2   |   head 3   |
    slot         0 ...... 31  0 ...... 31  0 ...... 31  0 ...... 31
    warpgroup   |            0            |            1            |

Three warpgroups share the block. Two multiply; while one has the tensor cores the other computes
its softmax (ping-pong: barrier `turn`). The third copies. K and V pass through rings of `stages`
slots of `block_kv` tokens; each slot is handed over by a `full` barrier and back by a `free` one:

    copier         K0 V0 | K1 V1 | k_free[0]: K2, v_free[0]: V2 | ...
    warpgroup 0          | QK0  softmax  PV0 QK1  softmax  PV1 QK2 ...
    warpgroup 1          |     QK0  softmax  PV0 QK1  softmax  PV1 ...

One (block, KV head) of a pool is a contiguous box, so it is one copy; blocks smaller than a step
fill it side by side, of a larger one a part is copied:

    block_size 32, block_kv 128    | table[4 i] | table[4 i + 1] | ... 2 | ... 3 |    step i

Memory of the pools that no row has written may hold NaN. In K it yields logits, which the mask
replaces. 0 * NaN is NaN, so the copier zeroes such rows of V before it hands the slot over.

Numbers of quantised pools come into a tile of their own, one for K and one for V. The copier widens
them from there into a slot of the ring, times their scale, rounded to the dtype of the queries as
pools of that dtype would be: those that multiply know nothing of it.

Tiles start at multiples of 8 tokens, rows of `q` anywhere, so a tile may hold tokens of two rows.
It computes all and stores its own row's, in runs of a power of two: nothing else is written.

Source: the pipeline is FlashAttention-3's (arXiv 2407.08608), its barriers are those of JAX's
`attention_mgpu`; the stores in powers of two are as in JAX's `ragged_dot_mgpu`.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from ..mosaic_compat import (
    Interpret,
    dot,
    dot_add,
    iota,
    layout_cast,
    load,
    pl,
    plgpu,
    run,
)
from ..online_softmax import AttentionOptions, fence
from ..paged_decode.config import DecodeConfig
from ..paged_decode.mosaic import decode
from . import producer as copier
from .config import (
    ROWS,
    TILE_ROWS,
    WARPGROUPS,
    ExtendConfig,
    tile_tokens_of,
)
from .launch import (
    MATRIX,
    Launch,
    Memory,
    Piece,
)
from .work_list import (
    ALIGNMENT,
    WorkItem,
    WorkList,
    attend_single_tokens,
    build_work_list,
)

LOG2_E = math.log2(math.e)
LOWEST = -1e30
"""Softmax peak before anything was seen: finite, so that differences are never NaN."""

ROW_VECTOR = plgpu.Layout.WGMMA.reduce(1)


class SoftmaxState(NamedTuple):
    """A softmax in progress, as in `online_softmax` but in units of log2."""

    weighted: Array
    """[ROWS, head_dim]"""
    peak: Array
    total: Array
    """[ROWS]"""


class Kernel(Launch):
    """The program of a thread block, and the part in it of the warpgroups that multiply."""

    def trace(self, *refs: Any) -> None:
        """Send each warpgroup to its part."""
        q, k, v, tables, items, num_items, *rest = refs
        k_scales = rest.pop(0) if self.quantised else None
        v_scales = rest.pop(0) if self.quantised else None
        sinks = rest.pop(0) if self.has_sinks else None
        out = rest.pop(0)
        lse = rest.pop(0) if self.return_lse else None
        m = Memory(q, k, v, tables, items, num_items, k_scales, v_scales, sinks, out, lse, *rest)
        warpgroup = lax.axis_index("warpgroup")
        pl.when(warpgroup < WARPGROUPS)(lambda: self.attend_tiles(m, warpgroup))
        pl.when(warpgroup == WARPGROUPS)(copier.Copier(self, m).run)

    def attend_tiles(self, m: Memory, warpgroup: Array) -> None:
        """Attention of 64 rows of each tile."""
        if self.interpret is None:
            plgpu.set_max_registers(self.registers[0], action="increase")
        turns = self.turns(m)
        pl.when(turns > 0)(lambda: self.fetch_q(m, warpgroup, jnp.int32(0)))

        def tile(turn: Array, before: Array) -> Array:
            item = self.piece(m, turn).item
            plgpu.barrier_wait(m.q_full.at[warpgroup])
            # In each tile warpgroup 0 is first to the tensor cores, and hands them over at the end.
            pl.when(warpgroup == 1)(lambda: self.take_turn(m))
            state = self.attend(m, warpgroup, item, before)
            pl.when(warpgroup == 0)(lambda: self.take_turn(m))
            pl.when(turn + 1 < turns)(lambda: self.fetch_q(m, warpgroup, turn + 1))
            piece = self.piece(m, turn)  # loaded again: to keep it takes registers
            self.finish(m, warpgroup, piece, state)
            return before + piece.item.end - piece.item.begin

        lax.fori_loop(0, turns, tile, jnp.int32(0))
        plgpu.wait_smem_to_gmem(0)

    def fetch_q(self, m: Memory, warpgroup: Array, turn: Array) -> None:
        """Start to copy the queries of a turn."""
        _, head, item = self.piece(m, turn)

        def fetch(w: int) -> None:
            copies = self.q_copies(w)
            for _ in range(self.q_arrivals - len(copies)):
                plgpu.barrier_arrive(m.q_full.at[w])
            for row, g, slot, rows in copies:
                first = pl.multiple_of(item.first + slot, ALIGNMENT)
                source = m.q.at[pl.ds(first, rows), head * self.group + g]
                place = m.shared_q.at[w, pl.ds(row, rows)]
                plgpu.copy_gmem_to_smem(source, place, m.q_full.at[w])

        for w in range(WARPGROUPS):
            pl.when(warpgroup == w)(partial(fetch, w))

    def take_turn(self, m: Memory) -> None:
        """Let the other warpgroup on, and wait for it."""
        if self.config.ping_pong:
            plgpu.barrier_arrive(m.turn)
            plgpu.barrier_wait(m.turn)

    def attend(self, m: Memory, warpgroup: Array, item: WorkItem, before: Array) -> SoftmaxState:
        """The softmax over all steps of a tile."""
        # One register, not two, through the loops.
        step = partial(self.attend_step, m, warpgroup, item, before - item.begin)
        rows = jnp.zeros((ROWS,), jnp.float32)
        state = SoftmaxState(
            layout_cast(jnp.zeros((ROWS, self.head_dim), jnp.float32), MATRIX, self.interpret),
            layout_cast(rows + LOWEST, ROW_VECTOR, self.interpret),
            layout_cast(rows, ROW_VECTOR, self.interpret),
        )

        def wait_for_k() -> None:
            plgpu.barrier_wait(m.k_full.at[self.slot(before)])

        pl.when(item.begin < item.end)(wait_for_k)
        masked, full = partial(step, True), partial(step, False)
        if self.options.window is not None:
            state = lax.fori_loop(item.begin, item.full_begin, masked, state)
        state = lax.fori_loop(item.full_begin, item.full_end, full, state)
        return SoftmaxState(*lax.fori_loop(item.full_end, item.end, masked, state))

    def attend_step(
        self,
        m: Memory,
        warpgroup: Array,
        item: WorkItem,
        offset: Array,
        masked: bool,
        i: Array,
        state: SoftmaxState,
    ) -> SoftmaxState:
        """One step: multiply, softmax, multiply. K has come already.

        The exponent of each weight is one multiply-add of its logit, and the other warpgroup is
        let on as soon as this one's products are started.
        """
        weighted, peak, total = state
        options, interpret = self.options, self.interpret
        size = (ROWS, self.config.block_kv)
        slot = self.slot(offset + i)
        q_index = warpgroup
        if self.head_dim > 128:
            # Adds 0, which the compiler cannot know. Of a constant index it would keep the
            # addresses of all parts of Q through the loops: about 20 registers, which spill.
            q_index += jnp.minimum(offset + i, 0)
        q, k = m.shared_q.at[q_index], m.shared_k.at[slot]
        logits = dot(q, k, size, interpret, lambda: self.take_turn(m))
        if interpret is not None:
            plgpu.commit_smem()  # see `dot_add`
        plgpu.barrier_arrive(m.k_free.at[slot])
        scale = options.sm_scale * LOG2_E
        if options.soft_cap is not None:
            # One instruction, whose relative error is 2**-11: less than that of 16-bit weights.
            logits = jnp.tanh(logits * (options.sm_scale / options.soft_cap))
            scale = options.soft_cap * LOG2_E
        if masked:
            logits = self.mask(logits, warpgroup, item, i)
        new_peak = jnp.maximum(peak, logits.max(axis=1) * scale)
        factor = jnp.exp2(peak - new_peak)
        weights = jnp.exp2(logits * scale - lax.broadcast_in_dim(new_peak, size, [0]))
        weighted *= lax.broadcast_in_dim(factor, weighted.shape, [0])
        total *= factor
        narrow = weights.astype(self.dtype)

        def wait_for_turn() -> None:
            if self.config.ping_pong:
                plgpu.barrier_arrive(m.turn)
            plgpu.barrier_wait(m.v_full.at[slot])
            if self.config.ping_pong:
                plgpu.barrier_wait(m.turn)

        # Where the sum is taken decides how many registers live through the wait.
        if self.head_dim <= 128:
            total += weights.sum(axis=1)
            weighted, total, new_peak, narrow = fence((weighted, total, new_peak, narrow))
            wait_for_turn()
        else:
            wait_for_turn()
            total += weights.sum(axis=1)

        def wait_for_next_k() -> None:
            following = m.k_full.at[self.slot(offset + i + 1)]
            pl.when(i + 1 < item.end)(lambda: plgpu.barrier_wait(following))

        weighted = dot_add(weighted, narrow, m.shared_v.at[slot], interpret, wait_for_next_k)
        if interpret is not None:
            plgpu.commit_smem()
        plgpu.barrier_arrive(m.v_free.at[slot])
        return SoftmaxState(weighted, new_peak, total)

    def mask(self, logits: Array, warpgroup: Array, item: WorkItem, i: Array) -> Array:
        """-inf for the keys of step `i` that a row's token does not see."""
        row = warpgroup * ROWS + iota((ROWS,), 0, ROW_VECTOR, self.interpret)
        if self.tile_tokens & (self.tile_tokens - 1) == 0:
            slot = row & (self.tile_tokens - 1)
        else:
            slot = lax.rem(row, jnp.full_like(row, self.tile_tokens))
        position = item.position + slot - i * self.config.block_kv
        position = lax.broadcast_in_dim(position, logits.shape, [0])
        key = iota((ROWS, self.config.block_kv), 1, MATRIX, self.interpret)
        visible = key <= position
        if self.options.window is not None:
            visible &= key > position - self.options.window
        return jnp.where(visible, logits, -jnp.inf)

    def finish(self, m: Memory, warpgroup: Array, piece: Piece, state: SoftmaxState) -> None:
        """Divide by the denominator, and store; a row that saw nothing has 0, and -inf as lse."""
        number, head, item = piece
        weighted, peak, total = state
        empty = total == 0.0
        valid = jnp.where(item.fits != 0, 1.0, jnp.nan).astype(jnp.float32)
        factor = valid
        if m.sinks is not None:
            sink = load(m.sinks.at[head], warpgroup, ROW_VECTOR, self.interpret)
            new_peak = jnp.maximum(peak, sink)
            factor = jnp.exp2(peak - new_peak)
            total = total * factor + jnp.exp2(sink - new_peak)
            peak = new_peak
            factor *= valid
        total = jnp.where(empty, jnp.ones_like(total), total)
        result = weighted * lax.broadcast_in_dim(factor / total, weighted.shape, [0])
        for column in range(0, self.head_dim, self.out_columns):
            # The last copies of results must have read them.
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            part = result[:, column : column + self.out_columns]
            m.shared_out[warpgroup] = part.astype(self.dtype)
            plgpu.commit_smem()  # of output
            pl.loop(0, self.group)(partial(self.store, m, warpgroup, head, item, column))
        if m.lse is not None:
            log = (peak + jnp.log2(total)) * (1 / LOG2_E)
            m.shared_lse[warpgroup] = jnp.where(empty, -jnp.inf, log) * valid
            plgpu.commit_smem()  # of lse
            place = m.lse.at[number, head, warpgroup]
            plgpu.copy_smem_to_gmem(m.shared_lse.at[warpgroup], place)

    def store(
        self, m: Memory, warpgroup: Array, head: Array, item: WorkItem, column: int, g: Array
    ) -> None:
        """Copy the live tokens of query head `g` to the output, and nothing else.

        A copy has a static size, so a run of tokens is cut into powers of two: 13 = 8 + 4 + 1.
        """
        # In rows of the warpgroup, which has not all rows of every head.
        start = g * self.tile_tokens - warpgroup * ROWS
        begin = jnp.maximum(start + item.live_begin, 0)
        end = jnp.minimum(start + item.live_end, ROWS)
        length = jnp.maximum(end - begin, 0)

        def copy(size: int) -> None:
            row = begin + (length & ~(2 * size - 1))
            tokens = pl.ds(item.first + row - start, size)
            place = m.out.at[tokens, head * self.group + g, pl.ds(column, self.out_columns)]
            plgpu.copy_smem_to_gmem(m.shared_out.at[warpgroup, pl.ds(row, size)], place)

        most = min(self.tile_tokens, ROWS)
        for n in reversed(range(most.bit_length())):
            pl.when(length & (1 << n) != 0)(partial(copy, 1 << n))


@partial(jax.jit, static_argnames=("options", "return_lse", "config", "decode_config", "interpret"))
def extend(
    q: Float[Array, "tokens q_heads head_dim"],
    k_blocks: Float[Array, "blocks kv_heads block_size head_dim"],
    v_blocks: Float[Array, "blocks kv_heads block_size head_dim"],
    block_tables: Int32[Array, "batch width"],
    kv_lengths: Int32[Array, " batch"],
    q_lengths: Int32[Array, " batch"],
    q_starts: Int32[Array, " batch"],
    sinks: Float[Array, " q_heads"] | None,
    scales: tuple[Float[Array, "blocks kv_heads"], Float[Array, "blocks kv_heads"]] | None,
    *,
    options: AttentionOptions,
    return_lse: bool,
    config: ExtendConfig,
    decode_config: DecodeConfig,
    interpret: Interpret = None,
) -> tuple[Float[Array, "tokens q_heads head_dim"], Float[Array, "tokens q_heads"] | None]:
    """`paged_extend` without its checks: long rows in tiles, single tokens by `paged_decode`'s.

    Args:
        q: As in `paged_extend`, and so are the next seven.
        scales: `k_scales` and `v_scales`, of quantised pools.
        options: Scale, soft cap and window.
        return_lse: Whether to compute the log-sum-exp; None is returned for it otherwise.
        config: How the work on tiles is cut.
        decode_config: How the work on single tokens is cut.
        interpret: Simulate on a CPU.
    """
    static: dict[str, Any] = dict(options=options, return_lse=return_lse, interpret=interpret)
    pools = k_blocks, v_blocks, block_tables
    longer = jnp.where(q_lengths > 1, q_lengths, 0)
    rows = kv_lengths, longer, q_starts
    out, lse = extend_tiles(q, *pools, *rows, sinks, scales, config=config, **static)

    def decode_rows(queries: Array, lengths: Array) -> tuple[Array, Array | None]:
        attended: tuple[Array, Array | None] = decode(
            queries, *pools, lengths, sinks, scales, config=decode_config, **static
        )
        return attended

    return attend_single_tokens(decode_rows, q, kv_lengths, q_lengths, q_starts, out, lse)


@partial(jax.jit, static_argnames=("options", "return_lse", "config", "interpret"))
def extend_tiles(
    q: Float[Array, "tokens q_heads head_dim"],
    k_blocks: Float[Array, "blocks kv_heads block_size head_dim"],
    v_blocks: Float[Array, "blocks kv_heads block_size head_dim"],
    block_tables: Int32[Array, "batch width"],
    kv_lengths: Int32[Array, " batch"],
    q_lengths: Int32[Array, " batch"],
    q_starts: Int32[Array, " batch"],
    sinks: Float[Array, " q_heads"] | None,
    scales: tuple[Float[Array, "blocks kv_heads"], Float[Array, "blocks kv_heads"]] | None,
    *,
    options: AttentionOptions,
    return_lse: bool,
    config: ExtendConfig,
    interpret: Interpret = None,
) -> tuple[Float[Array, "tokens q_heads head_dim"], Float[Array, "tokens q_heads"] | None]:
    """`extend`, with every row in tiles."""
    num_tokens, q_heads, head_dim = q.shape
    num_blocks, kv_heads, block_size, _ = k_blocks.shape
    out = jnp.zeros_like(q)
    group = q_heads // kv_heads
    tile_tokens = tile_tokens_of(group)
    kernel = Kernel(
        kv_heads=kv_heads,
        group=group,
        head_dim=head_dim,
        block_size=block_size,
        num_blocks=num_blocks,
        dtype=q.dtype,
        pool_dtype=k_blocks.dtype,
        tile_tokens=tile_tokens,
        has_sinks=sinks is not None,
        return_lse=return_lse,
        options=options,
        config=config,
        interpret=interpret,
    )
    padded_tokens = max(-(-num_tokens // ALIGNMENT) * ALIGNMENT, tile_tokens)
    work = build_work_list(
        kv_lengths,
        q_lengths,
        q_starts,
        num_tokens=num_tokens,
        padded_tokens=padded_tokens,
        tile_tokens=tile_tokens,
        block_kv=config.block_kv,
        window=options.window,
        max_kv_length=block_tables.shape[1] * block_size,
    )
    if padded_tokens != num_tokens:
        q = jnp.pad(q, ((0, padded_tokens - num_tokens), (0, 0), (0, 0)))
    updated = [out]
    if return_lse:
        updated.append(jnp.zeros((work.items.shape[0], kv_heads, WARPGROUPS, ROWS), jnp.float32))
    inputs = [q, k_blocks, v_blocks, block_tables, work.items, work.num_items]
    inputs.extend(scales or ())
    if sinks is not None:
        inputs.append(_sinks_by_row(sinks, kernel))
    results = run(
        kernel.trace,
        inputs,
        updated,
        name="paged_extend",
        grid={"program": config.programs},
        warpgroups=WARPGROUPS + 1,
        scratch=kernel.scratch(),
        interpret=interpret,
        approx_math=True,
        lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
    )
    return results[0], _lse_by_token(results[1], work, kernel) if return_lse else None


def _sinks_by_row(sinks: Array, kernel: Kernel) -> Float[Array, "kv_heads warpgroups rows"]:
    """The sink of each matrix row, in units of log2."""
    by_row = jnp.repeat(sinks.astype(jnp.float32) * LOG2_E, kernel.tile_tokens)
    by_row = by_row.reshape(kernel.kv_heads, -1)
    by_row = jnp.pad(by_row, ((0, 0), (0, TILE_ROWS - by_row.shape[1])))
    return by_row.reshape(kernel.kv_heads, WARPGROUPS, ROWS)


def _lse_by_token(lse: Array, work: WorkList, kernel: Kernel) -> Float[Array, "tokens q_heads"]:
    """Pick the log-sum-exp of each token out of those of all tiles."""
    tokens = jnp.arange(work.item_of_token.size, dtype=jnp.int32)
    item = jnp.maximum(work.item_of_token, 0)
    slot = jnp.clip(tokens - WorkItem(*work.items.T).first[item], 0, kernel.tile_tokens - 1)
    lse = lse.reshape(-1, kernel.kv_heads, TILE_ROWS)[:, :, : kernel.group * kernel.tile_tokens]
    lse = lse.reshape(-1, kernel.kv_heads, kernel.group, kernel.tile_tokens)[item, :, :, slot]
    found = work.item_of_token[:, None] >= 0
    return jnp.where(found, lse.reshape(tokens.size, -1), -jnp.inf)

"""Arrays of a step: compiled shapes (buckets), and one packed vector from host to device.

A step sends only what changed. The block tables, the last token and the sampling parameters of each
request stay on the device (`BatchState`)::

    tokens    [ -1 -1 | 4 9 2 6 | 0 0 ]   T = 8; -1: the last token, which is on the device
    slots     [ 7, 0, 3, none ]           B = 4: place of the row in the batch; none = padding row
    kv_lengths, q_lengths                 tokens of the row after the step, and in the step
    write_from                            first position whose KV is written
    last_blocks                           block of the row's last token, which may be new
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32

from ...kvcache import BlockTables, Int32Array
from ..models import Batch
from ..request import lease_of
from ..step_plan import StepPlan
from .batch_state import BatchState
from .sampling import SamplingBatch

_NUM_ROW_ARRAYS = 5
NO_SLOT: Final = np.int32(2**31 - 1)
"""Slot of a padding row: reads are clamped, writes are dropped."""


def power_of_two_buckets(smallest: int, largest: int) -> tuple[int, ...]:
    """Return smallest, its doubles below largest, and largest.

    Example:
        >>> power_of_two_buckets(4, 24)
        (4, 8, 16, 24)
    """
    buckets = []
    size = smallest
    while size < largest:
        buckets.append(size)
        size *= 2
    return (*buckets, largest)


def _buckets(first: int, second: int, largest: int) -> tuple[int, ...]:
    """Return first, second, its doubles below largest, and largest."""
    rest = power_of_two_buckets(min(second, largest), largest)
    return (first, *rest) if first < rest[0] else rest


@dataclass(frozen=True)
class Shape:
    """The static shape of one compiled program.

    Attributes:
        is_decode: whether each row has one token (`paged_decode`); otherwise rows are ragged.
        num_tokens: number of tokens, T.
        num_rows: number of rows, B; equal to T for decode.
    """

    is_decode: bool
    num_tokens: int
    num_rows: int

    @property
    def packed_size(self) -> int:
        """Length of the packed vector."""
        return self.num_tokens + _NUM_ROW_ARRAYS * self.num_rows


class Shapes:
    """The shapes of an engine: decode shapes by number of rows, extend shapes by tokens."""

    def __init__(self, *, token_budget: int, max_running: int, decode: bool = True) -> None:
        """List the shapes. Without `decode`, rows of one token use the extend shapes."""
        # A step of 2 to 7 rows takes about as long as one of 8: each reads all weights.
        rows = _buckets(1, 8, max_running) if decode else ()
        self.decode = tuple([Shape(True, each, each) for each in rows])
        self.extend = tuple(
            Shape(False, tokens, max_running) for tokens in _buckets(32, 128, token_budget)
        )

    def fit(self, num_tokens: int, num_chunks: int) -> Shape:
        """Return the smallest shape that holds these chunks."""
        is_decode = num_tokens == num_chunks and self.decode
        family = self.decode if is_decode else self.extend
        return next(shape for shape in family if num_tokens <= shape.num_tokens)


def pack(
    plan: StepPlan, slots: Int32Array, shape: Shape, tables: BlockTables, block_size: int
) -> Int32Array:
    """Write the arrays of a step into one int32 vector.

    Padding rows have no tokens, and padding tokens write no KV. Tokens in shared blocks write none
    either: these blocks are immutable and already hold that KV. A decode row never has one.

    Args:
        plan: the step. The token of a decode row is the last one of its request, which is on the
            device.
        slots: int32 ``[chunks]``, place of each chunk's request in the batch on the device.
        shape: shape of the program.
        tables: block tables of the requests.
        block_size: tokens per block.
    """
    packed = np.zeros(shape.packed_size, np.int32)
    tokens = packed[: shape.num_tokens]
    slot, kv_lengths, q_lengths, write_from, last_blocks = _rows(packed, shape)
    num_decode, num_rows = plan.num_decode, plan.num_chunks
    slot[:num_rows] = slots
    slot[num_rows:] = NO_SLOT
    tokens[:num_decode] = -1
    kv_lengths[:num_decode] = plan.decode.starts
    q_lengths[:num_decode] = 1
    cursor = num_decode
    for row, (request, start, length) in enumerate(plan.prefill, start=num_decode):
        kv_lengths[row], q_lengths[row] = start, length
        write_from[row] = lease_of(request).num_shared_blocks * block_size
        tokens[cursor : cursor + length] = request.tokens[start : start + length]
        cursor += length
    kv_lengths += q_lengths
    columns = (kv_lengths[:num_rows] - 1) // block_size
    last_blocks[:num_rows] = tables.at(plan.table_rows, columns)
    return packed


def unpack(
    packed: Int32[Array, " packed"], state: BatchState, shape: Shape, block_size: int
) -> tuple[Batch, SamplingBatch, BatchState, Int32[Array, " rows"]]:
    """Make the arrays of a step inside the compiled step.

    Returns:
        The batch, the parameters of its sampling, the state with the new blocks, and the slot of
        each row.
    """
    tokens = packed[: shape.num_tokens]
    slots, kv_lengths, q_lengths, write_from, last_blocks = _rows(packed, shape)
    columns = (kv_lengths - 1) // block_size
    tables = state.block_tables.at[slots, columns].set(last_blocks, mode="drop")
    state = state._replace(block_tables=tables)
    own = state.at(slots)
    block_tables = jnp.where((q_lengths > 0)[:, None], own.block_tables, 0)

    ends = jnp.cumsum(q_lengths)
    starts = ends - q_lengths
    place = jnp.arange(shape.num_tokens, dtype=jnp.int32)
    row = place if shape.is_decode else jnp.searchsorted(ends, place, side="right")
    row = jnp.minimum(row, shape.num_rows - 1)
    is_token = place < ends[-1]
    positions = jnp.where(is_token, kv_lengths[row] - ends[row] + place, 0)
    block = block_tables[row, positions // block_size]
    writes = is_token & (positions >= write_from[row])
    kv_slots = jnp.where(writes, block * block_size + positions % block_size, -1)
    tokens = jnp.where(tokens < 0, own.last_tokens[row], tokens)
    batch = Batch(
        tokens=tokens,
        positions=positions,
        slots=kv_slots,
        block_tables=block_tables,
        kv_lengths=kv_lengths,
        q_lengths=q_lengths,
        q_starts=jnp.where(q_lengths > 0, starts, 0),
        logit_rows=jnp.maximum(starts + q_lengths - 1, 0) * (q_lengths > 0),
    )
    # A padding row is greedy, whatever its clamped slot says: sampling then skips its slow path.
    temperature = jnp.where(q_lengths > 0, own.temperature, 0)
    sampling = SamplingBatch(temperature, own.top_k, own.top_p, own.seed, kv_lengths)
    return batch, sampling, state, slots


def _rows(packed: Any, shape: Shape) -> Any:
    """Return the arrays of rows, as views of a vector of either side."""
    return packed[shape.num_tokens :].reshape(_NUM_ROW_ARRAYS, shape.num_rows)

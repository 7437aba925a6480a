"""Arrays of a step: compiled shapes (buckets), padding, and one packed host-to-device transfer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jax import lax
from jaxtyping import Array, Int32

from ...kvcache import BlockTables, Int32Array
from ..errors import ConfigError
from ..models import Batch
from ..step_plan import Chunk
from .sampling import SamplingBatch

_SMALLEST_EXTEND_TOKENS = 16


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


@dataclass(frozen=True)
class Shape:
    """The static shape of one compiled program.

    Attributes:
        is_decode: whether each row has one token (`paged_decode`); otherwise rows are ragged.
        num_tokens: number of tokens, T.
        num_rows: number of rows, B; equal to T for decode.
        table_width: blocks per row of the block table.
    """

    is_decode: bool
    num_tokens: int
    num_rows: int
    table_width: int

    @property
    def sizes(self) -> tuple[int, ...]:
        """Lengths of the packed arrays: 3 per token, the block tables, 4 + 5 per row."""
        return (*(self.num_tokens,) * 3, self.num_rows * self.table_width, *(self.num_rows,) * 9)


class Shapes:
    """The shapes of an engine: decode shapes by number of rows, extend shapes by tokens."""

    def __init__(
        self, *, token_budget: int, max_running: int, table_width: int, decode: bool = True
    ) -> None:
        """List the shapes. Without `decode`, rows of one token use the extend shapes."""
        if table_width < 1:
            raise ConfigError(f"table_width must be at least 1, got {table_width}")
        rows = power_of_two_buckets(1, max_running) if decode else ()
        self.decode = tuple([Shape(True, each, each, table_width) for each in rows])
        smallest = min(_SMALLEST_EXTEND_TOKENS, token_budget)
        self.extend = tuple(
            Shape(False, tokens, max_running, table_width)
            for tokens in power_of_two_buckets(smallest, token_budget)
        )

    def fit(self, chunks: Sequence[Chunk]) -> Shape:
        """Return the smallest shape that holds these chunks."""
        num_tokens = sum([chunk.length for chunk in chunks])
        is_decode = num_tokens == len(chunks) and self.decode
        family = self.decode if is_decode else self.extend
        return next(shape for shape in family if num_tokens <= shape.num_tokens)


def pack(chunks: Sequence[Chunk], shape: Shape, tables: BlockTables, block_size: int) -> Int32Array:
    """Write the arrays of a step into one int32 vector, in the order of `Shape.sizes`.

    Padding rows have no tokens, and padding tokens write no KV. Tokens in shared blocks write none
    either: these blocks are immutable and already hold that KV.
    """
    packed = np.zeros(sum(shape.sizes), np.int32)
    parts = np.split(packed, np.cumsum(shape.sizes)[:-1])
    tokens, positions, slots, flat_tables, kv_lengths, q_lengths, q_starts, logit_rows = parts[:8]
    temperature, top_k, top_p, seed, new_positions = parts[8:]
    block_tables = flat_tables.reshape(shape.num_rows, shape.table_width)
    slots[:] = -1
    cursor = 0
    for row, chunk in enumerate(chunks):
        request, start, length = chunk.request, chunk.start, chunk.length
        lease, end, stop = request.lease, start + length, cursor + length
        assert lease is not None, f"{request!r} is computed without a lease"
        table = tables.row(lease.row)[: -(-end // block_size)]
        block_tables[row, : len(table)] = table
        tokens[cursor:stop] = request.tokens[start:end]
        place = np.arange(start, end, dtype=np.int32)
        positions[cursor:stop] = place
        slot = table[place // block_size] * block_size + place % block_size
        slots[cursor:stop] = np.where(place < lease.num_shared_blocks * block_size, -1, slot)
        kv_lengths[row], q_lengths[row], q_starts[row] = end, length, cursor
        logit_rows[row] = stop - 1
        sampling = request.sampling
        temperature.view(np.float32)[row] = sampling.temperature
        top_p.view(np.float32)[row] = sampling.top_p
        top_k[row], new_positions[row] = sampling.top_k, end
        seed.view(np.uint32)[row] = sampling.seed
        cursor = stop
    return packed


def unpack(packed: Int32[Array, " packed"], shape: Shape) -> tuple[Batch, SamplingBatch]:
    """Split the vector of `pack` inside the compiled step."""
    ends = np.cumsum(shape.sizes)
    parts = [packed[end - size : end] for end, size in zip(ends, shape.sizes, strict=True)]
    tokens, positions, slots, flat_tables, *rows = parts
    block_tables = flat_tables.reshape(shape.num_rows, shape.table_width)
    batch = Batch(tokens, positions, slots, block_tables, *rows[:4])
    temperature, top_k, top_p, seed, new_positions = rows[4:]
    as_float32 = np.dtype(np.float32)
    sampling = SamplingBatch(
        temperature=lax.bitcast_convert_type(temperature, as_float32),
        top_k=top_k,
        top_p=lax.bitcast_convert_type(top_p, as_float32),
        seed=lax.bitcast_convert_type(seed, np.dtype(np.uint32)),
        position=new_positions,
    )
    return batch, sampling

"""Buckets, and packing a plan into arrays and back."""

import doctest

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.kvcache import CacheManager
from radixkv.scheduler.engine import step_arrays as batching
from radixkv.scheduler.engine.step_arrays import Shape, Shapes, pack, power_of_two_buckets, unpack
from radixkv.scheduler.errors import ConfigError
from radixkv.scheduler.request import GREEDY, Request, SamplingParams
from radixkv.scheduler.step_plan import Chunk

BLOCK_SIZE = 4


def test_examples_in_the_docstrings():
    assert doctest.testmod(batching).failed == 0


def running(
    manager: CacheManager, prompt: list[int], sampling: SamplingParams = GREEDY, publish: int = 0
) -> Request:
    """Return a request with blocks, of which the first `publish` tokens are shared."""
    request = Request("a", prompt, 4, sampling=sampling)
    request.lease = manager.admit(manager.match(request.tokens))
    manager.publish(request.lease, request.tokens[:publish])
    return request


def unpacked(chunks, shape: Shape, manager: CacheManager):
    packed = pack(chunks, shape, manager.tables, manager.block_size)
    assert packed.dtype == np.int32 and packed.shape == (sum(shape.sizes),)
    both = jax.jit(lambda vector: unpack(vector, shape))(packed)
    return jax.tree.map(np.asarray, both)


# Buckets


@pytest.mark.parametrize(
    ("smallest", "largest", "buckets"),
    [
        (1, 1, (1,)),
        (1, 4, (1, 2, 4)),
        (1, 6, (1, 2, 4, 6)),
        (16, 16, (16,)),
        (16, 33, (16, 32, 33)),
    ],
)
def test_buckets_double_up_to_the_largest(smallest, largest, buckets):
    assert power_of_two_buckets(smallest, largest) == buckets


@given(st.integers(1, 300), st.integers(1, 300))
def test_buckets_hold_every_size_and_waste_less_than_half(smallest, largest):
    smallest = min(smallest, largest)
    buckets = power_of_two_buckets(smallest, largest)
    assert buckets[-1] == largest and list(buckets) == sorted(set(buckets))
    for size in range(smallest, largest + 1):
        fit = next(bucket for bucket in buckets if bucket >= size)
        assert fit < 2 * size


def test_shapes_cover_decode_by_rows_and_extend_by_tokens():
    shapes = Shapes(token_budget=40, max_running=6, table_width=3)
    assert [(s.num_tokens, s.num_rows, s.table_width) for s in shapes.decode] == [
        (1, 1, 3),
        (2, 2, 3),
        (4, 4, 3),
        (6, 6, 3),
    ]
    assert [(s.num_tokens, s.num_rows, s.table_width) for s in shapes.extend] == [
        (16, 6, 3),
        (32, 6, 3),
        (40, 6, 3),
    ]
    assert all(s.is_decode for s in shapes.decode) and not any(s.is_decode for s in shapes.extend)


def test_a_small_budget_has_one_extend_shape():
    assert [s.num_tokens for s in Shapes(token_budget=5, max_running=2, table_width=1).extend] == [
        5
    ]


@given(st.integers(1, 8), st.integers(0, 60), st.data())
def test_every_plan_within_the_budget_fits_a_shape(max_running, more, data):
    budget = max_running + more
    shapes = Shapes(token_budget=budget, max_running=max_running, table_width=1)
    request = Request("a", [0], 1)
    lengths: list[int] = []
    for _ in range(data.draw(st.integers(1, max_running))):
        lengths.append(data.draw(st.integers(1, budget - sum(lengths) - max_running + 1)))
        if budget - sum(lengths) < max_running:
            break
    shape = shapes.fit([Chunk(request, 0, length) for length in lengths])
    assert shape.num_tokens >= sum(lengths) and shape.num_rows >= len(lengths)
    assert shape.is_decode == (max(lengths) == 1)
    family = shapes.decode if shape.is_decode else shapes.extend
    smaller = [s for s in family if s.num_tokens < shape.num_tokens]
    assert all(s.num_tokens < sum(lengths) for s in smaller)


def test_a_width_below_one_is_refused():
    with pytest.raises(ConfigError, match=r"^table_width must be at least 1, got 0$"):
        Shapes(token_budget=4, max_running=1, table_width=0)


# Packing


def test_a_ragged_step():
    manager = CacheManager(16, BLOCK_SIZE)
    a = running(manager, [10, 11, 12, 13, 14], publish=4)
    b = running(manager, [20, 21, 22, 23, 24, 25])
    assert a.lease is not None and b.lease is not None
    shape = Shape(False, num_tokens=8, num_rows=3, table_width=3)
    batch, _ = unpacked([Chunk(a, 4, 1), Chunk(b, 1, 5)], shape, manager)
    a0, a1 = a.lease.block_table.tolist()
    b0, b1 = b.lease.block_table.tolist()
    assert batch.tokens.tolist() == [14, 21, 22, 23, 24, 25, 0, 0]
    assert batch.positions.tolist() == [4, 1, 2, 3, 4, 5, 0, 0]
    assert batch.slots.tolist() == [
        a1 * 4,
        b0 * 4 + 1,
        b0 * 4 + 2,
        b0 * 4 + 3,
        b1 * 4,
        b1 * 4 + 1,
        -1,
        -1,
    ]
    assert batch.block_tables.tolist() == [[a0, a1, 0], [b0, b1, 0], [0, 0, 0]]
    assert batch.kv_lengths.tolist() == [5, 6, 0]
    assert batch.q_lengths.tolist() == [1, 5, 0]
    assert batch.q_starts.tolist() == [0, 1, 0]
    assert batch.logit_rows.tolist() == [0, 5, 0]


def test_a_decode_step_has_a_token_per_row():
    manager = CacheManager(16, BLOCK_SIZE)
    requests = [running(manager, [i, i + 1, i + 2]) for i in (10, 20, 30)]
    shape = Shape(True, num_tokens=4, num_rows=4, table_width=2)
    batch, sampling = unpacked([Chunk(r, 2, 1) for r in requests], shape, manager)
    assert batch.tokens.tolist() == [12, 22, 32, 0]
    assert batch.kv_lengths.tolist() == [3, 3, 3, 0]
    assert batch.q_starts.tolist() == [0, 1, 2, 0]
    assert sampling.position.tolist() == [3, 3, 3, 0]


def test_tokens_in_shared_blocks_write_nothing():
    manager = CacheManager(16, BLOCK_SIZE)
    first = running(manager, list(range(8)), publish=8)
    whole_hit = running(manager, list(range(8)))
    assert whole_hit.lease is not None and whole_hit.lease.num_shared_blocks == 2
    shape = Shape(False, num_tokens=16, num_rows=2, table_width=2)
    batch, _ = unpacked([Chunk(whole_hit, 7, 1), Chunk(first, 6, 2)], shape, manager)
    assert set(batch.slots.tolist()) == {-1}
    assert batch.kv_lengths.tolist() == [8, 8]
    assert batch.block_tables[0].tolist() == batch.block_tables[1].tolist()


def test_a_chunk_names_only_blocks_up_to_its_end():
    manager = CacheManager(16, BLOCK_SIZE)
    request = running(manager, list(range(12)))
    assert request.lease is not None
    shape = Shape(False, num_tokens=8, num_rows=1, table_width=2)  # narrower than its table
    batch, _ = unpacked([Chunk(request, 0, 8)], shape, manager)
    assert batch.block_tables.tolist() == [request.lease.block_table[:2].tolist()]


def test_sampling_parameters_are_carried_bit_for_bit():
    manager = CacheManager(16, BLOCK_SIZE)
    params = [
        SamplingParams(temperature=0.1, top_k=7, top_p=0.9, seed=2**32 - 1),
        SamplingParams(temperature=1e-3, top_k=2**31 - 1, top_p=1e-6, seed=2**31),
    ]
    chunks = [Chunk(running(manager, [1, 2, 3], p), 0, 3) for p in params]
    shape = Shape(False, num_tokens=16, num_rows=3, table_width=1)
    _, sampling = unpacked(chunks, shape, manager)
    assert sampling.temperature.tolist() == [np.float32(0.1), np.float32(1e-3), 0]
    assert sampling.top_p.tolist() == [np.float32(0.9), np.float32(1e-6), 0]
    assert sampling.top_k.tolist() == [7, 2**31 - 1, 0]
    assert sampling.seed.dtype == np.uint32 and sampling.seed.tolist() == [2**32 - 1, 2**31, 0]
    assert sampling.position.tolist() == [3, 3, 0]  # the place that the new token takes


@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    spare=st.tuples(st.integers(0, 3), st.integers(0, 2), st.integers(0, 2)),
    data=st.data(),
)
def test_unpack_returns_what_pack_wrote(lengths, spare, data):
    manager = CacheManager(64, BLOCK_SIZE)
    chunks = []
    for index, length in enumerate(lengths):
        start = data.draw(st.integers(0, 5))
        prompt = [100 * index + i for i in range(start + length)]
        publish = data.draw(st.integers(0, start))
        chunks.append(Chunk(running(manager, prompt, publish=publish), start, length))
    shape = Shape(False, sum(lengths) + spare[0], len(lengths) + spare[1], 4 + spare[2])
    packed = pack(chunks, shape, manager.tables, BLOCK_SIZE)
    # Not jitted, because every example has another shape.
    batch, _ = jax.tree.map(np.asarray, unpack(packed, shape))  # type: ignore[arg-type]
    for row, chunk in enumerate(chunks):
        lease = chunk.request.lease
        assert lease is not None
        end = chunk.start + chunk.length
        own = slice(batch.q_starts[row], batch.q_starts[row] + batch.q_lengths[row])
        assert batch.logit_rows[row] == own.stop - 1
        assert batch.kv_lengths[row] == end
        assert batch.tokens[own].tolist() == chunk.request.tokens[chunk.start : end].tolist()
        assert batch.positions[own].tolist() == list(range(chunk.start, end))
        for position, slot in zip(batch.positions[own], batch.slots[own], strict=True):
            block, offset = divmod(int(position), BLOCK_SIZE)
            writes = block >= lease.num_shared_blocks
            assert slot == (int(lease.block_table[block]) * BLOCK_SIZE + offset if writes else -1)
            assert batch.block_tables[row, block] == lease.block_table[block]
    assert not batch.q_lengths[len(chunks) :].any() and not batch.kv_lengths[len(chunks) :].any()
    assert (batch.slots[sum(lengths) :] == -1).all()
    assert not batch.block_tables[len(chunks) :].any()

"""Buckets, and packing a plan into arrays and back."""

import doctest
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.kvcache import CacheManager
from radixkv.scheduler.engine import step_arrays as batching
from radixkv.scheduler.engine.batch_state import DeviceBatch, Needs, needs_of
from radixkv.scheduler.engine.step_arrays import Shape, Shapes, pack, power_of_two_buckets, unpack
from radixkv.scheduler.request import GREEDY, Request, SamplingParams, lease_of
from radixkv.scheduler.step_plan import Chunk, DecodeRows, StepPlan

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


def plan_of(chunks: list[Chunk], num_decode: int = 0) -> StepPlan:
    """Return a plan of chunks, the first of which are decode rows."""
    first = chunks[:num_decode]
    starts = np.array([chunk.start for chunk in first], np.int32)
    rows = np.array([lease_of(chunk.request).row for chunk in first], np.int32)
    decode = DecodeRows([chunk.request for chunk in first], starts, rows)
    return StepPlan(decode, chunks[num_decode:], sum(chunk.length for chunk in chunks))


step_of = jax.jit(
    lambda packed, state, shape: unpack(packed, state, shape, BLOCK_SIZE), static_argnums=2
)

with_tokens = jax.jit(lambda tokens, rows, new: tokens.at[rows].set(new, mode="drop"))
"""Dispatched op by op, each of the two would compile dozens of small programs."""


def unpacked(chunks, shape: Shape, manager: CacheManager, *, width: int, num_decode: int = 0):
    """Send the requests to a device that knows none, and unpack a step of theirs."""
    plan = plan_of(chunks, num_decode)
    assert plan.chunks == chunks and plan.num_chunks == len(chunks)
    assert [plan.chunk(index) for index in range(plan.num_chunks)] == chunks
    assert plan.requests == [chunk.request for chunk in chunks]
    device = DeviceBatch(shape.num_rows, width)
    slots = device.send(plan, manager.tables)
    packed = pack(plan, slots, shape, manager.tables, manager.block_size)
    assert packed.dtype == np.int32 and packed.shape == (shape.packed_size,)
    assert manager.block_size == BLOCK_SIZE
    batch, sampling, _, _ = step_of(jnp.asarray(packed), device.state, shape)
    return jax.tree.map(np.asarray, (batch, sampling))


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
    shapes = Shapes(token_budget=40, max_running=6)
    assert [(s.num_tokens, s.num_rows) for s in shapes.decode] == [(1, 1), (6, 6)]
    assert [(s.num_tokens, s.num_rows) for s in shapes.extend] == [(32, 6), (40, 6)]
    assert all(s.is_decode for s in shapes.decode) and not any(s.is_decode for s in shapes.extend)


@pytest.mark.parametrize(
    ("most", "rows", "tokens"),
    [
        (1, (1,), (1,)),
        (2, (1, 2), (2,)),
        (8, (1, 8), (8,)),
        (9, (1, 8, 9), (9,)),
        (32, (1, 8, 16, 32), (32,)),
        (33, (1, 8, 16, 32, 33), (32, 33)),
        (128, (1, 8, 16, 32, 64, 128), (32, 128)),
        (129, (1, 8, 16, 32, 64, 128, 129), (32, 128, 129)),
        (512, (1, 8, 16, 32, 64, 128, 256, 512), (32, 128, 256, 512)),
    ],
)
def test_small_shapes_are_few(most, rows, tokens):
    """Each shape is a program to compile, and small ones cost about the same."""
    shapes = Shapes(token_budget=most, max_running=most)
    assert tuple(shape.num_tokens for shape in shapes.decode) == rows
    assert tuple(shape.num_tokens for shape in shapes.extend) == tokens
    assert Shapes(token_budget=most, max_running=1, decode=False).decode == ()


def test_a_small_budget_has_one_extend_shape():
    assert [s.num_tokens for s in Shapes(token_budget=5, max_running=2).extend] == [5]


@given(st.integers(1, 8), st.integers(0, 60), st.data())
def test_every_plan_within_the_budget_fits_a_shape(max_running, more, data):
    budget = max_running + more
    shapes = Shapes(token_budget=budget, max_running=max_running)
    lengths: list[int] = []
    for _ in range(data.draw(st.integers(1, max_running))):
        lengths.append(data.draw(st.integers(1, budget - sum(lengths) - max_running + 1)))
        if budget - sum(lengths) < max_running:
            break
    shape = shapes.fit(sum(lengths), len(lengths))
    assert shape.num_tokens >= sum(lengths) and shape.num_rows >= len(lengths)
    assert shape.is_decode == (max(lengths) == 1)
    family = shapes.decode if shape.is_decode else shapes.extend
    smaller = [s for s in family if s.num_tokens < shape.num_tokens]
    assert all(s.num_tokens < sum(lengths) for s in smaller)


# Packing


def test_a_ragged_step():
    manager = CacheManager(16, BLOCK_SIZE)
    a = running(manager, [10, 11, 12, 13, 14], publish=4)
    b = running(manager, [20, 21, 22, 23, 24, 25])
    assert a.lease is not None and b.lease is not None
    shape = Shape(False, num_tokens=8, num_rows=3)
    batch, _ = unpacked([Chunk(a, 4, 1), Chunk(b, 1, 5)], shape, manager, width=3)
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


@pytest.mark.parametrize("num_decode", [0, 1, 3])
def test_a_decode_step_has_a_token_per_row(num_decode):
    manager = CacheManager(16, BLOCK_SIZE)
    requests = [running(manager, [i, i + 1, i + 2]) for i in (10, 20, 30)]
    shape = Shape(True, num_tokens=4, num_rows=4)
    chunks = [Chunk(r, 2, 1) for r in requests]
    batch, sampling = unpacked(chunks, shape, manager, width=2, num_decode=num_decode)
    assert batch.tokens.tolist() == [12, 22, 32, 0]
    assert batch.kv_lengths.tolist() == [3, 3, 3, 0]
    assert batch.q_starts.tolist() == [0, 1, 2, 0]
    assert sampling.position.tolist() == [3, 3, 3, 0]


def test_tokens_in_shared_blocks_write_nothing():
    manager = CacheManager(16, BLOCK_SIZE)
    first = running(manager, list(range(8)), publish=8)
    whole_hit = running(manager, list(range(8)))
    assert whole_hit.lease is not None and whole_hit.lease.num_shared_blocks == 2
    shape = Shape(False, num_tokens=16, num_rows=2)
    batch, _ = unpacked([Chunk(whole_hit, 7, 1), Chunk(first, 6, 2)], shape, manager, width=2)
    assert set(batch.slots.tolist()) == {-1}
    assert batch.kv_lengths.tolist() == [8, 8]
    assert batch.block_tables[0].tolist() == batch.block_tables[1].tolist()


def test_a_row_has_its_whole_block_table_and_zeros():
    manager = CacheManager(16, BLOCK_SIZE)
    request = running(manager, list(range(12)))
    assert request.lease is not None
    shape = Shape(False, num_tokens=8, num_rows=1)
    batch, _ = unpacked([Chunk(request, 0, 8)], shape, manager, width=4)
    assert batch.block_tables.tolist() == [[*request.lease.block_table.tolist(), 0]]


def test_sampling_parameters_are_carried_bit_for_bit():
    manager = CacheManager(16, BLOCK_SIZE)
    params = [
        SamplingParams(temperature=0.1, top_k=7, top_p=0.9, seed=2**32 - 1),
        SamplingParams(temperature=1e-3, top_k=2**31 - 1, top_p=1e-6, seed=2**31),
    ]
    chunks = [Chunk(running(manager, [1, 2, 3], p), 0, 3) for p in params]
    shape = Shape(False, num_tokens=16, num_rows=2)
    _, sampling = unpacked(chunks, shape, manager, width=1)
    assert sampling.temperature.tolist() == [np.float32(0.1), np.float32(1e-3)]
    assert sampling.top_p.tolist() == [np.float32(0.9), np.float32(1e-6)]
    assert sampling.top_k.tolist() == [7, 2**31 - 1]
    assert sampling.seed.dtype == np.uint32 and sampling.seed.tolist() == [2**32 - 1, 2**31]
    assert sampling.position.tolist() == [3, 3]  # the place that the new token takes


@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    num_rows=st.sampled_from([4, 6]),
    data=st.data(),
)
def test_unpack_returns_what_pack_wrote(lengths, num_rows, data):
    manager = CacheManager(64, BLOCK_SIZE)
    chunks = []
    for index, length in enumerate(lengths):
        start = data.draw(st.integers(0, 5))
        prompt = [100 * index + i for i in range(start + length)]
        publish = data.draw(st.integers(0, start))
        chunks.append(Chunk(running(manager, prompt, publish=publish), start, length))
    # Few shapes, because each compiles; with or without padding.
    shape = Shape(False, -(-sum(lengths) // 9) * 9, num_rows)
    batch, sampling = unpacked(chunks, shape, manager, width=5)
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
    assert not sampling.temperature[len(chunks) :].any()  # greedy, without the slow path


# What stays on the device


class DeviceWorld:
    """Requests that come, grow and go, and a device that is told what changed."""

    def __init__(self, num_slots: int) -> None:
        self.manager = CacheManager(64, BLOCK_SIZE)
        self.device = DeviceBatch(num_slots, 8)
        self.shape = Shape(True, num_slots, num_slots)
        self.requests: list[Request] = []
        self.num_made = 0
        self.last: dict[Request, list[int]] = {}  # tables of the requests of the last step

    def admit(self, prompt: list[int]) -> None:
        self.num_made += 1
        request = Request(
            f"r{self.num_made}", prompt, 8, sampling=SamplingParams(seed=self.num_made)
        )
        request.lease = self.manager.admit(self.manager.match(prompt))
        self.requests.append(request)

    def step(self, chosen: list[Request]) -> None:
        """Compute the last token of some requests: the device must know all of each."""
        chunks = [Chunk(request, request.num_tokens - 1, 1) for request in chosen]
        plan, tables = plan_of(chunks, len(chunks)), self.manager.tables
        known, self.last = self.last, {each: lease_of(each).block_table.tolist() for each in chosen}
        before = self.device.state
        slots = self.device.send(plan, tables)
        assert len(set(slots.tolist())) == len(slots)
        sent = self.device.state
        if all(
            each in known and self.last[each][: len(known[each])] == known[each] for each in chosen
        ):
            assert sent is before, "requests that have only grown are sent"
        assert self.device.send(plan, tables).tolist() == slots.tolist()
        assert self.device.state is sent, "a request is sent twice"
        packed = pack(plan, slots, self.shape, tables, BLOCK_SIZE)
        state = self.device.state
        batch, sampling, state, rows = step_of(jnp.asarray(packed), state, self.shape)
        batch, sampling = jax.tree.map(np.asarray, (batch, sampling))
        for row, request in enumerate(chosen):
            table = lease_of(request).block_table.tolist()
            assert batch.block_tables[row].tolist() == table + [0] * (8 - len(table))
            assert batch.tokens[row] == request.tokens[-1]
            assert sampling.seed[row] == request.sampling.seed
        # The device samples a token for each row, and keeps it as the last one.
        sampled = [100 + self.num_made + row for row in range(self.shape.num_rows)]
        last_tokens = with_tokens(state.last_tokens, rows, np.array(sampled, np.int32))
        self.device.state = state._replace(last_tokens=last_tokens)
        for token, request in zip(sampled, chosen, strict=False):
            self.manager.publish(lease_of(request), request.tokens)
            if request.append(token) is None:
                self.manager.extend(lease_of(request), 1)
            else:
                self.end(request)

    def end(self, request: Request) -> None:
        self.requests.remove(request)
        self.manager.release(lease_of(request))


@given(st.data())
def test_the_device_follows_every_block_table(data):
    num_slots = data.draw(st.integers(1, 3))
    world = DeviceWorld(num_slots)
    prompts = st.lists(st.integers(0, 1), min_size=1, max_size=9)
    for _ in range(data.draw(st.integers(1, 20))):
        if len(world.requests) < 5 and data.draw(st.booleans()):
            world.admit(data.draw(prompts))
        elif world.requests and data.draw(st.integers(0, 5)) == 0:
            world.end(data.draw(st.sampled_from(world.requests)))
        elif world.requests:
            some = st.lists(
                st.sampled_from(world.requests),
                min_size=1,
                max_size=num_slots,
                unique_by=lambda request: request.request_id,
            )
            world.step(data.draw(some))


def test_a_replaced_duplicate_is_sent_again():
    world = DeviceWorld(2)
    world.admit([1] * 5)
    world.admit([1] * 5)
    first, second = world.requests
    versions = world.manager.tables.versions.copy()
    world.step([first, second])  # the second one's first block is replaced by the first one's
    assert lease_of(first).block_table[0] == lease_of(second).block_table[0]
    changed = np.flatnonzero(world.manager.tables.versions != versions)
    assert changed.tolist() == [lease_of(second).row]
    world.step([second, first])


def test_a_new_request_takes_the_slot_of_one_that_has_ended():
    """Not that of one whose last token only the device has; and no need of the former is left."""
    manager, device = CacheManager(16, BLOCK_SIZE), DeviceBatch(2, 4)
    draws = SamplingParams(temperature=0.5, repetition_penalty=1.5)
    first, second, third = (
        running(manager, [token, 2, 3], sampling)
        for token, sampling in ((4, GREEDY), (5, draws), (6, SamplingParams(temperature=0.5)))
    )

    def send(request: Request, start: int) -> int:
        plan = plan_of([Chunk(request, start, 1)], 1)
        slots = device.send(plan, manager.tables)
        assert device.needs(slots) == needs_of(request)
        return slots.item()

    assert [send(first, 2), send(second, 2)] == [0, 1]
    manager.release(lease_of(second))
    assert [send(third, 2), send(first, 3), send(third, 3)] == [1, 0, 1]


def test_tokens_are_counted_again_only_if_the_host_knows_all_of_them():
    """The device has counted the token of a step in flight, and the host has not got it."""
    manager, device = CacheManager(16, BLOCK_SIZE), DeviceBatch(1, 4)
    penalised, plain = (
        running(manager, [1, 2, 3], SamplingParams(repetition_penalty=penalty))
        for penalty in (1.5, 1.0)
    )

    def counted(request: Request, start: int, *, is_replaced: bool = False) -> list[Any]:
        manager.tables.versions[lease_of(request).row] += is_replaced
        device.send(plan_of([Chunk(request, start, 1)], 1), manager.tables)
        found, device.to_count = device.to_count, []
        return found

    assert counted(penalised, 2) == [(0, penalised)]
    assert counted(penalised, 3) == []
    assert counted(penalised, 3, is_replaced=True) == []
    assert counted(penalised, 2, is_replaced=True) == [(0, penalised)]
    assert counted(plain, 2) == []
    assert counted(penalised, 2) == [(0, penalised)], "its slot was that of another"


@pytest.mark.parametrize(
    ("sampling", "options", "needs"),
    [
        ({}, {}, Needs(0)),
        ({"top_k": 3, "top_p": 0.5}, {}, Needs(0)),
        ({"min_p": 0.5}, {}, Needs(0)),  # which drops no greedy token
        ({"min_tokens": 2}, {}, Needs(0)),  # no token would end the output
        ({}, {"stop_token_ids": [5]}, Needs(0)),
        ({"temperature": 0.5}, {}, Needs.DRAWS),
        ({"temperature": 0.5, "min_p": 0.5}, {}, Needs.DRAWS | Needs.ADJUSTS),
        ({"min_tokens": 2}, {"stop_token_ids": [5]}, Needs.ADJUSTS),
        ({"repetition_penalty": 1.5}, {}, Needs.COUNTS | Needs.ADJUSTS),
        ({"presence_penalty": -0.5}, {}, Needs.COUNTS | Needs.ADJUSTS),
        ({"frequency_penalty": 0.5}, {}, Needs.COUNTS | Needs.ADJUSTS),
        ({}, {"guide": object()}, Needs.GUIDE | Needs.ADJUSTS),
        ({}, {"logprobs": 0}, Needs.LOGPROBS),
        ({}, {"prompt_logprobs": 0}, Needs.PROMPT_LOGPROBS),
    ],
)
def test_a_request_takes_no_program_that_it_does_not_need(
    sampling: dict[str, Any], options: dict[str, Any], needs: Needs
) -> None:
    assert needs_of(Request("a", [1], 4, sampling=SamplingParams(**sampling), **options)) == needs

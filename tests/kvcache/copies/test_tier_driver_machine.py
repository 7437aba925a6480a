"""Random operations of a tier driver against a NumPy model.

The machine obeys the rules of a manager: until its operation is fenced, a host block that is being
filled is neither read nor written by others, and one that storage reads is not written. Device
blocks are overwritten at any time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from radixkv.kvcache import OperationResult
from radixkv.kvcache.ids import OpId
from radixkv.kvcache.storage import Kind, Status
from radixkv.kvcache.tiers.operations import Operation, OpKind

from ...profiles import scaled
from ..driving import BLOCK_BYTES, HOST_BLOCKS, SIZES, Asked, Bench, FakeStorage

KEYS = [bytes([number]) * 32 for number in range(4)]
DEVICE_BLOCKS = range(1, SIZES["num_blocks"] + 1)
PIECE = 4  # three blocks are padded, five are two pieces
ROOM = 3  # blocks in staging, unless a piece of four is alone there
TIMEOUT_S = 10


def padded(num_blocks: int) -> int:
    """Return the number of blocks in staging of a piece."""
    return 1 << (num_blocks - 1).bit_length()


@dataclass(eq=False)
class Open:
    """An operation that has not ended or is not fenced."""

    operation: Operation
    deadline: float
    blocks: set[int]  # host blocks in use
    ok: list[bool] = field(default_factory=list)
    arrived: dict[int, np.ndarray] = field(default_factory=dict)  # contents after success
    pieces: int = 0  # submitted, not written or withdrawn
    ended: bool = False


class DriverMachine(RuleBasedStateMachine):
    dtype: Any = jnp.float32

    def __init__(self) -> None:
        super().__init__()
        self.storage = FakeStorage()
        block_bytes = BLOCK_BYTES * jnp.dtype(self.dtype).itemsize // 4
        budget = {"max_bytes_in_flight": ROOM * block_bytes}
        self.bench = Bench(self.dtype, self.storage, max_blocks_per_copy=PIECE, **budget)
        self.bench.host.held = True
        self.bench.fill()
        self.device = self.bench.device()
        self.host: dict[int, np.ndarray] = {}  # known contents of host blocks
        self.open: dict[OpId, Open] = {}
        self.writes: deque[tuple[Open, slice, np.ndarray]] = deque()  # the first one is running
        self.asked: dict[OpId, Asked] = {}
        self.results: list[OperationResult] = []
        self.fenced: list[OpId] = []
        self.tags = len(DEVICE_BLOCKS)

    # -- actions of a manager

    def free_host_blocks(self) -> list[int]:
        used = {block for each in self.open.values() for block in each.blocks}
        return [block for block in range(1, HOST_BLOCKS + 1) if block not in used]

    def draw(
        self, data: st.DataObject, blocks: Sequence[int], size: int | None = None
    ) -> list[int]:
        most = min(5, len(blocks)) if size is None else size
        ids = st.lists(st.sampled_from(blocks), min_size=size or 1, max_size=most, unique=True)
        return data.draw(ids)

    def start(
        self,
        kind: OpKind,
        sources: Sequence[int] = (),
        destinations: Sequence[int] = (),
        keys: Sequence[bytes] = (),
    ) -> Open:
        operation = self.bench.operation(kind, sources, destinations, keys, TIMEOUT_S)
        self.bench.driver.dispatch([operation], self.bench.arrays)
        entry = Open(operation, self.bench.clock.now + TIMEOUT_S, set())
        entry.ok = [False] * operation.num_blocks
        return entry

    @rule(block=st.sampled_from(DEVICE_BLOCKS))
    def step(self, block: int) -> None:
        self.tags += 1
        self.device[block] = self.bench.content(self.tags)
        self.bench.step(block, self.bench.content(self.tags))

    @precondition(lambda self: self.free_host_blocks())
    @rule(data=st.data())
    def device_to_host(self, data: st.DataObject) -> None:
        destinations = self.draw(data, self.free_host_blocks())
        sources = self.draw(data, DEVICE_BLOCKS, len(destinations))
        pieces = [
            slice(first, min(first + PIECE, len(sources)))
            for first in range(0, len(sources), PIECE)
        ]
        num_waits = self.num_waits(pieces)
        for _ in range(num_waits):
            self.bench.host.words.put(None)
        entry = self.start(OpKind.DEVICE_TO_HOST, sources, destinations)
        entry.blocks = set(destinations)
        self.open[entry.operation.id] = entry
        for block in destinations:
            self.host.pop(block, None)
        idle = not self.writes
        for piece in pieces:
            self.writes.append((entry, piece, self.device[sources[piece]].copy()))
            entry.pieces += 1
        if idle:
            self.bench.host.entered.acquire()
        for _ in range(num_waits):
            self.record_write(fails=False)

    def num_waits(self, pieces: Sequence[slice]) -> int:
        """Count the writes that end while an offload of some pieces waits for room in staging."""
        staged = [padded(len(content)) for _, _, content in self.writes]
        num_waits = 0
        for piece in pieces:
            size = padded(piece.stop - piece.start)
            while staged and sum(staged) + size > ROOM:
                del staged[0]
                num_waits += 1
            staged.append(size)
        return num_waits

    @precondition(lambda self: self.host)
    @rule(data=st.data())
    def host_to_device(self, data: st.DataObject) -> None:
        sources = self.draw(data, sorted(self.host))
        destinations = self.draw(data, DEVICE_BLOCKS, len(sources))
        entry = self.start(OpKind.HOST_TO_DEVICE, sources, destinations)
        self.device[destinations] = [self.host[block] for block in sources]
        self.results.append(OperationResult(entry.operation.id, (True,) * len(sources), True))

    @rule(blocks=st.permutations(DEVICE_BLOCKS), count=st.integers(1, 3))
    def device_to_device(self, blocks: list[int], count: int) -> None:
        sources, destinations = blocks[:count], blocks[count : 2 * count]
        entry = self.start(OpKind.DEVICE_TO_DEVICE, sources, destinations)
        self.device[destinations] = self.device[sources]
        self.results.append(OperationResult(entry.operation.id, (True,) * count, True))

    @precondition(lambda self: self.host)
    @rule(data=st.data())
    def host_to_storage(self, data: st.DataObject) -> None:
        sources = self.draw(data, sorted(self.host))[: len(KEYS)]
        entry = self.start(OpKind.HOST_TO_STORAGE, sources, keys=KEYS[: len(sources)])
        entry.blocks = set(sources)
        self.ask(entry)

    @precondition(lambda self: self.storage.values and self.free_host_blocks())
    @rule(data=st.data())
    def storage_to_host(self, data: st.DataObject) -> None:
        keys = sorted(self.storage.values)
        destinations = self.draw(data, self.free_host_blocks())[: len(keys)]
        keys = keys[: len(destinations)]
        entry = self.start(OpKind.STORAGE_TO_HOST, destinations=destinations, keys=keys)
        entry.blocks = set(destinations)
        for block in destinations:
            self.host.pop(block, None)
        self.ask(entry)

    def ask(self, entry: Open) -> None:
        self.open[entry.operation.id] = entry
        self.asked[entry.operation.id] = self.storage.asked[-1]

    @precondition(lambda self: any(not each.ended for each in self.open.values()))
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        entry = data.draw(st.sampled_from([e for e in self.open.values() if not e.ended]))
        self.bench.driver.cancel([entry.operation.id])
        entry.ended = True
        self.withdraw(entry)
        if entry.pieces == 0 and entry.operation.id not in self.asked:
            self.fence(entry)

    @rule(data=st.data(), blocks=st.permutations(DEVICE_BLOCKS))
    def cancel_what_has_ended(self, data: st.DataObject, blocks: list[int]) -> None:
        """Their results are not returned yet; those that time out may still be written."""
        self.device_to_device(blocks, 1)
        self.time_passes(TIMEOUT_S)
        assert sorted(self.bench.driver.fenced()) == sorted(self.fenced)
        self.fenced = []
        result = data.draw(st.sampled_from(self.results))
        self.bench.driver.cancel([result.op_id])
        self.results.remove(result)
        if result.fenced:
            self.fenced.append(result.op_id)

    def asker(self, asked: Asked) -> Open:
        return next(e for e in self.open.values() if self.asked.get(e.operation.id) is asked)

    # -- actions of threads, storage and time

    @precondition(lambda self: self.writes)
    @rule(fails=st.booleans())
    def end_write(self, fails: bool) -> None:
        self.bench.finish_write(MemoryError() if fails else None)
        self.record_write(fails=fails)

    def record_write(self, *, fails: bool) -> None:
        """Record that the running write has ended."""
        entry, piece, content = self.writes.popleft()
        if self.writes:
            self.bench.host.entered.acquire()
        entry.pieces -= 1
        if not fails and not entry.ended:
            count = piece.stop - piece.start
            entry.ok[piece] = [True] * count
            destinations = entry.operation.destinations[piece].tolist()
            entry.arrived.update(zip(destinations, content, strict=True))
        if entry.pieces == 0:
            if entry.ended:
                self.fence(entry)
            else:
                self.end(entry, fenced=True)

    @rule(seconds=st.sampled_from([1, 4, 10]))
    def time_passes(self, seconds: int) -> None:
        self.bench.clock.now += seconds
        for entry in list(self.open.values()):
            late = entry.deadline <= self.bench.clock.now
            if late and not entry.ended and entry.operation.id not in self.asked:
                self.withdraw(entry)
                self.end(entry, fenced=entry.pieces == 0)

    @precondition(lambda self: any(not a.ended for a in self.storage.asked))
    @rule(data=st.data(), fenced=st.booleans())
    def storage_ends(self, data: st.DataObject, fenced: bool) -> None:
        asked = data.draw(st.sampled_from([a for a in self.storage.asked if not a.ended]))
        entry = self.asker(asked)
        stores = asked.kind is Kind.STORE
        good = [Status.STORED] if stores else [Status.LOADED]
        each = st.sampled_from([*good, Status.TIMED_OUT, Status.FAILED])
        size = len(asked.keys)
        statuses = data.draw(st.lists(each, min_size=size, max_size=size))
        self.storage.end(asked, statuses, fenced=fenced)
        entry.ok = [status in good for status in statuses]
        if stores:
            for key, block, ok in zip(asked.keys, entry.operation.sources, entry.ok, strict=True):
                assert not ok or self.storage.values[key] == self.host[block].tobytes()
        else:
            values = [np.frombuffer(self.storage.values[key], np.uint8) for key in asked.keys]
            blocks = entry.operation.destinations.tolist()
            entry.arrived = {b: v for b, v, ok in zip(blocks, values, entry.ok, strict=True) if ok}
        self.end(entry, fenced=fenced)

    @precondition(lambda self: any(a.ended and not a.fenced for a in self.storage.asked))
    @rule(data=st.data())
    def storage_fences(self, data: st.DataObject) -> None:
        stuck = [a for a in self.storage.asked if a.ended and not a.fenced]
        asked = data.draw(st.sampled_from(stuck))
        asked.fenced = True
        self.fence(self.asker(asked))

    # -- ends in the model

    def withdraw(self, entry: Open) -> None:
        running, *waiting = self.writes or [None]
        kept = [each for each in waiting if each is not None and each[0] is not entry]
        if running is not None:
            entry.pieces -= len(self.writes) - 1 - len(kept)
            self.writes = deque([running, *kept])

    def end(self, entry: Open, *, fenced: bool) -> None:
        entry.ended = True
        self.results.append(OperationResult(entry.operation.id, tuple(entry.ok), fenced))
        self.host.update(entry.arrived)
        if fenced:
            del self.open[entry.operation.id]

    def fence(self, entry: Open) -> None:
        del self.open[entry.operation.id]
        self.fenced.append(entry.operation.id)

    # -- invariants

    @invariant()
    def it_reports_what_ended(self) -> None:
        assert self.bench.driver.poll() == self.results
        assert sorted(self.bench.driver.fenced()) == sorted(self.fenced)
        self.results, self.fenced = [], []
        num_blocks = sum(padded(len(content)) for _, _, content in self.writes)
        num_bytes = self.bench.driver.stats().bytes_in_flight
        assert num_bytes == num_blocks * self.bench.host.bytes_per_block
        assert num_blocks <= max(ROOM, PIECE)

    @invariant()
    def the_device_is_as_the_model(self) -> None:
        assert (self.bench.device() == self.device).all()

    @invariant()
    def the_host_is_as_the_model(self) -> None:
        for block, content in self.host.items():
            assert (self.bench.host.memory[block] == content).all(), block

    def teardown(self) -> None:
        while self.writes:
            self.end_write(fails=False)
            self.bench.driver.poll()
        for asked in self.storage.asked:
            asked.fenced = True
            if not asked.ended:
                self.storage.end(asked, [Status.FAILED] * len(asked.keys), fenced=True)
        self.bench.driver.poll()
        stats = self.bench.driver.stats()
        assert stats.open_operations == stats.unfenced_operations == stats.bytes_in_flight == 0
        self.bench.__exit__()


class BFloat16Machine(DriverMachine):
    dtype = jnp.bfloat16


TestFloat32 = DriverMachine.TestCase
TestFloat32.settings = scaled(60, 30)
TestBFloat16 = BFloat16Machine.TestCase
TestBFloat16.settings = scaled(40, 30)

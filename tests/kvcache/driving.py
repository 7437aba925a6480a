"""A tier driver whose threads, storage and time do what the test says, when it says so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from threading import Semaphore
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from radixkv.kvcache import BlockArrays, HostArrays, OperationResult, TierDriver
from radixkv.kvcache.ids import Epoch, OpId
from radixkv.kvcache.storage import Completion, Kind, Status, StorageOpId
from radixkv.kvcache.storage.interface import views
from radixkv.kvcache.tiers.operations import Operation, OpKind

SIZES: dict[str, Any] = {
    "num_layers": 2,
    "num_blocks": 6,
    "kv_heads": 1,
    "block_size": 2,
    "head_dim": 4,
}
BLOCK_BYTES = 128  # of float32
HOST_BLOCKS = 5
LONG_S = 1_000.0


class Clock:
    """A time that passes when the test says so."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class HeldHost(HostArrays):
    """Each write waits for a word from the test: to go on, or to raise an error."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.held = False
        self.entered = Semaphore(0)  # a thread is in a write
        self.words: SimpleQueue[Exception | None] = SimpleQueue()

    def write(self, ids: Any, pools: Any) -> None:
        if self.held:
            self.entered.release()
            if error := self.words.get():
                raise error
        super().write(ids, pools)


@dataclass(eq=False)
class Asked:
    """What the fake storage was asked; the test ends and fences it."""

    id: StorageOpId
    kind: Kind
    keys: Sequence[bytes]
    timeout_s: float
    epoch: int
    parts: list[list[memoryview]] = field(default_factory=list)
    ended: bool = False
    fenced: bool = False


class FakeStorage:
    """Storage that answers what the test says, when it says so; without threads."""

    def __init__(self) -> None:
        self.asked: list[Asked] = []
        self.values: dict[bytes, bytes] = {}
        self.completions: list[Completion] = []

    def _ask(
        self, kind: Kind, keys: Sequence[bytes], timeout_s: float, epoch: int, blocks: Any = ()
    ) -> StorageOpId:
        storage_id = StorageOpId(len(self.asked) + 1)
        asked = Asked(storage_id, kind, keys, timeout_s, epoch, [views(b) for b in blocks])
        self.asked.append(asked)
        return asked.id

    def lookup(self, keys, *, timeout_s, epoch=0):
        return self._ask(Kind.LOOKUP, keys, timeout_s, epoch)

    def load(self, keys, destinations, *, timeout_s, epoch=0):
        return self._ask(Kind.LOAD, keys, timeout_s, epoch, destinations)

    def store(self, keys, payloads, *, timeout_s, epoch=0):
        return self._ask(Kind.STORE, keys, timeout_s, epoch, payloads)

    def touch(self, keys, *, timeout_s, epoch=0):
        return self._ask(Kind.TOUCH, keys, timeout_s, epoch)

    def poll(self) -> list[Completion]:
        completions, self.completions = self.completions, []
        return completions

    def cancel(self, operation: StorageOpId) -> bool:
        asked = self.asked[operation - 1]
        if asked.ended:
            return False
        self.end(asked, [Status.CANCELLED] * len(asked.keys), fenced=asked.fenced)
        return True

    def fenced(self, operation: StorageOpId) -> bool:
        return self.asked[operation - 1].ended and self.asked[operation - 1].fenced

    def end(self, asked: Asked, statuses: Sequence[Status], *, fenced: bool) -> None:
        """Complete an operation; blocks that are LOADED or STORED are copied now."""
        for key, status, part in zip(asked.keys, statuses, asked.parts, strict=False):
            if status is Status.LOADED:
                part[0][:] = self.values[key]
            elif status is Status.STORED:
                self.values[key] = bytes(part[0])
        asked.ended, asked.fenced = True, fenced
        self.completions.append(Completion(asked.id, 0, asked.kind, tuple(statuses)))


class Bench:
    """Pools, host tier and driver, warmed up; `device` shows the pools as bytes per block."""

    def __init__(self, dtype: Any = jnp.float32, storage: Any = None, **options: Any) -> None:
        self.clock = Clock()
        self.arrays = BlockArrays.zeros(**SIZES, dtype=jnp.dtype(dtype))
        self.host = HeldHost(**{**SIZES, "num_blocks": HOST_BLOCKS}, dtype=dtype)
        options = {"max_blocks_per_copy": 2, "num_threads": 1, "clock": self.clock, **options}
        self.driver = TierDriver(self.host, storage, **options)
        assert self.driver.warm_up(self.arrays) is self.arrays
        self._ids = 0

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *error: object) -> None:
        for _ in range(100):
            self.host.words.put(None)
        assert self.driver.close(timeout_s=LONG_S)

    def operation(
        self,
        kind: OpKind,
        sources: Sequence[int] = (),
        destinations: Sequence[int] = (),
        keys: Sequence[bytes] = (),
        timeout_s: float = LONG_S,
    ) -> Operation:
        self._ids += 1
        ids = np.array(sources, np.int32), np.array(destinations, np.int32)
        return Operation(OpId(self._ids), Epoch(1), kind, *ids, tuple(keys), timeout_s)

    def start(self, *args: Any, **kwargs: Any) -> OpId:
        """Dispatch one operation."""
        operation = self.operation(*args, **kwargs)
        self.driver.dispatch([operation], self.arrays)
        return operation.id

    def finish_write(self, error: Exception | None = None) -> None:
        """Let the write that is held go on, and wait until the driver could hear of it."""
        self.host.words.put(error)
        self.driver._writer.wait(LONG_S)

    def results(self) -> list[OperationResult]:
        """Wait for results."""
        self.driver.wait(LONG_S)
        return self.driver.poll()

    def step(self, block: int, content: np.ndarray) -> None:
        """Write a block of all pools, as a step of a model does: the pools are donated."""
        pools = (*self.arrays.keys, *self.arrays.values)
        parts = content.view(self.host.dtype).reshape(len(pools), *self.host.block_shape)
        pools = _write(pools, np.int32(block), jax.device_put(parts.copy()))
        half = len(pools) // 2
        self.arrays.keys, self.arrays.values = pools[:half], pools[half:]

    def fill(self) -> None:
        """Give every block of the device content of its own."""
        for block in range(1, SIZES["num_blocks"] + 1):
            self.step(block, self.content(block))

    def fill_host(self) -> None:
        """Give every block of the host content of its own, of tags from 51."""
        for block in range(1, HOST_BLOCKS + 1):
            self.host.memory[block] = self.content(50 + block)

    def device(self) -> np.ndarray:
        """All blocks as bytes, by way of copies: a view would keep the pools from being donated."""
        pools = [jnp.array(pool, copy=True) for pool in (*self.arrays.keys, *self.arrays.values)]
        stacked = np.stack([np.asarray(pool) for pool in pools], axis=1)
        return stacked.reshape(len(stacked), -1).view(np.uint8)

    def content(self, tag: int) -> np.ndarray:
        """A block's worth of bytes; finite in every dtype, different for each tag below 100."""
        num_items = self.host.bytes_per_block // self.host.dtype.itemsize
        return (np.arange(num_items) % 7 + 7 * tag % 256).astype(self.host.dtype).view(np.uint8)


@partial(jax.jit, donate_argnums=0)
def _write(pools, block, parts):
    return tuple(pool.at[block].set(part) for pool, part in zip(pools, parts, strict=True))

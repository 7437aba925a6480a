"""The file backend against a dictionary in LRU order, with every count, also across restarts."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from radixkv.kvcache.storage import BackendFullError, FileBackend, StoredValue
from radixkv.kvcache.storage.files.backend import Sync
from radixkv.kvcache.storage.files.lru_index import STAMP_EVERY_NS

from ...profiles import scaled
from .conformance import get, put
from .crash_disk import CrashDisk

KEYS = [bytes([number % 2, number]) * 16 for number in range(5)]
A_KEY = st.sampled_from(KEYS)
BUDGETS = st.integers(4, 12)
SYNCS: tuple[Sync, ...] = ("none", "data")


def path_of(key: bytes) -> str:
    return f"/cache/{key[:1].hex()}/{key.hex()}"


class Files(RuleBasedStateMachine):
    """Calls of one thread; somebody else removes files. Each use is written to its file."""

    backend: FileBackend

    def __init__(self) -> None:
        super().__init__()
        self.disk = CrashDisk(lambda _: 0)
        self.now_ns = 0
        self.values: dict[bytes, bytes] = {}  # coldest first
        self.gone: set[bytes] = set()  # whose files somebody else removed
        self.left: set[str] = set()  # temporary files that somebody left
        self.max_bytes = self.evicted = self.swept = 0

    def clock_ns(self) -> int:
        """Return a time at which the last written time of use is old."""
        self.now_ns += 2 * STAMP_EVERY_NS
        return self.now_ns

    @initialize(max_bytes=BUDGETS, sync=st.sampled_from(SYNCS))
    def open(self, max_bytes: int, sync: Sync) -> None:
        self.backend = FileBackend(
            "/cache", max_bytes=max_bytes, sync=sync, files=self.disk, clock_ns=self.clock_ns
        )
        for key in self.gone:
            del self.values[key]
        self.gone.clear()
        self.max_bytes, self.evicted, self.swept = max_bytes, 0, len(self.left)
        self.left.clear()
        self.evict(0)

    @rule(max_bytes=BUDGETS, sync=st.sampled_from(SYNCS))
    def restart(self, max_bytes: int, sync: Sync) -> None:
        for _ in range(2):
            self.backend.close()
            assert self.disk.handles == {}
        self.open(max_bytes, sync)

    def used_bytes(self) -> int:
        return sum(map(len, self.values.values()))

    def evict(self, num_bytes: int) -> None:
        """Make room for a value."""
        while self.values and self.used_bytes() + num_bytes > self.max_bytes:
            key = next(iter(self.values))
            del self.values[key]
            self.gone.discard(key)
            self.evicted += 1

    def warm(self, key: bytes) -> None:
        self.values[key] = self.values.pop(key)

    @rule(key=A_KEY, value=st.binary(max_size=6), cut=st.integers(0, 6))
    def put(self, key: bytes, value: bytes, cut: int) -> None:
        if len(value) > self.max_bytes:
            with pytest.raises(BackendFullError) as full:
                put(self.backend, key, value)
            assert (full.value.num_bytes, full.value.max_bytes) == (len(value), self.max_bytes)
            return
        put(self.backend, key, value[:cut], value[cut:])
        self.evict(len(value))
        self.values.pop(key, None)
        self.values[key] = value
        self.gone.discard(key)

    @rule(key=A_KEY, room=st.integers(0, 7))
    def get(self, key: bytes, room: int) -> None:
        length, (read,) = get(self.backend, key, room)
        if key in self.gone:
            self.gone.discard(key)
            del self.values[key]
        if key not in self.values:
            assert (length, read) == (None, bytes(room))
            return
        value = self.values[key]
        assert (length, read) == (len(value), value[:room].ljust(room, b"\0"))
        self.warm(key)

    @rule(keys=st.lists(A_KEY, max_size=6))
    def touch(self, keys: list[bytes]) -> None:
        self.backend.touch(keys)
        for key in keys:
            if key in self.values:
                self.warm(key)

    @rule(key=A_KEY)
    def delete(self, key: bytes) -> None:
        assert self.backend.delete(key) == (key in self.values)
        self.values.pop(key, None)
        self.gone.discard(key)

    @rule(key=A_KEY)
    def somebody_removes(self, key: bytes) -> None:
        if key in self.values and key not in self.gone:
            self.disk.unlink(path_of(key))
            self.gone.add(key)

    @rule(key=A_KEY)
    def somebody_leaves_a_temporary(self, key: bytes) -> None:
        if key in self.values:
            path = f"/cache/{key[:1].hex()}/.tmp-left"
            if path not in self.left:
                self.disk.close(self.disk.create(path))
                self.left.add(path)

    @invariant()
    def it_agrees(self) -> None:
        self.backend.check()
        expected = [StoredValue(key, len(value)) for key, value in self.values.items()]
        assert list(self.backend.list_values()) == expected
        assert self.backend.contains(KEYS) == [key in self.values for key in KEYS]
        assert self.backend.stats() == {
            "values": len(self.values),
            "bytes": self.used_bytes(),
            "max_bytes": self.max_bytes,
            "evicted_values": self.evicted,
            "swept_temporaries": self.swept,
        }
        files = {
            f"/cache/{bucket}/{name}": num_bytes
            for bucket in self.disk.directories("/cache")
            for name, num_bytes, _ in self.disk.scan(f"/cache/{bucket}")
        }
        here = {path_of(key): len(value) for key, value in self.values.items()}
        for key in self.gone:
            del here[path_of(key)]
        assert files == {**here, **dict.fromkeys(self.left, 0)}
        assert len(self.disk.handles) == 1  # of the lock


TestFiles = Files.TestCase
TestFiles.settings = scaled(60, 30)

"""Backends for tests: in memory, under the test's control, or broken."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from threading import Semaphore

from radixkv.kvcache.storage import StoredValue, UnsupportedError
from radixkv.kvcache.storage.remote import scatter


class MemoryBackend:
    """Values in a dictionary; records the calls."""

    def __init__(self) -> None:
        self.values: dict[bytes, bytes] = {}
        self.calls: list[str] = []
        self.closed = False

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        self.calls.append("contains")
        return [key in self.values for key in keys]

    def get(self, key: bytes, into: Sequence[memoryview]) -> int | None:
        self.calls.append("get")
        value = self.values.get(key)
        return None if value is None else scatter(value, into)

    def put(self, key: bytes, parts: Sequence[memoryview]) -> None:
        self.calls.append("put")
        self.values[key] = b"".join(parts)

    def delete(self, key: bytes) -> bool:
        self.calls.append("delete")
        return self.values.pop(key, None) is not None

    def touch(self, keys: Sequence[bytes]) -> None:
        self.calls.append("touch")
        for key in keys:
            if key in self.values:
                self.values[key] = self.values.pop(key)

    def list_values(self, *, coldest_first: bool = False) -> Iterator[StoredValue]:
        self.calls.append("list_values")
        if coldest_first:
            raise UnsupportedError("in no order")
        return iter([StoredValue(key, len(value)) for key, value in self.values.items()])

    def stats(self) -> Mapping[str, int]:
        return {"values": len(self.values)}

    def close(self) -> None:
        self.closed = True


class HeldBackend(MemoryBackend):
    """`get`, `put` and lookups wait until the test releases them one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.entered = Semaphore(0)  # a thread entered a call
        self.go = Semaphore(0)  # one thread may continue

    def hold(self) -> None:
        self.entered.release()
        self.go.acquire()

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        if len(keys) > 1:  # a store checks one key first
            self.hold()
        return super().contains(keys)

    def get(self, key: bytes, into: Sequence[memoryview]) -> int | None:
        self.hold()
        return super().get(key, into)

    def put(self, key: bytes, parts: Sequence[memoryview]) -> None:
        self.hold()
        super().put(key, parts)


class BrokenBackend(MemoryBackend):
    """Raises the given error in every call."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        raise self.error

    def get(self, key: bytes, into: Sequence[memoryview]) -> int | None:
        raise self.error

    def put(self, key: bytes, parts: Sequence[memoryview]) -> None:
        raise self.error

    def delete(self, key: bytes) -> bool:
        raise self.error

    def touch(self, keys: Sequence[bytes]) -> None:
        raise self.error

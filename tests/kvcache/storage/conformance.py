"""Tests of the Backend interface: a class to subclass with a `backend` fixture."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256

import pytest

from radixkv.kvcache.storage import (
    Backend,
    ChecksummedBackend,
    Status,
    StorageKeyError,
    StoredValue,
    UnsupportedError,
)
from radixkv.kvcache.storage.interface import SharedBackend

KEYS = [sha256(b"%d" % number).digest() for number in range(13)]
MIB = 1 << 20


def value_of(number: int, num_bytes: int) -> bytes:
    """Return num_bytes bytes that differ by number."""
    digest = sha256(b"value %d" % number).digest()
    return (digest * (num_bytes // len(digest) + 1))[:num_bytes]


def put(backend: Backend, key: bytes, *parts: bytes) -> None:
    backend.put(key, [memoryview(part) for part in parts])


def get(backend: Backend, key: bytes, *sizes: int) -> tuple[int | None, list[bytes]]:
    """Return the result of get, and the contents of buffers of these sizes."""
    into = [bytearray(size) for size in sizes]
    length = backend.get(key, [memoryview(part) for part in into])
    return length, [bytes(part) for part in into]


def keys_of(backend: Backend) -> list[bytes]:
    """Return the keys in the order of the backend's list."""
    return [value.key for value in backend.list_values()]


def store(checksummed: ChecksummedBackend, key: bytes, payload: bytes) -> Status:
    return checksummed.store(key, [memoryview(payload)])[0]


def load(checksummed: ChecksummedBackend, key: bytes, num_bytes: int) -> tuple[Status, bytes]:
    into = bytearray(num_bytes)
    return checksummed.load(key, [memoryview(into)])[0], bytes(into)


def check_namespaces(backend: Backend, inside: Backend, space: str) -> None:
    """Check the lists of two empty backends of one server; `inside` has the namespace `space`."""
    put(inside, KEYS[0], b"abc")
    put(inside, KEYS[1], b"")
    assert isinstance(backend, SharedBackend)
    in_namespace = [(space, StoredValue(KEYS[0], 3)), (space, StoredValue(KEYS[1], 0))]
    assert sorted(backend.list_namespaces()) == sorted(in_namespace)
    assert list(backend.list_values()) == []
    put(backend, KEYS[0], b"abcd")  # the same key, outside the namespace
    outside = StoredValue(KEYS[0], 4)
    assert sorted(backend.list_namespaces()) == sorted([("", outside), *in_namespace])
    assert list(backend.list_values()) == [outside]


class BackendConformance:
    """Each test gets an open and empty backend."""

    list_refused: str | None = None
    """Error message of `list_values`; None if the backend can list."""
    order_refused: str | None = None
    """Error message of a list in LRU order; None if the backend supports it."""

    @pytest.fixture
    def backend(self) -> object:
        raise NotImplementedError("a subclass says which")

    def test_parts_may_be_read_into_other_parts(self, backend: Backend) -> None:
        put(backend, KEYS[0], b"abc", b"", b"defgh")
        assert get(backend, KEYS[0], 1, 0, 4, 3) == (8, [b"a", b"", b"bcde", b"fgh"])

    def test_a_missing_key(self, backend: Backend) -> None:
        assert get(backend, KEYS[0], 4) == (None, [bytes(4)])
        assert get(backend, KEYS[0]) == (None, [])
        assert backend.contains(KEYS[:2]) == [False, False]
        assert not backend.delete(KEYS[0])
        backend.touch(KEYS[:2])
        assert backend.contains(KEYS[:2]) == [False, False]

    def test_contains_answers_in_the_order_of_the_keys(self, backend: Backend) -> None:
        put(backend, KEYS[1], b"one")
        put(backend, KEYS[3], b"three")
        assert backend.contains([KEYS[3], KEYS[1], KEYS[3], KEYS[0]]) == [True, True, True, False]
        first, last = backend.contains([KEYS[0], KEYS[2]])  # the second may be reported missing
        assert not first and not last
        assert backend.contains([KEYS[1]]) == [True]

    def test_no_keys(self, backend: Backend) -> None:
        assert backend.contains([]) == []
        backend.touch([])

    def test_delete(self, backend: Backend) -> None:
        put(backend, KEYS[0], b"x")
        put(backend, KEYS[1], b"y")
        assert backend.delete(KEYS[0])
        assert not backend.delete(KEYS[0])
        assert [backend.contains([key]) for key in KEYS[:2]] == [[False], [True]]
        assert get(backend, KEYS[0], 1) == (None, [b"\0"])

    def test_touch(self, backend: Backend) -> None:
        put(backend, KEYS[0], b"x")
        backend.touch(KEYS[:2])
        assert get(backend, KEYS[0], 1) == (1, [b"x"])

    @pytest.mark.parametrize("second", [b"new", b"a longer one", b""])
    def test_a_second_put_replaces_the_value(self, backend: Backend, second: bytes) -> None:
        put(backend, KEYS[0], b"the old")
        put(backend, KEYS[0], second)
        assert get(backend, KEYS[0], 20) == (len(second), [second.ljust(20, b"\0")])

    def test_an_empty_value_is_not_a_missing_one(self, backend: Backend) -> None:
        put(backend, KEYS[0])
        assert backend.contains([KEYS[0]]) == [True]
        assert get(backend, KEYS[0], 3) == (0, [bytes(3)])
        assert get(backend, KEYS[0]) == (0, [])

    def test_a_value_shorter_than_the_buffers(self, backend: Backend) -> None:
        put(backend, KEYS[0], b"abc")
        assert get(backend, KEYS[0], 2, 2) == (3, [b"ab", b"c\0"])

    @pytest.mark.parametrize("sizes", [(), (0,), (1,), (2,), (4, 3), (999,), (1000,)])
    def test_a_value_longer_than_the_buffers(self, backend: Backend, sizes: Sequence[int]) -> None:
        value = value_of(0, 1000)
        put(backend, KEYS[0], value)
        length, parts = get(backend, KEYS[0], *sizes)
        assert length == 1000
        assert b"".join(parts) == value[: sum(sizes)]

    def test_any_bytes(self, backend: Backend) -> None:
        value = bytes(range(256)) + b"\r\n$-1\r\n\0"
        put(backend, KEYS[0], value)
        assert get(backend, KEYS[0], len(value)) == (len(value), [value])

    def test_a_big_value(self, backend: Backend) -> None:
        value = value_of(1, 4 * MIB + 3)
        put(backend, KEYS[0], value[:64], value[64:])
        length, parts = get(backend, KEYS[0], 64, len(value) - 64)
        assert length == len(value)
        assert parts == [value[:64], value[64:]]

    def test_an_invalid_key(self, backend: Backend) -> None:
        with pytest.raises(StorageKeyError, match=r"^a key is 32 bytes, got 5 bytes$"):
            put(backend, b"short", b"x")

    def test_a_list_has_keys_and_sizes(self, backend: Backend) -> None:
        if self.list_refused is not None:
            with pytest.raises(UnsupportedError) as caught:
                backend.list_values()
            assert str(caught.value) == self.list_refused
            return
        assert list(backend.list_values()) == []
        for number, key in enumerate(KEYS[:4]):
            put(backend, key, bytes(number))
        backend.delete(KEYS[1])
        wanted = [StoredValue(KEYS[number], number) for number in (0, 2, 3)]
        assert sorted(backend.list_values()) == sorted(wanted)

    def test_lru_order_is_supported_or_refused(self, backend: Backend) -> None:
        for key in KEYS[:4]:
            put(backend, key, b"x")
        backend.touch([KEYS[2], KEYS[4], KEYS[0]])
        if self.order_refused is None:
            values = list(backend.list_values(coldest_first=True))
            assert values == [StoredValue(KEYS[number], 1) for number in (1, 3, 2, 0)]
        else:
            with pytest.raises(UnsupportedError) as caught:
                backend.list_values(coldest_first=True)
            assert str(caught.value) == self.order_refused

    def test_stats_are_numbers(self, backend: Backend) -> None:
        put(backend, KEYS[0], b"x")
        stats = backend.stats()
        assert stats
        assert all(type(number) is int and number >= 0 for number in stats.values())

    def test_four_threads_at_once(self, backend: Backend) -> None:
        """Each thread writes separate keys, and all write one key, which never holds a mixture."""
        shared = [value_of(number, 50_000 + number) for number in range(4)]

        def work(thread: int) -> list[bytes]:
            seen = []
            for key in KEYS[thread * 3 : thread * 3 + 3]:
                put(backend, key, shared[thread])
                put(backend, KEYS[-1], shared[thread])
                assert get(backend, key, len(shared[thread]))[1] == [shared[thread]]
                length, (value,) = get(backend, KEYS[-1], 60_000)
                assert length is not None
                seen.append(value[:length])
            return seen

        with ThreadPoolExecutor(4) as pool:
            seen = [value for values in pool.map(work, range(4)) for value in values]
        assert len(seen) == 12
        assert set(seen) <= set(shared)
        assert backend.contains(KEYS) == [True] * 13

    def test_checksummed_round_trip(self, backend: Backend) -> None:
        checksummed = ChecksummedBackend(backend)
        payload = value_of(2, 5_000)
        assert store(checksummed, KEYS[0], payload) is Status.STORED
        assert store(checksummed, KEYS[0], payload) is Status.EXISTS
        assert load(checksummed, KEYS[0], 5_000) == (Status.LOADED, payload)
        assert load(checksummed, KEYS[1], 5_000) == (Status.MISSING, bytes(5_000))
        assert checksummed.lookup(KEYS[:2]) == ([Status.FOUND, Status.MISSING], "")

    @pytest.mark.parametrize("damage", ["flip", "cut", "grow", "empty", "swap", "foreign"])
    def test_a_corrupt_value_is_found_deleted_and_repaired(
        self, backend: Backend, damage: str
    ) -> None:
        checksummed = ChecksummedBackend(backend)
        payload = value_of(3, 300)
        for key in KEYS[:2]:
            assert store(checksummed, key, payload) is Status.STORED
        whole = get(backend, KEYS[0], 364)[1][0]
        bad = {
            "flip": whole[:200] + bytes([whole[200] ^ 1]) + whole[201:],
            "cut": whole[:-1],
            "grow": whole + b"\0",
            "empty": b"",
            "swap": get(backend, KEYS[1], 364)[1][0],
            "foreign": b"somebody else's".ljust(364),
        }
        put(backend, KEYS[0], bad[damage])
        assert load(checksummed, KEYS[0], 300)[0] is Status.CORRUPT
        assert [backend.contains([key]) for key in KEYS[:2]] == [[False], [True]]
        assert store(checksummed, KEYS[0], payload) is Status.STORED
        assert load(checksummed, KEYS[0], 300) == (Status.LOADED, payload)

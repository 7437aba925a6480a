"""Verifying and removing the values of a backend."""

from __future__ import annotations

import errno
import os
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path

import pytest

from radixkv.kvcache.storage import (
    BackendError,
    BackendIOError,
    BackendOptions,
    BackendUnreachableError,
    ChecksummedBackend,
    FileBackend,
    Status,
    StorageInUseError,
    StorageUrlError,
    StoredValue,
    UnsupportedError,
    open_existing,
    remove_values,
    verify_values,
)
from radixkv.kvcache.storage.maintenance import Removed, Verified, _Reader
from radixkv.kvcache.storage.value_format import make_header

from .conformance import KEYS, keys_of, put, store
from .memory import BrokenBackend, MemoryBackend

PAYLOAD = b"x" * 36  # 100 bytes with the header


def filled(backend: MemoryBackend | FileBackend, num_values: int = 3) -> None:
    for key in KEYS[:num_values]:
        assert store(ChecksummedBackend(backend), key, PAYLOAD) is Status.STORED


@pytest.mark.parametrize(
    "damage",
    [
        lambda value: value[:-1],
        lambda value: value + b"\0",
        lambda value: value[:70] + b"\0" + value[71:],
        lambda value: value.replace(KEYS[0], KEYS[1]),
        lambda value: b"",
        lambda value: b"not ours",
    ],
    ids=["cut", "grown", "changed", "another key", "empty", "foreign"],
)
def test_a_corrupt_value_is_counted_and_removed_only_on_request(damage) -> None:
    backend = MemoryBackend()
    filled(backend)
    backend.values[KEYS[0]] = damage(backend.values[KEYS[0]])
    assert verify_values(backend) == Verified(good=2, corrupt=1, good_bytes=200)
    assert len(backend.values) == 3
    assert verify_values(backend, delete=True) == Verified(
        good=2, corrupt=1, deleted=1, good_bytes=200
    )
    assert list(backend.values) == KEYS[1:3]


def test_a_corrupt_value_that_somebody_else_removed_is_not_counted_as_deleted() -> None:
    class Losing(MemoryBackend):
        def delete(self, key: bytes) -> bool:
            assert super().delete(key)
            return super().delete(key)

    backend = Losing()
    filled(backend)
    backend.values[KEYS[0]] = b"not ours"
    assert verify_values(backend, delete=True) == Verified(good=2, corrupt=1, good_bytes=200)
    assert list(backend.values) == KEYS[1:3]


class Changing(MemoryBackend):
    """Runs a function between the list and each read."""

    def __init__(self) -> None:
        super().__init__()
        self.later: dict[bytes, bytes | None] = {}

    def get(self, key: bytes, into: Sequence[memoryview]) -> int | None:
        for changed, value in self.later.items():
            if value is None:
                del self.values[changed]
            else:
                self.values[changed] = value
        self.later = {}
        return super().get(key, into)


def test_a_value_removed_after_it_was_listed_is_missing() -> None:
    backend = Changing()
    filled(backend)
    backend.later = {KEYS[0]: None, KEYS[2]: None}
    assert verify_values(backend) == Verified(good=1, missing=2, good_bytes=100)


def test_a_value_repaired_after_it_was_listed_is_good() -> None:
    backend = Changing()
    filled(backend)
    whole = backend.values[KEYS[0]]
    backend.values[KEYS[0]] = whole[:10]
    backend.later = {KEYS[0]: whole}
    assert verify_values(backend) == Verified(good=3, good_bytes=300)


class Scripted(MemoryBackend):
    """Changes values before the n-th read, counted from 1."""

    def __init__(self, changes: dict[int, bytes | None]) -> None:
        super().__init__()
        self.changes = changes
        self.num_reads = 0

    def get(self, key: bytes, into: Sequence[memoryview]) -> int | None:
        self.num_reads += 1
        if self.num_reads in self.changes:
            change = self.changes[self.num_reads]
            if change is None:
                del self.values[KEYS[1]]
            else:
                self.values[KEYS[1]] = change
        return super().get(key, into)


LONGER = make_header(KEYS[1], [memoryview(bytes(50))]) + bytes(50)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({3: LONGER}, Verified(good=3, good_bytes=314)),
        ({3: LONGER, 4: None}, Verified(good=2, missing=1, good_bytes=200)),
        ({3: LONGER, 5: None}, Verified(good=2, missing=1, good_bytes=200)),
    ],
)
def test_a_value_that_grew_after_it_was_listed_is_read_again(changes, expected) -> None:
    backend = Scripted(changes)  # header and whole of the first value, then the second
    filled(backend)
    assert verify_values(backend) == expected


def test_no_memory_is_allocated_for_a_length_that_the_header_denies(tmp_path: Path) -> None:
    with closing(FileBackend(tmp_path / "blocks", max_bytes=1 << 60)) as backend:
        filled(backend)
        long = tmp_path / "blocks" / KEYS[1].hex()[:2] / KEYS[1].hex()
        os.truncate(long, 1 << 40)
    with closing(FileBackend(tmp_path / "blocks", max_bytes=1 << 60)) as backend:
        assert verify_values(backend) == Verified(good=2, corrupt=1, good_bytes=200)


class Failing(MemoryBackend):
    """Raises errors for some keys."""

    def __init__(self, errors: Mapping[bytes, Exception]) -> None:
        super().__init__()
        self.errors = errors

    def get(self, key: bytes, into: Sequence[memoryview]) -> int | None:
        if key in self.errors:
            raise self.errors[key]
        return super().get(key, into)


@pytest.mark.parametrize("error", [MemoryError(), BackendError("reading failed: GenericError")])
def test_a_value_whose_read_fails_is_unreadable(error: Exception) -> None:
    backend = Failing({KEYS[1]: error})
    filled(backend)
    assert verify_values(backend) == Verified(good=2, unreadable=1, good_bytes=200)


def test_a_length_beyond_any_buffer_is_unreadable() -> None:
    """Even if the header has the same length."""
    length = 2**63

    class Huge(MemoryBackend):
        def get(self, key: bytes, into: Sequence[memoryview]) -> int | None:
            found = super().get(key, into)
            return length if key == KEYS[1] else found

        def list_values(self, *, coldest_first: bool = False) -> Iterator[StoredValue]:
            for key, num_bytes in super().list_values(coldest_first=coldest_first):
                yield StoredValue(key, length if key == KEYS[1] else num_bytes)

    backend = Huge()
    filled(backend)
    backend.values[KEYS[1]] = struct.pack(
        "<4sHHQ16s32s", b"RXKV", 2, 0, length - 64, bytes(16), KEYS[1]
    )
    assert verify_values(backend) == Verified(good=2, unreadable=1, good_bytes=200)


SERVER, MEMORY = BackendError("reading failed: GenericError"), MemoryError()


@pytest.mark.parametrize(
    ("reads", "ends"),
    [
        ([SERVER, None], True),  # the first
        ([None, SERVER, SERVER, SERVER], True),
        ([MEMORY, SERVER, SERVER, SERVER], True),
        ([MEMORY, SERVER, SERVER, None], False),
        ([None, SERVER, MEMORY, SERVER, SERVER], True),  # none succeeded in between
        ([None, SERVER, SERVER, None, SERVER, SERVER, None], False),
    ],
)
def test_repeated_failures_end_the_verification(reads: list[Exception | None], ends: bool) -> None:
    errors = {key: error for key, error in zip(KEYS, reads, strict=False) if error is not None}
    backend = Failing(errors)
    filled(backend, num_values=len(reads))
    if ends:
        with pytest.raises(BackendError) as caught:
            verify_values(backend)
        assert caught.value is SERVER
    else:
        good = reads.count(None)
        expected = Verified(good=good, unreadable=len(errors), good_bytes=100 * good)
        assert verify_values(backend) == expected


def test_a_value_that_the_disk_cannot_read_is_counted(tmp_path: Path) -> None:
    with closing(FileBackend(tmp_path / "blocks", max_bytes=1000)) as backend:
        filled(backend)
        path = tmp_path / "blocks" / KEYS[1].hex()[:2] / KEYS[1].hex()
        path.unlink()
        path.symlink_to(tmp_path / "elsewhere")
        assert verify_values(backend, delete=True) == Verified(good=2, unreadable=1, good_bytes=200)
        assert keys_of(backend) == [KEYS[1], KEYS[0], KEYS[2]]
        backend.delete(KEYS[1])
        store(ChecksummedBackend(backend), KEYS[1], PAYLOAD)
        assert verify_values(backend).good == 3
        assert keys_of(backend) == [KEYS[0], KEYS[2], KEYS[1]]  # in the same order as before


def test_an_unreachable_server_ends_the_verification() -> None:
    class Gone(BrokenBackend):
        def list_values(self, *, coldest_first: bool = False):
            return iter([StoredValue(KEYS[0], 100)])

    error = BackendUnreachableError("reading", "no connection, or it was lost")
    with pytest.raises(BackendUnreachableError) as caught:
        verify_values(Gone(error))
    assert caught.value is error


@pytest.mark.parametrize(
    ("max_bytes", "expected"),
    [
        (300, Removed(0, 0, 4, 300)),
        (299, Removed(1, 100, 3, 200)),
        (200, Removed(1, 100, 3, 200)),
        (1, Removed(3, 300, 1, 0)),
        (0, Removed(4, 300, 0, 0)),
    ],
)
def test_the_least_recently_used_are_removed(
    tmp_path: Path, max_bytes: int, expected: Removed
) -> None:
    with closing(FileBackend(tmp_path / "blocks", max_bytes=1000)) as backend:
        filled(backend)
        backend.touch([KEYS[0]])
        put(backend, KEYS[3], b"")
        assert remove_values(backend, max_bytes) == expected
        assert keys_of(backend) == [KEYS[1], KEYS[2], KEYS[0], KEYS[3]][expected.removed :]
        backend.check()


def test_all_can_be_removed_without_lru_order() -> None:
    backend = MemoryBackend()
    filled(backend)
    backend.values[KEYS[4]] = b""
    with pytest.raises(UnsupportedError, match=r"^in no order$"):
        remove_values(backend, 1)
    assert len(backend.values) == 4
    assert remove_values(backend, 0) == Removed(4, 300, 0, 0)
    assert backend.values == {}


def test_values_removed_by_somebody_else_are_not_counted() -> None:
    class Losing(MemoryBackend):
        def delete(self, key: bytes) -> bool:
            self.values.pop(KEYS[1], None)
            return super().delete(key)

    backend = Losing()
    filled(backend)
    assert remove_values(backend, 0) == Removed(2, 200, 0, 0)


def test_a_directory_of_several_nodes_is_refused_with_their_names(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    for node in ("prefill-0", "decode-0"):
        FileBackend(tmp_path / node, max_bytes=1000).close()
    text = f"{tmp_path} is not a storage directory, but it has some: decode-0, prefill-0"
    with pytest.raises(StorageUrlError, match=f"^{re.escape(text)}$"):
        open_existing(tmp_path.as_uri())


def test_open_existing_neither_creates_nor_evicts(tmp_path: Path) -> None:
    directory = tmp_path / "blocks"
    url = directory.as_uri()
    with pytest.raises(BackendIOError) as caught:
        open_existing(url)
    assert caught.value.errno == errno.ENOENT
    opening = f"opening the directory {directory} failed"
    assert str(caught.value) == f"{opening}: ENOENT (No such file or directory)"
    directory.write_bytes(b"a file")
    with pytest.raises(BackendIOError, match=f"^{re.escape(opening)}: ENOTDIR "):
        open_existing(url)
    directory.unlink()
    directory.mkdir()
    text = f"{directory} is not a storage directory: it has no file named lock"
    with pytest.raises(StorageUrlError, match=f"^{re.escape(text)}$"):
        open_existing(url)
    assert list(directory.iterdir()) == []
    (tmp_path / "blocks").chmod(0o700)
    with closing(FileBackend(tmp_path / "blocks", max_bytes=1000)) as backend:
        filled(backend)
        put(backend, KEYS[3], b"not sealed")
        with pytest.raises(StorageInUseError, match=r"^the directory .* is open already, "):
            open_existing(url)
    with closing(open_existing(url)) as backend:
        assert verify_values(backend) == Verified(good=3, corrupt=1, good_bytes=300)
    with closing(open_existing(url, BackendOptions(max_bytes=250))) as backend:
        assert keys_of(backend) == [KEYS[1], KEYS[2], KEYS[3]]


def test_open_existing_passes_every_option_of_a_directory_on(tmp_path: Path) -> None:
    FileBackend(tmp_path / "blocks", max_bytes=1000).close()
    url = (tmp_path / "blocks").as_uri()
    for options, text in (
        (BackendOptions(sync="full"), r"^sync must be one of "),  # type: ignore[arg-type]
        (BackendOptions(max_bytes=-1), r"^max_bytes must be at least 1, got -1$"),
        (BackendOptions(ttl_s=1), r"^file:// has no option ttl_s$"),
    ):
        with pytest.raises(ValueError, match=text):
            open_existing(url, options)


def test_a_namespace_with_a_directory_is_refused(tmp_path: Path) -> None:
    FileBackend(tmp_path / "blocks", max_bytes=1000).close()
    text = "a directory does not separate namespaces: leave out namespace"
    with pytest.raises(StorageUrlError, match=f"^{text}$"):
        open_existing((tmp_path / "blocks").as_uri(), BackendOptions(namespace="0" * 16))


def test_other_urls_open_as_in_open_backend() -> None:
    with closing(open_existing("memory://")) as backend:
        assert keys_of(backend) == []
    with pytest.raises(StorageUrlError, match=r"^a storage URL starts with one of "):
        open_existing("http://host")
    for break_ in "\t\r\n":  # without which the URL would name another directory
        with pytest.raises(StorageUrlError, match=r"^the storage URL has a tab or a line break: "):
            open_existing(f"file:///d{break_}x")


@pytest.mark.parametrize("listed", [99, 100, 101, 164])
@pytest.mark.parametrize("is_first", [False, True])
def test_a_value_that_was_rewritten_since_it_was_listed_is_right(
    listed: int, is_first: bool
) -> None:
    """With another length, after one that was longer, or as the first one."""
    backend = MemoryBackend()
    filled(backend, 1)
    reader = _Reader(backend)
    if not is_first:
        assert store(ChecksummedBackend(backend), KEYS[1], b"y" * 200) is Status.STORED
        assert reader.check(StoredValue(KEYS[1], 264)) == 200
    assert reader.check(StoredValue(KEYS[0], listed)) == len(PAYLOAD)

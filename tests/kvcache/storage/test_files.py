import errno
import os
import re
import stat
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from radixkv.kvcache.storage import (
    BackendFullError,
    BackendIOError,
    ChecksummedBackend,
    FileBackend,
    OpenToOthersError,
    Status,
    StorageInUseError,
)
from radixkv.kvcache.storage.files.backend import Sync
from radixkv.kvcache.storage.files.system_calls import OsFiles, write_all

from . import planted
from .conformance import keys_of, load, store
from .crash_disk import CrashDisk, Faults

KEYS = [bytes([number]) * 32 for number in range(6)]
MINUTE_NS = 60 * 10**9


class Clock:
    now = MINUTE_NS

    def __call__(self) -> int:
        return self.now


def put(backend: FileBackend, key: bytes, value: bytes) -> None:
    backend.put(key, [memoryview(value)])
    backend.check()


def get(backend: FileBackend, key: bytes, room: int = 10) -> bytes | None:
    into = bytearray(room)
    length = backend.get(key, [memoryview(into)])
    return None if length is None else bytes(into[:length])


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def open_files(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Return the files opened in the test and not closed."""
    opened: set[int] = set()
    os_open, os_close = os.open, os.close

    def noted_open(*arguments: Any) -> int:
        file = os_open(*arguments)
        opened.add(file)
        return file

    def noted_close(file: int) -> None:
        opened.discard(file)
        os_close(file)

    monkeypatch.setattr(os, "open", noted_open)
    monkeypatch.setattr(os, "close", noted_close)
    return opened


def test_a_value_stays_until_it_is_deleted(directory: Path, open_files: set[int]) -> None:
    backend = FileBackend(directory, max_bytes=100, sync="data")
    backend.put(KEYS[1], [memoryview(b"a"), memoryview(b""), memoryview(b"bc")])
    first, second = bytearray(2), bytearray(2)
    assert backend.get(KEYS[1], [memoryview(first), memoryview(second)]) == 3
    assert bytes(first + second) == b"abc\0"
    assert backend.contains(KEYS[:3]) == [False, True, False]
    assert get(backend, KEYS[1], room=1) == b"a"  # and the length shows that there is more
    assert backend.get(KEYS[1], [memoryview(bytearray(1))]) == 3
    put(backend, KEYS[1], b"other")
    assert get(backend, KEYS[1]) == b"other"
    assert backend.delete(KEYS[1]) and not backend.delete(KEYS[1])
    assert get(backend, KEYS[1]) is None
    assert backend.stats()["values"] == backend.stats()["bytes"] == 0
    backend.close()
    assert open_files == set()


@pytest.mark.parametrize("durable", [True, False])
def test_only_promised_durability_waits_for_the_disk(
    directory: Path, monkeypatch: pytest.MonkeyPatch, durable: bool
) -> None:
    """The order of the syncs is the one that the simulated disk requires."""
    synced: list[str] = []

    def noted(file: int) -> None:
        synced.append(os.path.relpath(os.readlink(f"/proc/self/fd/{file}"), directory))

    for name in ("fsync", "fdatasync"):
        monkeypatch.setattr(os, name, noted)

    def waited() -> list[str]:
        names, synced[:] = synced[:], []
        return names

    sync: Sync = "data" if durable else "none"
    with closing(FileBackend(directory, max_bytes=100, sync=sync)) as backend:
        assert waited() == [".", ".."] * durable
        put(backend, KEYS[1], b"abc")
        assert waited() == [".", "01/.tmp-0", "01"] * durable
        put(backend, KEYS[1], b"de")
        assert waited() == ["01/.tmp-1", "01"] * durable
        backend.delete(KEYS[1])
        backend.delete(KEYS[1])
        backend.delete(KEYS[2])
        assert waited() == ["01", "01"] * durable
    with closing(FileBackend(directory, max_bytes=100, sync=sync)) as backend:
        assert waited() == ["01", ".", ".."] * durable
        backend.delete(KEYS[1])
        put(backend, KEYS[1], b"abc")
        assert waited() == ["01", "01/.tmp-0", "01"] * durable


def test_no_other_user_can_read_the_files(directory: Path) -> None:
    backend = FileBackend(directory, max_bytes=100)
    put(backend, KEYS[1], b"abc")
    modes = {
        path.relative_to(directory).as_posix(): stat.S_IMODE(path.stat().st_mode)
        for path in [directory, *directory.rglob("*")]
    }
    assert modes == {".": 0o700, "lock": 0o600, "01": 0o700, f"01/{KEYS[1].hex()}": 0o600}
    backend.close()


@pytest.mark.parametrize("mode", [0o755, 0o701, 0o702, 0o704, 0o710, 0o720, 0o740])
def test_a_directory_open_to_others_is_refused(directory: Path, mode: int) -> None:
    directory.mkdir()
    directory.chmod(mode)
    with pytest.raises(OpenToOthersError) as error:
        FileBackend(directory, max_bytes=100)
    assert str(error.value) == (
        f"the directory {directory} has mode {mode:04o}, or another owner: it must be for this "
        "user alone (chmod 700)"
    )
    assert error.value.mode == mode
    directory.chmod(0o700)
    FileBackend(directory, max_bytes=100).close()


def test_a_directory_of_another_owner_is_refused(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory.mkdir(0o700)
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(OpenToOthersError, match=r" has mode 0700, or another owner: "):
        FileBackend(directory, max_bytes=100)


def test_a_file_in_place_of_the_directory_is_refused(directory: Path) -> None:
    directory.write_bytes(b"something else")
    text = f"opening the directory {directory} failed: ENOTDIR (Not a directory)"
    with pytest.raises(BackendIOError, match=f"^{re.escape(text)}$"):
        FileBackend(directory, max_bytes=100)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"max_bytes": 0}, "max_bytes must be at least 1, got 0"),
        ({"max_bytes": "9"}, "max_bytes must be an integer, got '9'"),
        ({"max_bytes": 9, "sync": "full"}, "sync must be one of ('none', 'data'), got 'full'"),
    ],
)
def test_invalid_options_are_refused_before_anything_is_created(
    directory: Path, options: dict[str, Any], text: str
) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        FileBackend(directory, **options)
    assert not directory.exists()


def test_one_process_at_a_time(directory: Path, open_files: set[int]) -> None:
    backend = FileBackend(directory, max_bytes=100)
    text = f"the directory {directory} is open already, here or in another process"
    with pytest.raises(StorageInUseError, match=f"^{re.escape(text)}$"):
        FileBackend(directory, max_bytes=100)
    backend.close()
    FileBackend(directory, max_bytes=100).close()
    assert open_files == set()


def test_a_second_close_closes_no_file_of_others(directory: Path) -> None:
    backend = FileBackend(directory, max_bytes=100)
    backend.close()
    with open(os.devnull) as other:  # has the descriptor now
        backend.close()
        assert other.read() == ""


def test_a_start_finds_values_and_sweeps_temporaries(directory: Path) -> None:
    backend = FileBackend(directory, max_bytes=100)
    put(backend, KEYS[1], b"abc")
    backend.close()
    (directory / "01" / ".tmp-7").write_bytes(b"half")
    (directory / "01" / "a note").write_bytes(b"not ours")
    (directory / "01" / KEYS[2].hex()).write_bytes(b"in the wrong place")
    others = [KEYS[2].hex(), "01ab", "01" + "zz" * 31]
    for name in others[1:]:
        (directory / "01" / name).write_bytes(b"of no key")
    for name in ("zz", "0"):
        (directory / name).mkdir()
        (directory / name / ".tmp-7").write_bytes(b"not ours either")
        (directory / name / KEYS[0].hex()).write_bytes(b"nor this")
    backend = FileBackend(directory, max_bytes=100)
    assert keys_of(backend) == [KEYS[1]]
    assert get(backend, KEYS[1]) == b"abc"
    assert backend.stats()["swept_temporaries"] == 1
    names = [KEYS[1].hex(), *others, "a note"]
    assert sorted(os.listdir(directory / "01")) == sorted(names)
    assert len(os.listdir(directory / "zz")) == len(os.listdir(directory / "0")) == 2
    backend.close()


def test_the_coldest_value_is_evicted_first_also_after_a_restart(directory: Path) -> None:
    clock = Clock()
    backend = FileBackend(directory, max_bytes=9, clock_ns=clock)
    for key in KEYS[:3]:
        put(backend, key, b"abc")
    clock.now += 2 * MINUTE_NS
    get(backend, KEYS[0])
    backend.touch([KEYS[1]])
    assert keys_of(backend) == [KEYS[2], KEYS[0], KEYS[1]]
    backend.close()
    clock.now = 0  # the clock may go back
    backend = FileBackend(directory, max_bytes=9, clock_ns=clock)
    assert keys_of(backend) == [KEYS[2], KEYS[0], KEYS[1]]
    put(backend, KEYS[3], b"abcd")
    assert keys_of(backend) == [KEYS[1], KEYS[3]]
    backend.close()
    backend = FileBackend(directory, max_bytes=4, clock_ns=clock)  # a smaller budget than before
    assert keys_of(backend) == [KEYS[3]]
    assert backend.stats()["evicted_values"] == 1
    backend.check()
    backend.close()


@pytest.mark.parametrize("reopened", [False, True])
def test_use_times_are_written_even_if_the_clock_went_back(directory: Path, reopened: bool) -> None:
    clock = Clock()
    clock.now = 1_000 * MINUTE_NS
    backend = FileBackend(directory, max_bytes=100, clock_ns=clock)
    for key in KEYS[:3]:
        put(backend, key, b"abc")
    clock.now = 10 * MINUTE_NS
    if reopened:
        backend.close()
        backend = FileBackend(directory, max_bytes=100, clock_ns=clock)
    get(backend, KEYS[1])
    get(backend, KEYS[0])
    stamped = os.stat(directory / "00" / KEYS[0].hex()).st_mtime_ns
    get(backend, KEYS[0])  # less than a minute after the first use
    assert os.stat(directory / "00" / KEYS[0].hex()).st_mtime_ns == stamped
    put(backend, KEYS[3], b"abc")
    backend.close()
    backend = FileBackend(directory, max_bytes=100, clock_ns=clock)
    assert keys_of(backend) == [KEYS[2], KEYS[1], KEYS[0], KEYS[3]]
    backend.close()


def test_the_order_of_a_touch_survives_a_restart_exactly(directory: Path) -> None:
    clock = Clock()
    backend = FileBackend(directory, max_bytes=100, clock_ns=clock)
    for key in KEYS[:3]:
        put(backend, key, b"abc")
    backend.touch([KEYS[2], KEYS[1], KEYS[0]])  # less than a minute after their writes
    clock.now += MINUTE_NS // 2
    put(backend, KEYS[3], b"abc")
    backend.touch([KEYS[3], KEYS[0]])  # also less than a minute after the first touch
    order = [KEYS[2], KEYS[1], KEYS[3], KEYS[0]]
    assert keys_of(backend) == order
    stamped = [path.stat().st_mtime_ns for path in sorted(directory.glob("??/*"))]
    backend.touch([KEYS[0]])  # its use time is already written
    assert [path.stat().st_mtime_ns for path in sorted(directory.glob("??/*"))] == stamped
    backend.close()
    backend = FileBackend(directory, max_bytes=100, clock_ns=clock)
    assert keys_of(backend) == order
    backend.close()


def test_a_value_over_the_budget_evicts_nothing(directory: Path) -> None:
    backend = FileBackend(directory, max_bytes=4)
    put(backend, KEYS[0], b"abc")
    with pytest.raises(
        BackendFullError, match=r"^a value of 5 bytes has no room: the budget is 4$"
    ) as full:
        put(backend, KEYS[1], b"abcde")
    assert (full.value.num_bytes, full.value.max_bytes) == (5, 4)
    assert keys_of(backend) == [KEYS[0]]
    put(backend, KEYS[1], b"abcd")
    assert keys_of(backend) == [KEYS[1]]
    backend.close()


def test_a_value_that_goes_while_it_is_chosen_is_not_counted_as_evicted(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread's read finds that its file is gone, after a write has chosen to evict it."""
    with closing(FileBackend(directory, max_bytes=6)) as backend:
        for key in KEYS[:2]:
            put(backend, key, b"abc")
        original = backend._index.coldest_over_budget

        def overtaken() -> bytes | None:
            coldest = original()
            if coldest == KEYS[0]:
                (directory / "00" / KEYS[0].hex()).unlink()
                assert get(backend, KEYS[0]) is None
            return coldest

        monkeypatch.setattr(backend._index, "coldest_over_budget", overtaken)
        put(backend, KEYS[2], b"abcd")
        assert keys_of(backend) == [KEYS[2]]
        assert backend.stats()["evicted_values"] == 1


def test_values_being_written_count_against_the_budget(directory: Path) -> None:
    backend = FileBackend(directory, max_bytes=4)
    backend._index.reserve(2)
    with pytest.raises(
        BackendFullError, match=r"^a value of 3 bytes has no room: the budget is 4$"
    ):
        put(backend, KEYS[0], b"abc")
    assert not list(directory.glob("??/*"))
    assert backend.stats()["bytes"] == 2
    backend._index.give_back(2)
    put(backend, KEYS[0], b"abc")
    backend.close()


def test_a_file_removed_or_added_by_somebody_else_is_a_miss(directory: Path) -> None:
    backend = FileBackend(directory, max_bytes=100)
    put(backend, KEYS[0], b"abc")
    put(backend, KEYS[1], b"abc")
    (directory / "00" / KEYS[0].hex()).unlink()
    (directory / "01" / KEYS[1].hex()).unlink()
    assert get(backend, KEYS[0]) is None
    assert backend.delete(KEYS[1])
    (directory / "01" / KEYS[1].hex()).write_bytes(b"abc")
    assert get(backend, KEYS[1]) is None
    assert keys_of(backend) == []
    backend.check()
    backend.close()


def test_a_value_that_is_written_between_a_miss_and_its_note_stays(directory: Path) -> None:
    """Another thread writes a value again after a read has found that its file is gone."""

    class Overtaken(OsFiles):
        def read(self, path: str, into: Sequence[memoryview]) -> int:
            try:
                return super().read(path, into)
            except FileNotFoundError:
                while others:
                    put(backend, KEYS[0], others.pop())
                raise

    others: list[bytes] = []
    with closing(FileBackend(directory, max_bytes=100, files=Overtaken())) as backend:
        put(backend, KEYS[0], b"old")
        (directory / "00" / KEYS[0].hex()).unlink()
        others.append(b"newer")
        assert get(backend, KEYS[0]) is None and not others
        assert keys_of(backend) == [KEYS[0]] and backend.stats()["bytes"] == 5
        assert get(backend, KEYS[0]) == b"newer"
        backend.check()


def test_a_link_is_not_followed(directory: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"secret")
    backend = FileBackend(directory, max_bytes=100)
    put(backend, KEYS[0], b"abc")
    (directory / "00" / KEYS[0].hex()).unlink()
    (directory / "00" / KEYS[0].hex()).symlink_to(tmp_path / "secret")
    with pytest.raises(BackendIOError, match=r"^reading failed: ELOOP "):
        get(backend, KEYS[0])
    backend.close()


def test_a_link_in_place_of_the_lock_is_refused(directory: Path, tmp_path: Path) -> None:
    """Somebody who plants a link could have a file created or locked anywhere."""
    directory.mkdir(mode=0o700)
    (directory / "lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(BackendIOError, match=r": ELOOP "):
        FileBackend(directory, max_bytes=100)
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize(("number", "stays"), [(errno.EIO, False), (errno.EMFILE, True)])
def test_an_unreadable_value_is_stored_again(
    directory: Path, monkeypatch: pytest.MonkeyPatch, number: int, stays: bool
) -> None:
    def broken(files: OsFiles, path: str, into: Any) -> int:
        raise OSError(number, "not now")

    with closing(FileBackend(directory, max_bytes=100)) as backend:
        checksummed = ChecksummedBackend(backend)
        assert store(checksummed, KEYS[0], b"abc") is Status.STORED
        with monkeypatch.context() as patched:
            patched.setattr(OsFiles, "read", broken)
            assert load(checksummed, KEYS[0], 3)[0] is Status.FAILED
        assert store(checksummed, KEYS[0], b"abc") is (Status.EXISTS if stays else Status.STORED)
        assert load(checksummed, KEYS[0], 3) == (Status.LOADED, b"abc")


def test_a_pipe_in_place_of_a_value_is_a_failure(directory: Path) -> None:
    with closing(FileBackend(directory, max_bytes=100)) as backend:
        checksummed = ChecksummedBackend(backend)
        assert store(checksummed, KEYS[0], b"abc") is Status.STORED
        [path] = directory.glob(f"*/{KEYS[0].hex()}")
        path.unlink()
        os.mkfifo(path)
        assert load(checksummed, KEYS[0], 3)[0] is Status.FAILED  # and does not wait for a writer


def test_a_start_skips_everything_but_files(directory: Path, tmp_path: Path) -> None:
    with closing(FileBackend(directory, max_bytes=100)) as backend:
        put(backend, KEYS[0], b"abc")
    names = [directory / "00" / f"00{key.hex()[2:]}" for key in KEYS[1:5]]
    os.mkfifo(names[0])
    names[1].symlink_to(tmp_path / "elsewhere")
    names[2].mkdir()
    (directory / "00" / ".tmp-x").mkdir()
    (directory / "aa").write_text("a file, not a directory of values")
    with closing(FileBackend(directory, max_bytes=6)) as backend:
        assert keys_of(backend) == [KEYS[0]]
        for name in names[:2]:
            put(backend, bytes.fromhex(name.name), b"def")  # replaces it
            assert get(backend, bytes.fromhex(name.name)) == b"def"
        with pytest.raises(BackendIOError, match=r"^writing failed: EISDIR "):
            put(backend, bytes.fromhex(names[2].name), b"def")
        put(backend, KEYS[5], b"ghi")


@pytest.mark.parametrize(
    ("faults", "message"),
    [
        (Faults(no_space=1), r"^writing failed: ENOSPC \(No space left on device\)$"),
        (Faults(sync_fails=1), r"^writing failed: EIO \(Input/output error\)$"),
        (Faults(rename_fails=1), r"^writing failed: ENOSPC \(No space left on device\)$"),
    ],
)
def test_a_write_that_fails_leaves_nothing(faults: Faults, message: str) -> None:
    disk = CrashDisk(lambda _: 0)
    backend = FileBackend("/cache", max_bytes=100, sync="data", files=disk)
    put(backend, KEYS[0], b"abc")
    disk.faults = faults
    with pytest.raises(BackendIOError, match=message) as raised:
        put(backend, KEYS[1], b"abc")
    assert raised.value.doing == "writing"
    assert raised.value.errno in (errno.ENOSPC, errno.EIO)
    backend.check()
    assert keys_of(backend) == [KEYS[0]]
    names = [
        name for bucket in disk.directories("/cache") for name, *_ in disk.scan(f"/cache/{bucket}")
    ]
    assert names == [KEYS[0].hex()]
    status, error = ChecksummedBackend(backend).store(KEYS[2], [memoryview(b"a")])
    assert (status, error) == (Status.FAILED, "BackendIOError")


@pytest.mark.parametrize(
    ("change", "doing"),
    [
        (lambda backend: backend.delete(KEYS[0]), "deleting"),
        (lambda backend: put(backend, KEYS[2], b"ghi"), "writing"),
    ],
    ids=["delete", "evict"],
)
def test_a_file_that_cannot_be_removed_is_counted_and_found(
    change: Callable[[FileBackend], Any], doing: str
) -> None:
    disk = CrashDisk(lambda _: 0)
    backend = FileBackend("/cache", max_bytes=8, sync="data", files=disk)
    put(backend, KEYS[0], b"abc")
    put(backend, KEYS[1], b"def")
    disk.faults = Faults(unlink_fails=1)
    for _ in range(3):
        with pytest.raises(BackendIOError, match=rf"^{doing} failed: EIO "):
            change(backend)
        backend.check()
        assert backend.stats()["bytes"] == 6
        assert [value.key for value in backend.list_values()] == KEYS[:2]
    disk.faults = Faults()
    change(backend)
    backend.check()
    assert (get(backend, KEYS[0]), get(backend, KEYS[1])) == (None, b"def")


def leak_after(error: BaseException, backends: Any, directory: Path) -> int:
    """Return the bytes that are counted for no value after a write that raises an error."""
    with closing(backends.FileBackend(directory, max_bytes=10)) as backend:
        put(backend, KEYS[0], b"abc")

        def broken(*arguments: Any) -> str:
            raise error

        backend._write_temporary = broken
        with pytest.raises(type(error)):
            backend.put(KEYS[1], [memoryview(b"defg")])
        del backend._write_temporary
        return int(backend.stats()["bytes"]) - 3


@pytest.mark.parametrize("error", [MemoryError(), KeyboardInterrupt(), RuntimeError()], ids=repr)
def test_a_write_that_raises_any_error_gives_its_bytes_back(
    error: BaseException, directory: Path
) -> None:
    assert leak_after(error, planted.REAL.files, directory) == 0


def test_a_budget_that_only_our_own_errors_give_back_is_caught(directory: Path) -> None:
    leaky = planted.Bug(
        "bytes are given back after our own errors",
        "files/backend.py",
        "self._write_temporary(key, parts), num_bytes)\n            except BaseException:\n",
        "self._write_temporary(key, parts), num_bytes)\n            except OSError:\n",
    )
    assert leak_after(MemoryError(), planted.load(leaky).files, directory) == 4


def test_a_name_whose_sync_fails_is_removed(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(files: OsFiles, path: str) -> None:
        raise OSError("without a number")

    with closing(FileBackend(directory, max_bytes=100, sync="data")) as backend:
        put(backend, KEYS[0], b"abc")
        with monkeypatch.context() as patched:
            patched.setattr(OsFiles, "sync_directory", broken)
            with pytest.raises(BackendIOError, match=r"^writing failed: unknown ") as raised:
                put(backend, KEYS[0], b"defg")
        assert raised.value.errno == 0
        assert keys_of(backend) == []
        assert os.listdir(directory / "00") == []
        backend.check()


def test_a_start_on_a_broken_disk_is_refused() -> None:
    disk = CrashDisk(lambda _: 0, Faults(sync_fails=1))
    with pytest.raises(BackendIOError, match=r"^opening the directory /cache failed: EIO "):
        FileBackend("/cache", max_bytes=100, sync="data", files=disk)
    assert disk.handles == {}


@pytest.mark.parametrize("error", [MemoryError(), KeyboardInterrupt(), OSError(5, "")], ids=repr)
@pytest.mark.parametrize("call", ["directories", "scan", "unlink"])
def test_a_start_that_fails_leaves_the_directory_to_the_next(
    directory: Path, monkeypatch: pytest.MonkeyPatch, call: str, error: BaseException
) -> None:
    def broken(*arguments: Any) -> None:
        raise error

    with closing(FileBackend(directory, max_bytes=100)) as backend:
        put(backend, KEYS[1], b"abc")
    (directory / "01" / ".tmp-7").write_bytes(b"half")
    with monkeypatch.context() as patched:
        patched.setattr(OsFiles, call, broken)
        with pytest.raises((BackendIOError, type(error))):
            FileBackend(directory, max_bytes=100)
    with closing(FileBackend(directory, max_bytes=100)) as backend:
        assert keys_of(backend) == [KEYS[1]]
        assert backend.stats()["swept_temporaries"] == 1


@pytest.mark.parametrize("error", [MemoryError(), KeyboardInterrupt(), OSError(5, "")], ids=repr)
@pytest.mark.parametrize(
    "call", ["make_directory", "sync_directory", "create", "write", "stamp", "sync", "rename"]
)
def test_a_write_after_one_that_failed_at_any_call_succeeds(
    directory: Path, monkeypatch: pytest.MonkeyPatch, call: str, error: BaseException
) -> None:
    """And the one that failed leaves no file."""

    def broken(*arguments: Any) -> None:
        raise error

    synced: list[str] = []
    sync_now = OsFiles.sync_directory

    def noted(files: OsFiles, path: str) -> None:
        synced.append(path)
        sync_now(files, path)

    with closing(FileBackend(directory, max_bytes=100, sync="data")) as backend:
        with monkeypatch.context() as patched:
            patched.setattr(OsFiles, call, broken)
            with pytest.raises((BackendIOError, type(error))):
                backend.put(KEYS[1], [memoryview(b"abc")])
        assert list(directory.glob("??/*")) == [] and keys_of(backend) == []
        monkeypatch.setattr(OsFiles, "sync_directory", noted)
        put(backend, KEYS[1], b"abc")
        assert get(backend, KEYS[1]) == b"abc"
        is_named = call not in ("make_directory", "sync_directory")
        assert synced == [str(directory)] * (not is_named) + [str(directory / "01")]


def test_a_load_makes_three_system_calls(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = FileBackend(directory, max_bytes=100)
    put(backend, KEYS[0], b"abcdef")
    calls: list[str] = []

    def counted(name: str) -> Callable[..., Any]:
        original = getattr(os, name)

        def call(*arguments: Any) -> Any:
            calls.append(name)
            return original(*arguments)

        return call

    for name in ("open", "preadv", "fstat", "close"):
        monkeypatch.setattr(os, name, counted(name))
    assert get(backend, KEYS[0], room=6) == b"abcdef"
    assert calls == ["open", "preadv", "close"]
    calls.clear()
    assert (
        backend.get(KEYS[0], [memoryview(bytearray(5))]) == 6
    )  # a fourth call asks for the length
    assert calls == ["open", "preadv", "fstat", "close"]
    backend.close()


def test_a_file_that_refuses_o_noatime_is_read_without_it(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a network file system, or with files of another user; the flag is tried once."""
    backend = FileBackend(directory, max_bytes=100)
    put(backend, KEYS[0], b"abc")
    original, no_atime = os.open, []

    def refuses(path: str, flags: int, *mode: int) -> int:
        no_atime.append(flags & os.O_NOATIME != 0)
        if no_atime[-1]:
            raise PermissionError(errno.EPERM, "Operation not permitted")
        return original(path, flags, *mode)

    monkeypatch.setattr(os, "open", refuses)
    assert get(backend, KEYS[0]) == b"abc"
    assert get(backend, KEYS[0]) == b"abc"
    assert no_atime == [True, False, False]
    backend.close()


def test_a_file_that_cannot_be_opened_fails(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = FileBackend(directory, max_bytes=100)
    put(backend, KEYS[0], b"abc")
    no_atime = []

    def refuses(path: str, flags: int) -> int:
        no_atime.append(flags & os.O_NOATIME != 0)
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "open", refuses)
    for _ in range(2):
        with pytest.raises(BackendIOError, match=r"^reading failed: EACCES "):
            get(backend, KEYS[0])
    assert no_atime == [True, False] * 2  # other files are still opened with the flag
    backend.close()


def test_a_value_in_more_parts_than_one_system_call_takes(directory: Path) -> None:
    backend = FileBackend(directory, max_bytes=10_000)
    value = bytes(range(1, 251)) * 9
    backend.put(KEYS[0], [memoryview(value)[n : n + 1] for n in range(len(value))])
    for num_parts in (1023, 1024, 1025, 2250):
        into = [bytearray(1) for _ in range(num_parts)]
        assert backend.get(KEYS[0], [memoryview(part) for part in into]) == len(value)
        assert b"".join(into) == value[:num_parts]
    backend.close()


def test_a_value_longer_by_one_byte_is_corrupt(directory: Path) -> None:
    backend = FileBackend(directory, max_bytes=1000)
    checksummed = ChecksummedBackend(backend)
    assert checksummed.store(KEYS[0], [memoryview(b"abc")]) == (Status.STORED, "")
    with open(directory / KEYS[0].hex()[:2] / KEYS[0].hex(), "ab") as file:
        file.write(b"\0")
    assert checksummed.load(KEYS[0], [memoryview(bytearray(3))]) == (Status.CORRUPT, "LONG")
    backend.close()


def test_a_disk_that_writes_nothing_does_not_block_a_writer_forever() -> None:
    class Full(OsFiles):
        def write(self, file: int, parts: object) -> int:
            return 0

    with pytest.raises(OSError, match=r"nothing was written$") as error:
        write_all(Full(), 0, [memoryview(b"abc")])
    assert error.value.errno == errno.EIO


def test_short_reads_and_writes_continue(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    preadv, writev = os.preadv, os.writev
    monkeypatch.setattr(os, "preadv", lambda file, into, at: preadv(file, [into[0][:1]], at))
    monkeypatch.setattr(os, "writev", lambda file, parts: writev(file, [parts[0][:1]]))
    backend = FileBackend(directory, max_bytes=100)
    put(backend, KEYS[0], b"abcdef")
    assert get(backend, KEYS[0]) == b"abcdef"
    assert get(backend, KEYS[0], room=6) == b"abcdef"
    assert backend.get(KEYS[0], [memoryview(bytearray(4))]) == 6
    monkeypatch.setattr(os, "writev", lambda file, parts: 0)  # finally, nothing is written
    with pytest.raises(BackendIOError, match=r"^writing failed: EIO "):
        put(backend, KEYS[1], b"abc")
    assert os.listdir(directory / "01") == []
    backend.close()


def test_a_value_truncated_during_a_read_has_the_length_that_was_read(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = FileBackend(directory, max_bytes=100)
    put(backend, KEYS[0], b"abcdef")
    preadv = os.preadv
    monkeypatch.setattr(
        os, "preadv", lambda file, into, at: 0 if at else preadv(file, [into[0][:2]], 0)
    )
    assert backend.get(KEYS[0], [memoryview(bytearray(6))]) == 2
    backend.close()

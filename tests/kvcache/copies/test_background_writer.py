"""The threads that write to the host tier: the memory they hold, and their end."""

import atexit
import threading
import time
import weakref
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from radixkv.kvcache import HostArrays
from radixkv.kvcache.copies.background_writer import BackgroundWriter, StagedBlocks, WriteReport
from radixkv.kvcache.ids import OpId

from ..driving import LONG_S


@pytest.fixture
def writer():
    writer = BackgroundWriter(HostArrays(1, 1, 1, 2, 4, np.float32), 1)
    yield writer
    assert writer.close(LONG_S)


def write(number: int) -> StagedBlocks:
    """A write of block 1."""
    pools: Any = [np.full((1, 1, 2, 4), number, np.float32) for _ in range(2)]
    return StagedBlocks(OpId(number), slice(0, 1), np.array([1], np.int32), pools, 64)


def test_staging_is_freed_before_its_write_is_reported(writer):
    staged = write(1)
    held = [weakref.ref(pool) for pool in staged.staging]
    writer.submit(staged)
    del staged
    writer.wait(LONG_S)
    assert all(each() is None for each in held)
    assert writer.reports() == [WriteReport(OpId(1), slice(0, 1), 64, "")]


@pytest.mark.usefixtures("writer")
def test_a_hung_device_does_not_keep_the_process_alive():
    threads = [each for each in threading.enumerate() if each.name.startswith("radixkv-host-")]
    assert threads and all(each.daemon for each in threads)


def test_what_is_queued_is_written_before_the_threads_end(writer, monkeypatch):
    may_write, write_now = threading.Event(), writer._host.write

    def held(*args: Any) -> None:
        assert may_write.wait(LONG_S)
        write_now(*args)

    monkeypatch.setattr(writer._host, "write", held)
    for number in range(1, 4):
        writer.submit(write(number))
    assert not writer.close(0.0)
    may_write.set()
    assert writer.close(LONG_S)
    assert writer.reports() == [WriteReport(OpId(n), slice(0, 1), 64, "") for n in range(1, 4)]
    assert (writer._host.memory[1].view(np.float32) == 3).all()
    with pytest.raises(RuntimeError, match=r"^the writer of the host tier is closed$"):
        writer.submit(write(4))
    assert writer.withdraw(OpId(4)) == []


def test_the_error_of_a_write_is_reported_though_its_report_fails_at_first(writer, monkeypatch):
    failures: list[Exception] = [MemoryError(), OSError()]
    report = writer._report

    def fail(*args: Any) -> bool:
        if failures:
            raise failures.pop()
        return report(*args)

    monkeypatch.setattr(writer, "_report", fail)
    bad = write(1)
    writer.submit(StagedBlocks(bad.op_id, bad.blocks, np.array([9], np.int32), bad.staging, 64))
    writer.submit(write(2))
    writer.wait(LONG_S)
    assert writer.close(LONG_S)
    errors = [each.error for each in writer.reports()]
    assert (errors, failures) == (["IndexError", ""], []), "the first error counts"


@pytest.mark.parametrize("slow_s", [0.0, 2.0, 100.0])
def test_all_threads_share_the_time_to_end(writer, monkeypatch, slow_s):
    now = [0.0]

    class Slow:
        def __init__(self) -> None:
            self.left = slow_s

        def is_alive(self) -> bool:
            return self.left > 0

        def join(self, timeout_s: float) -> None:
            took_s = min(self.left, timeout_s)
            self.left -= took_s
            now[0] += took_s

    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    threads = [Slow() for _ in range(3)]
    with patch.object(writer, "_threads", threads):
        assert writer.close(5.0) is (slow_s == 0.0)
    assert now[0] == min(3 * slow_s, 5.0)
    monkeypatch.undo()


def test_a_writer_is_closed_at_the_end_of_the_program_unless_it_was_before(monkeypatch):
    """A thread that copies then would abort the process; a closed writer is not kept for it."""
    kept: list[Any] = []
    monkeypatch.setattr(atexit, "register", lambda call, *given: kept.append((call, given)))
    monkeypatch.setattr(atexit, "unregister", lambda call: kept.remove((call, (10.0,))))
    writer = BackgroundWriter(HostArrays(1, 1, 1, 2, 4, np.float32), 2)
    assert kept == [(writer.close, (10.0,))]
    may_write = threading.Event()
    monkeypatch.setattr(writer._host, "write", lambda *given: may_write.wait(LONG_S))
    writer.submit(write(1))
    assert not writer.close(0.0)
    assert len(kept) == 1, "a thread still writes"
    may_write.set()
    assert writer.close(LONG_S)
    assert kept == []

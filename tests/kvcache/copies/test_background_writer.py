"""The threads that write to the host tier: the memory they hold, and their end."""

import threading
import weakref
from typing import Any

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


def test_staging_is_freed_before_its_write_is_reported(writer):
    pools: Any = [np.ones((1, 1, 2, 4), np.float32) for _ in range(2)]
    held = [weakref.ref(pool) for pool in pools]
    writer.submit(StagedBlocks(OpId(1), slice(0, 1), np.array([1], np.int32), pools, 64))
    del pools
    writer.wait(LONG_S)
    assert all(each() is None for each in held)
    assert writer.reports() == [WriteReport(OpId(1), slice(0, 1), 64, "")]


@pytest.mark.usefixtures("writer")
def test_a_hung_device_does_not_keep_the_process_alive():
    threads = [each for each in threading.enumerate() if each.name.startswith("radixkv-host-")]
    assert threads and all(each.daemon for each in threads)

"""A tier driver ends each operation once and gives staging back, whatever is raised."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import pytest

from radixkv.kvcache.copies import in_flight, tier_driver
from radixkv.kvcache.copies.background_writer import StagedBlocks
from radixkv.kvcache.copies.host_arrays import HostArrays
from radixkv.kvcache.copies.in_flight import OperationResult
from radixkv.kvcache.copies.tier_driver import TierDriver
from radixkv.kvcache.ids import Epoch, OpId
from radixkv.kvcache.tiers.operations import Operation, OpKind

from .injection import ALL_ERRORS, injections
from .planting import Bug, bug, planted, planted_source
from .test_writer_error_paths import Unthreaded

DRIVER: Final = "kvcache.copies.tier_driver"
TABLE: Final = "kvcache.copies.in_flight"
BUGS: Final = (
    bug(
        "reports are taken before they are collected",
        DRIVER,
        ("            self._collect_write(self._reports[0])\n            del self._reports[0]\n",
         "            self._collect_write(self._reports.pop(0))\n"),
    ),
    bug(
        "bytes are given back before an operation has its end",
        DRIVER,
        ("        entry = self._table.get(report.op_id)\n        if report.error:\n",
         "        entry = self._table.get(report.op_id)\n"
         "        self._bytes_in_flight -= report.num_bytes\n        if report.error:\n"),
        ("again after an error\n        self._bytes_in_flight -= report.num_bytes\n",
         "again after an error\n"),
    ),
    bug(
        "what an interrupted operation has staged is kept",
        DRIVER,
        ("            self._bytes_in_flight -= write.num_bytes\n        self._drop_staged(entry)\n",
         "            self._bytes_in_flight -= write.num_bytes\n"),
    ),
    bug(
        "an operation is closed before its result is made",
        TABLE,
        ("        self._close(entry, outcome, fenced=fenced)\n"
         "        self._results[op_id] = result\n",
         "        self._results[op_id] = result\n"),
        ("        result = OperationResult(op_id, tuple(entry.ok), fenced)\n",
         "        self._close(entry, outcome, fenced=fenced)\n"
         "        result = OperationResult(op_id, tuple(entry.ok), fenced)\n"),
    ),
    bug(
        "a fence is forgotten before it is recorded",
        TABLE,
        ("        if op_id in self._results:  # its end",
         "        del self.unfenced[op_id]\n        if op_id in self._results:  # its end"),
        ("            self._fenced.append(op_id)\n        del self.unfenced[op_id]\n",
         "            self._fenced.append(op_id)\n"),
    ),
)  # fmt: skip


class Copies:
    """Copies of one block at a time, of nothing."""

    def check_ids(self, ids: object) -> None:
        """Accept all ids."""

    def pieces(self, num_blocks: int) -> Iterator[tuple[slice, int]]:
        return ((slice(first, first + 1), 1) for first in range(num_blocks))

    def gather(self, arrays: object, ids: Any, size: int) -> list[Any]:
        return [ids]

    def to_host(self, staging: list[Any]) -> list[Any]:
        return staging

    def scatter(self, *arguments: object) -> None:
        """Do nothing."""


class Driver(TierDriver):
    """A driver whose writes are done, and whose time passes, when the test says so."""

    def __init__(self) -> None:
        self.now = 0.0
        host = HostArrays(1, 4, 1, 1, 1, np.int8)
        super().__init__(host, clock=lambda: self.now)
        self._writer.close(10.0)
        self.writer = Unthreaded()
        self._writer = self.writer
        self._copies = Copies()  # type: ignore[assignment]


def operation(number: int, kind: OpKind, first: int) -> Operation:
    ids = np.arange(first, first + 2, dtype=np.int32)
    return Operation(OpId(number), Epoch(0), kind, ids, ids, (), 9.0)


OPERATIONS: Final = [
    operation(1, OpKind.DEVICE_TO_HOST, 1),
    operation(2, OpKind.HOST_TO_DEVICE, 3),
]
ARRAYS: Final[Any] = SimpleNamespace(keys=[], values=[])


class Run:
    """A driver that copies in both directions.

    Attributes:
        results, fenced: what it has returned.
    """

    def __init__(self) -> None:
        self.driver = Driver()
        self.results: list[OperationResult] = []
        self.fenced: list[OpId] = []
        self._begun: list[StagedBlocks] = []

    def copy(self, *, is_late: bool) -> None:
        """If late, the deadline comes when one of two writes has begun."""
        self.driver.dispatch(OPERATIONS, ARRAYS)
        if is_late and self.driver.writer._queue:
            self._begun.append(self.driver.writer._queue.popleft())
            self.driver.now = 10.0
            self.collect()
        self.work()
        self.collect()

    def collect(self) -> None:
        self.results += self.driver.poll()
        self.fenced += self.driver.fenced()

    def work(self) -> None:
        """Let the writer do all it has."""
        for each in self._begun:
            self.driver.writer._report(each.op_id, each.blocks, each.num_bytes, "")
        self._begun = []
        self.driver.writer.work()


def inject(*, is_late: bool) -> None:
    for injector in injections(tier_driver, in_flight, errors=ALL_ERRORS):
        run = Run()
        injector.call(partial(run.copy, is_late=is_late))
        run.work()
        run.driver.now = 10.0
        for _ in range(2):
            run.collect()
        stats = run.driver.stats()
        held = stats.bytes_in_flight, stats.open_operations, stats.unfenced_operations
        assert held == (0, 0, 0), f"in flight are {held} after {injector}"
        ended = [each.op_id for each in run.results]
        assert len(ended) == len(set(ended)), f"ended twice: {injector}"
        if not injector.raised_in:
            assert sorted(ended) == [1, 2]
            assert run.fenced == ([1] if is_late else [])


@pytest.mark.parametrize("is_late", [False, True])
def test_a_driver_gives_staging_back(is_late: bool) -> None:
    inject(is_late=is_late)


@pytest.mark.parametrize("bug", BUGS, ids=str)
def test_what_a_driver_keeps_is_found(bug: Bug) -> None:
    with planted(bug), pytest.raises((AssertionError, KeyError)):
        inject(is_late=False)
        inject(is_late=True)


def test_every_bug_fits() -> None:
    for each in BUGS:
        planted_source(each)

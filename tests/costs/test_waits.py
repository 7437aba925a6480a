"""No call of the core, an engine, a node or a transport waits; calls are looked at."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Final
from unittest.mock import patch

import numpy as np
import pytest

from radixkv.scheduler.handoff.messages import AttemptKey, PartId
from radixkv.scheduler.nodes.transport import transfer_table
from radixkv.scheduler.nodes.transport.transfer_table import OfferEntry, TransferTable

from . import engine_bugs
from .all_subjects import BY_NAME, SUBJECTS
from .measure import Operations, measured, waits_of
from .node_subjects import LoopEngine
from .planting import Bug, planted
from .subjects import KEY, Subject
from .test_error_paths import stored
from .transfer_subjects import LAYOUT
from .unthreaded import Unthreaded
from .work_bugs import then

WORKERS: Final = "kvcache.storage.workers"


def storage_calls() -> Operations:
    """Every call of storage that its caller must not wait in."""
    storage = Unthreaded()
    operation = yield "store", lambda: storage.store([KEY], [stored(1)], timeout_s=9.0)
    yield "poll", storage.poll
    yield "fenced", lambda: storage.fenced(operation)
    yield "cancel", lambda: storage.cancel(operation)
    yield "stats", storage.stats


def waits(calls: Operations) -> list[str]:
    found = measured(calls, waits_of)
    return [wait for each in found.values() for waited in each for wait in waited]


@pytest.mark.parametrize("subject", [each for each in SUBJECTS if not each.is_thread], ids=str)
def test_no_call_waits(subject: Subject) -> None:
    assert waits(subject.calls(subject.few)) == []


def test_no_call_of_storage_waits() -> None:
    assert waits(storage_calls()) == []


def test_a_transport_in_which_nothing_moves_sleeps() -> None:
    clock = SimpleNamespace(monotonic=lambda: 1.0)
    with patch.object(transfer_table, "time", clock):
        table = TransferTable(LoopEngine())
        assert table.wait_s() is None
        part = PartId(AttemptKey("r", 1), epoch=1, peer_epoch=1, grant=1, part=0)
        arrays = tuple([np.zeros(each.shape, each.dtype) for each in LAYOUT.arrays])
        table.offer(part, OfferEntry(arrays, LAYOUT, expires_at=3.0))
        assert table.wait_s() == 0.0  # until it is served
        table.step()
        assert table.wait_s() == 2.0
        with patch.object(LoopEngine, "maintain_every_s", 0.5):
            assert table.wait_s() == 0.5
        table.withdraw(part.key, was_read=True)
        assert table.wait_s() == 0.0  # until it is withdrawn
        table.step()
        assert table.wait_s() is None


BUGS: Final = (
    then("a poll sleeps", WORKERS, "        now = self._clock()", "time.sleep(0.005)"),
    then("a poll waits for a report", WORKERS,
         "            self._num_seen = self._num_done", "self._reported.wait(0.001)"),
    then("a store sleeps", WORKERS, "        deadline = self._clock() + timeout_s",
         "time.sleep(0.001)"),
)  # fmt: skip


@pytest.mark.parametrize("bug", BUGS, ids=str)
def test_a_wait_is_found(bug: Bug) -> None:
    with planted(bug):
        assert waits(storage_calls())


@pytest.mark.parametrize(
    ("name", "bug"),
    [(name, each) for name, bugs in engine_bugs.WAITS.items() for each in bugs],
    ids=str,
)
def test_a_wait_of_an_engine_or_a_node_is_found(name: str, bug: Bug) -> None:
    with planted(bug):
        assert waits(BY_NAME[name].calls(BY_NAME[name].few))

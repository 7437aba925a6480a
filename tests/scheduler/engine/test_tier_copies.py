"""The copies of an engine's tiers: what passes through them, and when they may be closed."""

from __future__ import annotations

from enum import Enum
from itertools import product
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

import pytest

from radixkv.kvcache.storage import StorageWorkers
from radixkv.scheduler.engine import tier_copies
from radixkv.scheduler.engine.stats import CopyStats
from radixkv.scheduler.engine.tier_copies import TierCopies
from radixkv.scheduler.errors import EngineClosedError


class FakeDriver:
    """Needs some waits until it has ended its operations, and its touches of stored blocks."""

    def __init__(self, tiers: Any, touches: int) -> None:
        self.tiers, self.touches = tiers, touches
        self.left: list[tuple[int, int]] = []
        self.now, self.timeout_s = 50.0, 0.0

    @property
    def is_touching(self) -> bool:
        return self.touches > 0

    def wait(self, timeout_s: float) -> None:
        assert timeout_s > 0
        self.now += 100.0
        self.tiers.num_open_operations = max(self.tiers.num_open_operations - 1, 0)
        self.touches -= 1

    def close(self, timeout_s: float) -> bool:
        self.left.append((self.tiers.num_open_operations, max(self.touches, 0)))
        self.timeout_s = timeout_s
        return timeout_s > 0


@pytest.mark.parametrize("operations", [0, 1, 3])
@pytest.mark.parametrize("touches", [0, 1, 3])
def test_a_close_waits_for_operations_and_touches(
    operations: int, touches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies: Any = TierCopies.__new__(TierCopies)
    copies._tiers = SimpleNamespace(num_open_operations=operations)
    copies._driver = driver = FakeDriver(copies._tiers, touches)
    for name in ("collect", "dispatch"):
        monkeypatch.setattr(TierCopies, name, lambda *_: None)
    monkeypatch.setattr(tier_copies, "time", SimpleNamespace(monotonic=lambda: driver.now))
    assert copies.close(None, timeout_s=600.0)
    assert driver.left == [(0, 0)]
    assert driver.timeout_s == 600.0 - 100.0 * max(operations, touches), "what is left"
    copies._tiers.num_open_operations = 2
    assert not copies.close(None, timeout_s=0.0)
    assert driver.left[1:] == [(2, 0)]


def make_copies(
    monkeypatch: pytest.MonkeyPatch,
    host_blocks: int = 4,
    device_blocks: int = 4,
    storage: Any = None,
) -> tuple[TierCopies, Mock, Mock]:
    """Copies, with a manager and a driver that only take calls."""
    tiers, driver = Mock(), Mock()
    tiers.config.num_blocks = host_blocks
    made = Mock(return_value=driver)
    monkeypatch.setattr(tier_copies, "TierDriver", made)
    monkeypatch.setattr(tier_copies, "HostArrays", Mock())
    arrays: Any = SimpleNamespace(keys=[[None] * (device_blocks + 1)])  # one is the padding
    copies = TierCopies(tiers, arrays, storage)
    tier_copies.HostArrays.like.assert_called_once_with(arrays, host_blocks)  # type: ignore[attr-defined]
    driver.warm_up.assert_called_once_with(arrays)
    driver.most = made.call_args.kwargs["max_blocks_per_copy"]
    return copies, tiers, driver


@pytest.mark.parametrize("host_blocks", [1, 2, 3, 4, 5, 31, 32, 33, 100])
@pytest.mark.parametrize("device_blocks", [1, 2, 3, 4, 5, 31, 32, 33, 100])
def test_a_copy_has_up_to_a_power_of_two_blocks_and_no_more_than_are_needed(
    host_blocks: int, device_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, _, driver = make_copies(monkeypatch, host_blocks, device_blocks)
    useful = min(host_blocks, device_blocks, 32)
    assert driver.most == next(power for power in (1, 2, 4, 8, 16, 32) if power >= useful)


def test_what_is_pending_goes_to_the_driver_and_what_has_ended_comes_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copies, tiers, driver = make_copies(monkeypatch)
    pools: Any = object()
    for cancelled, operations in product([(), (3, 4)], [(), ("an operation",)]):
        driver.reset_mock()
        tiers.take_cancelled.return_value, tiers.take_operations.return_value = (
            cancelled,
            operations,
        )
        copies.dispatch(pools)
        expected = [call.touch(tiers.take_used.return_value)]
        expected[:0] = [call.cancel(cancelled)] if cancelled else []
        expected += [call.dispatch(operations, pools)] if operations else []
        assert driver.mock_calls == expected
    results = [
        SimpleNamespace(op_id=op_id, ok=op_id != 6, fenced=op_id == 7) for op_id in (5, 6, 7)
    ]
    driver.poll.return_value, driver.fenced.return_value = results, [8, 9]
    tiers.reset_mock()
    copies.collect()
    assert tiers.mock_calls == [
        call.complete(5, True, fenced=False),
        call.complete(6, False, fenced=False),
        call.complete(7, True, fenced=True),
        call.fence(8),
        call.fence(9),
    ]
    driver.reset_mock()
    copies.wait()
    copies.replace_copies(print)  # type: ignore[arg-type]
    assert driver.mock_calls == [call.wait(1.0), call.replace_copies(print)]


def test_storage_takes_another_namespace_once_before_its_first_operation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And after the operations with the keys of the last one are cancelled."""
    storage, pools = Mock(spec=StorageWorkers), Mock()
    copies, tiers, driver = make_copies(monkeypatch, storage=storage)
    first, log = tiers.storage, Mock()
    tiers.take_cancelled.return_value, tiers.take_operations.return_value = (3,), ("an operation",)
    for name, mock in (("driver", driver), ("storage", storage)):
        log.attach_mock(mock, name)

    def named(namespace: Any) -> list[str]:
        tiers.storage = namespace
        log.reset_mock()
        copies.dispatch(pools)
        assert all(each.args == (namespace,) for each in storage.use_namespace.call_args_list)
        return [name for name, _, _ in log.mock_calls if name != "driver.touch"]

    unchanged = ["driver.cancel", "driver.dispatch"]
    changed = ["driver.cancel", "storage.use_namespace", "driver.dispatch"]
    assert [named(each) for each in (first, None, "second", "second")] == [
        *(unchanged, unchanged, changed, unchanged)
    ]
    assert named(first) == changed
    copies, tiers, driver = make_copies(monkeypatch, storage=Mock(spec=()))  # one of the caller's
    tiers.take_operations.return_value = tiers.take_cancelled.return_value = ()
    copies.dispatch(pools)
    tiers.storage = "second"
    copies.dispatch(pools)


@pytest.mark.parametrize("ends", [False, True])
def test_copies_are_open_until_a_close_that_may_not_end(
    ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies, tiers, driver = make_copies(monkeypatch)
    copies.check_open()
    tiers.num_open_operations, driver.is_touching = 0, False
    driver.poll.return_value = driver.fenced.return_value = ()
    driver.close.return_value = ends
    assert copies.close(Mock(), timeout_s=1.0) == ends
    with pytest.raises(EngineClosedError, match=r"^the engine is closed$"):
        copies.check_open()


def test_a_driver_that_does_not_warm_up_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Mock(**{"warm_up.side_effect": MemoryError("no room"), "close.return_value": True})
    monkeypatch.setattr(tier_copies, "TierDriver", lambda *_, **__: driver)
    monkeypatch.setattr(tier_copies, "HostArrays", Mock())
    tiers = Mock(**{"config.num_blocks": 2})
    arrays: Any = SimpleNamespace(keys=[[None] * 3])
    with pytest.raises(MemoryError, match=r"^no room$"):
        TierCopies(tiers, arrays, None)
    driver.close.assert_called_once()


def test_counts_are_told_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    copies, _, driver = make_copies(monkeypatch)
    kinds = Enum("kinds", {"LOAD": "load", "SAVE": "save", "DONE": "done"})
    driver.stats.return_value = SimpleNamespace(
        copied_bytes={kinds("load"): 1, kinds("save"): 2},
        operations={(kinds("load"), kinds("done")): 3, (kinds("save"), kinds("done")): 4},
        dropped_blocks=7,
        errors={"OSError": 1},
    )
    assert copies.stats() == CopyStats(
        {"load": 1, "save": 2}, {"load: done": 3, "save: done": 4}, 7, {"OSError": 1}
    )


def test_a_close_takes_completions_and_starts_what_they_allow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copies, tiers, driver = make_copies(monkeypatch)
    pools: Any = object()
    left = [("first",), ("second",)]  # the second may begin when the first is complete
    running: list[Any] = []
    tiers.num_open_operations, driver.is_touching = 2, False
    driver.fenced.return_value = ()

    def complete(op_id: str, ok: bool, *, fenced: bool) -> None:
        tiers.num_open_operations -= 1

    def poll() -> list[Any]:
        ended, running[:] = list(running), []
        return [SimpleNamespace(op_id=each, ok=True, fenced=False) for each in ended]

    tiers.take_cancelled.return_value = ()
    tiers.take_operations.side_effect = lambda: left.pop(0) if left and not running else ()
    tiers.complete.side_effect = complete
    driver.dispatch.side_effect = lambda operations, arrays: running.extend(operations)
    driver.poll.side_effect = poll
    driver.wait.side_effect = [None, None]  # a third one is an error
    assert copies.close(pools, timeout_s=600.0)
    assert [each.args[0] for each in tiers.complete.call_args_list] == ["first", "second"]
    assert driver.dispatch.call_args_list == [call(("first",), pools), call(("second",), pools)]

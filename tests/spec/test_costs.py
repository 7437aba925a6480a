"""The work of a call does not grow with the idle blocks, and the world of costs sees it grow."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from radixkv.scheduler.fuzz.tier_adapter import make_cost_factory
from radixkv.spec.harness.cost_world import CostSubject, CostWorld, work_of
from radixkv.spec.harness.engine import Config, replay
from radixkv.spec.harness.random_engine import run
from radixkv.spec.rules.rule import Violation

METHODS = {"admit", "publish", "append", "append_batch", "release", "evict", "available", "match",
           "take", "complete", "take_cancelled", "used", "park", "unpark", "prefetch"}  # fmt: skip

CONFIG = {"block_size": 1, "path_blocks": 1, "host_blocks": 0}


def test_every_call_of_the_cache_and_its_tiers_is_compared() -> None:
    worlds: list[CostWorld] = []

    class Subject(CostSubject):
        def world(self, config: Config) -> CostWorld:
            worlds.append(super().world(config))
            return worlds[-1]

    result = run(Subject(make_cost_factory()), 1, 2_000)
    assert result.finding is None
    assert {name for name, number in result.situations.items() if number >= 5} == METHODS
    assert len(worlds) == 20 and not any(world.has_diverged for world in worlds)


TIERS = {"take", "complete", "take_cancelled", "used", "park", "unpark", "prefetch"}


@pytest.mark.parametrize(
    "missing", [{"match"}, {"append_batch"}, TIERS, {"match", "append_batch", "evict", *TIERS}]
)
def test_a_method_that_an_adapter_need_not_have_is_not_called(missing: set[str]) -> None:
    make = make_cost_factory()

    class Adapter:
        def __init__(self, config: Config) -> None:  # one without tiers ignores `host_blocks`
            self.adapter = make({**config, "host_blocks": 0} if "take" in missing else config)

        def __getattr__(self, name: str) -> Any:
            if name in missing:
                raise AttributeError(name)
            return getattr(self.adapter, name)

    result = run(CostSubject(Adapter), 1, 1_000)
    assert result.finding is None
    assert result.situations.keys() == METHODS - missing
    world = CostWorld(CONFIG, Adapter)
    for operation in (["append_batch", []], ["evict", 1]):
        assert world.apply(operation) == (operation[0] not in missing)


def test_the_work_of_a_call_is_counted_and_a_debugger_goes_on() -> None:
    def loop(number: int) -> int:
        total = 0
        for each in range(number):
            total += each
        return total

    tracer = sys.gettrace()
    few, many = work_of(lambda: loop(10)), work_of(lambda: loop(1_010))
    assert (few[0], many[0]) == (45, 509_545)
    assert 1_000 <= many[1] - few[1] <= 5_000  # versions of Python count lines differently
    assert work_of(lambda: sum(each for each in range(100)))[1] > 100  # a loop within one line
    assert sys.gettrace() is tracer


class Searching:
    """Finds a free block by looking at each; everything else costs what it must."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.used = [False] * config["num_blocks"]
        self.tables: dict[str, list[int]] = {}

    def admit(self, name: str, tokens: list[int], namespace: bytes) -> int:
        self.tables[name] = [self._take() for _ in tokens]
        return 0

    def _take(self) -> int:
        for block in reversed(range(len(self.used))):
            if not self.used[block]:
                self.used[block] = True
                return block
        raise AssertionError("no block is free")

    def append(self, name: str, tokens: list[int]) -> bool:
        return True

    def publish(self, name: str, tokens: list[int]) -> None:
        for block in self.tables[name]:
            self.used[block] = name == "filler"

    def match(self, name: str, tokens: list[int], namespace: bytes) -> int:
        return 0

    def release(self, name: str) -> None:
        del self.tables[name]

    def block_table(self, name: str) -> list[int]:
        return self.tables[name]

    def available(self) -> int:
        return 8


def test_a_search_through_all_blocks_is_found() -> None:
    found = replay(CostSubject(Searching), CONFIG, [["admit", "r1", [1, 2]]])
    assert isinstance(found, Violation) and found.rule.code == "S5"
    assert "admit takes" in found.why and "with 1500" in found.why


@pytest.mark.parametrize("word", ["append", "release", "park", "resume", "unpark"])
def test_an_operation_of_nobody_calls_nothing(word: str) -> None:
    world = CostWorld(CONFIG, Searching)
    assert not world.apply([word, "nobody", *([[1]] if word == "append" else [])])
    assert not world.situations

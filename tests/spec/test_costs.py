"""The work of a call does not grow with the idle blocks, and the world of costs sees it grow."""

from __future__ import annotations

import sys
from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from radixkv.scheduler.fuzz.tiers.adapter import make_cost_factory
from radixkv.spec.harness.cost_world import CostSubject, CostWorld, work_of
from radixkv.spec.harness.engine import Config, Operation, replay
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


def slow_in(slow: str, is_slow: Callable[[CostWorld, Any], bool]) -> CostWorld:
    """Return a world of ours, in which each idle block makes some calls of one method slower."""
    make = make_cost_factory()
    worlds: list[CostWorld] = []

    class Slow:
        def __init__(self, config: Config) -> None:
            self.adapter, self.size = make(config), config["num_blocks"]

        def __getattr__(self, name: str) -> Any:
            method = getattr(self.adapter, name)
            if name != slow:
                return method

            def search(*arguments: Any) -> Any:
                for _ in range(self.size if worlds and is_slow(worlds[0], arguments) else 0):
                    pass
                return method(*arguments)

            return search

    config = {**CONFIG, "host_blocks": 1, "write": "back", "hits": 0, "storage": 0, "at_once": 0,
              "law": 0}  # fmt: skip
    worlds.append(CostWorld(config, Slow))
    return worlds[0]


STEPS: list[Operation] = [
    ["hit", "r1", 3, [1]], ["admit", "r2", [0, 1]], ["append", "r2", [1]], ["append_batch", ["r2"]],
    ["evict", 1], ["prefetch", [2, 2]], ["park", "r2"], ["unpark", "r2"], ["release", "r1"],
]  # fmt: skip
"""They call each method for a request on the trunk or for another one, but for `complete`."""


@pytest.mark.parametrize("method", sorted(METHODS))
def test_each_method_that_becomes_slower_with_the_idle_blocks_is_found(method: str) -> None:
    world = slow_in(method, lambda *_: True)
    with pytest.raises(Violation) as caught:
        assert all([world.apply(operation) for operation in STEPS])
    assert caught.value.why.startswith(f"{method} takes ")
    world = slow_in(method, lambda *_: False)
    assert all([world.apply(operation) for operation in STEPS]) and not world.has_diverged


@pytest.mark.parametrize("method", ["admit", "match", "publish", "release"])
def test_a_method_that_is_slower_on_the_trunk_breaks_the_rule_about_evicted_branches(
    method: str,
) -> None:
    world = slow_in(method, lambda world, arguments: arguments[0] in world.on_trunk)
    with pytest.raises(Violation, match=rf"{method} takes \d+ lines on a path without branches, "
                       r"and \d+ on one whose branches were evicted") as caught:  # fmt: skip
        assert all([world.apply(operation) for operation in STEPS])
    assert caught.value.rule.code == "S6"


def test_no_prompt_hits_the_trunk_by_chance() -> None:
    """With storage, the caches would differ from then on, and would not be compared any more."""
    subject = CostSubject(make_cost_factory())
    config = {**subject.configure(lambda bound: bound - 1), "block_size": 1}
    world = subject.world(config)
    generator, tokens = Random(0), set()
    for number in range(1, 31):
        operation = world.draw(lambda bound: int(generator.random() * bound))
        if operation[0] == "admit":
            assert operation[1] == f"r{world.num_requests + 1}"
            tokens.update(operation[2])
        world.apply(operation)
        assert not world.has_diverged, f"after {number} operations"
    assert tokens and not tokens & {*world.trunk}


def test_a_search_through_all_blocks_is_found() -> None:
    found = replay(CostSubject(Searching), CONFIG, [["admit", "r1", [1, 2]]])
    assert isinstance(found, Violation) and found.rule.code == "S5"
    assert "admit takes" in found.why and "with 1500" in found.why


@pytest.mark.parametrize("word", ["append", "release", "park", "resume", "unpark"])
def test_an_operation_of_nobody_calls_nothing(word: str) -> None:
    world = CostWorld(CONFIG, Searching)
    assert not world.apply([word, "nobody", *([[1]] if word == "append" else [])])
    assert not world.situations

"""The public face: a Hypothesis machine that is its own test, and the engine over its choices."""

from __future__ import annotations

import unittest
from collections import Counter
from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import rule

from radixkv.scheduler.fuzz.cache_adapter import make_factory
from radixkv.spec.adapters.cache import AdapterError
from radixkv.spec.harness import hypothesis_engine
from radixkv.spec.harness.cache.operations import CACHE_TABLE
from radixkv.spec.harness.cache.world import CacheSubject
from radixkv.spec.harness.machine import CacheMachine
from radixkv.spec.harness.shrink import shrink
from radixkv.spec.rules.rule import Violation

from .toys import Leaky, Plain

pytest_plugins = ["pytester"]

FEW = settings(max_examples=60, stateful_step_count=40, deadline=None, database=None)


@FEW
class TestOurs(CacheMachine):
    """Collected as it stands."""

    make = make_factory()
    depth = "full"


def test_what_is_collected() -> None:
    assert not CacheMachine.__test__ and TestOurs.__test__
    loader = unittest.defaultTestLoader
    assert loader.loadTestsFromTestCase(TestOurs).countTestCases() == 1


def test_pytest_collects_a_machine_without_a_warning(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        from hypothesis import settings
        from radixkv.spec.harness.machine import CacheMachine

        class Nothing:
            def __init__(self, num_blocks, block_size):
                pass

        @settings(max_examples=1, database=None)
        class TestMine(CacheMachine):
            make = Nothing
        """
    )
    result = pytester.runpytest_inprocess("-W", "error", "-p", "no:cacheprovider")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "*Nothing has no method admit; it needs admit(name, tokens*",
            "FAILED *::TestMine::runTest*",
        ]
    )


def test_a_right_manager_passes_at_depth_api() -> None:
    @FEW
    class Machine(CacheMachine):
        make = Plain

    run(Machine)


def test_a_leak_is_found_and_shown() -> None:
    class Machine(CacheMachine):
        make = Leaky

    Machine.TestCase.settings = settings(Machine.TestCase.settings, database=None, max_examples=300)
    with pytest.raises(Violation) as caught:
        run(Machine)
    assert caught.value.rule.code == "D1"
    notes = "\n".join(caught.value.__notes__)
    assert "drain()    # breaks D1 drained-is-whole: " in notes
    assert "before the last call:\n    " in notes
    assert "state.drain()" in notes, "Hypothesis writes the program that was shrunk"


def test_explaining_is_off_under_any_settings() -> None:
    class Machine(CacheMachine):
        make = Plain

    @settings(max_examples=7)
    class Set(CacheMachine):
        make = Plain

    for machine in (Machine, Set):
        phases = machine.run_settings().phases
        assert Phase.explain not in phases and Phase.shrink in phases
    assert Set.run_settings().max_examples == 7


def test_a_machine_without_a_manager_is_told_what_it_lacks() -> None:
    @FEW
    class Machine(CacheMachine):
        pass

    with pytest.raises(AdapterError) as caught:
        run(Machine)
    assert str(caught.value) == (
        "Machine has no make: set it to what makes an adapter from (num_blocks, block_size)"
    )


def test_make_may_be_a_function_and_rules_may_be_added() -> None:
    seen: list[int] = []

    @FEW
    class Machine(CacheMachine):
        def make(num_blocks: int, block_size: int) -> Any:  # type: ignore[misc]
            return Plain(num_blocks, block_size)

        @rule()
        def look(self) -> None:
            seen.append(self.world.target.available())

    run(Machine)
    assert len(seen) > 20


@pytest.mark.slow
def test_every_rule_of_the_machine_does_something() -> None:
    words: Counter[str] = Counter()
    situations: Counter[str] = Counter()

    class Machine(CacheMachine):
        make = make_factory()
        depth = "full"

        def teardown(self) -> None:
            words.update(operation[0] for operation in self.trace)
            if self.trace:
                situations.update(self.world.situations)

    Machine.TestCase.settings = settings(
        FEW, max_examples=500, derandomize=True, phases=[Phase.generate]
    )
    run(Machine)
    assert words.keys() == CACHE_TABLE.by_word.keys()
    wanted = {"hit", "refused", "late completion", "failed step", "preempted", "growth refused"}
    assert wanted <= set(+situations), situations


def run(machine: type[CacheMachine]) -> None:
    machine("runTest").runTest()


# The engine


def test_the_engine_finds_and_its_seed_repeats() -> None:
    subject = CacheSubject(Leaky, "api")
    first, second = (hypothesis_engine.run(subject, 5, 20_000) for _ in range(2))
    assert first.finding is not None and first == second
    assert first.finding.rule == "D1 drained-is-whole"
    assert len(shrink(subject, first.finding).trace) <= 3
    other = hypothesis_engine.run(subject, 6, 20_000)
    assert other.finding is not None and other.finding.trace != first.finding.trace


def test_the_engine_does_as_many_steps_as_it_is_told() -> None:
    subject = CacheSubject(make_factory(), "full")
    result = hypothesis_engine.run(subject, 0, 30_000)
    assert result.finding is None, result.finding
    assert 30_000 <= result.num_steps < 30_000 + 51
    assert result.situations["admitted"] > 500


def test_the_engine_ends_when_there_is_nothing_to_choose() -> None:
    class World:
        def __init__(self) -> None:
            self.situations: Counter[str] = Counter()

        def draw(self, below: Any) -> list:
            return ["wait"]

        def apply(self, operation: list) -> bool:
            return True

        def picture(self) -> str:
            return ""

    class Subject:
        def configure(self, below: Any) -> dict:
            return {}

        def world(self, config: dict) -> World:
            return World()

    subject: Any = Subject()
    result = hypothesis_engine.run(subject, 0, 1_000, 10)
    assert result.finding is None and result.num_steps >= 11

"""Operations are drawn by weight, and both engines count what they do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from radixkv.spec.adapters.cache import AdapterError
from radixkv.spec.harness import hypothesis_engine, random_engine
from radixkv.spec.harness.engine import Finding, new_world, replay
from radixkv.spec.harness.operations import Operation, Table, name_drawn, number
from radixkv.spec.harness.random_engine import Run, case_lengths_of, run_case
from radixkv.spec.rules.rule import RULES, Violation, require

RULE = "S1 no-leak"


class World:
    """Notes its operations; the call with the number in its configuration breaks a rule."""

    def __init__(self, config: dict[str, Any], table: Table[Any]) -> None:
        self.config, self.table = config, table
        self.situations: Counter[str] = Counter()
        self.done: list[list[Any]] = []
        self.names = {"some": ["a", "b", "c"], "none": []}

    def groups(self) -> dict[str, list[str]]:
        return {"": [""], **self.names}

    def note(self, word: str, *arguments: Any) -> bool:
        self.done.append([word, *arguments])
        self.situations[word] += 1
        require(len(self.done) != self.config["breaks"], RULES[RULE], "after {}", len(self.done))
        return True

    def apply(self, operation: list[Any]) -> bool:
        return self.table.apply(self, operation)

    def draw(self, below: Callable[[int], int]) -> list[Any]:
        return self.table.draw(self, self.table.weights(), below)

    def picture(self) -> str:
        return "a picture"


def noted(word: str) -> Callable[..., bool]:
    return lambda world, *arguments: bool(world.note(word, *arguments))


TABLE = Table[World](
    World.groups,
    [
        Operation("drain", noted("drain"), 1),
        Operation("name", noted("name"), 5, "some", {"name": name_drawn, "size": number(3, 2)}),
        Operation("never", noted("never"), 7, "none"),
        Operation("extra", noted("extra"), 2, needs="more"),
    ],
)


class Subject:
    """Makes worlds, and keeps them."""

    def __init__(self, table: Table[Any] = TABLE, breaks: Callable[[int], int] = lambda _: 0):
        self.table, self.breaks = table, breaks
        self.worlds: list[World] = []

    def configure(self, below: Callable[[int], int]) -> dict[str, Any]:
        return {"breaks": self.breaks(len(self.worlds))}

    def world(self, config: dict[str, Any]) -> World:
        self.worlds.append(World(config, self.table))
        return self.worlds[-1]


def choices(*given: int) -> Callable[[int], int]:
    left: Iterator[int] = iter(given)

    def below(bound: int) -> int:
        chosen = next(left)
        assert 0 <= chosen < bound
        return chosen

    return below


def test_an_operation_is_drawn_as_often_as_its_weight_says() -> None:
    world = World({}, TABLE)
    first = 1 + 5 + 2  # those that apply
    drawn = Counter(world.draw(choices(place, 0, 0))[0] for place in range(first))
    assert drawn == {"drain": 1, "name": 5, "extra": 2}
    with pytest.raises(AssertionError):
        world.draw(choices(first))
    assert world.draw(choices(0)) == ["drain"], "the first choice is the simplest"


def test_a_name_and_the_arguments_are_drawn_in_order() -> None:
    world = World({}, TABLE)
    for place, name in enumerate("abc"):
        assert world.draw(choices(1, place, 2)) == ["name", name, 4]
        assert world.draw(choices(5, place, 0)) == ["name", name, 2]
    world.names["some"] = ["only"]
    assert world.draw(choices(1, 1)) == ["name", "only", 3], "nothing to choose"
    assert number(4)(world, "", choices(3)) == 3


def test_operations_that_the_adapter_lacks_are_left_out() -> None:
    assert [each.word for each in TABLE.for_adapter({"more", "other"})] == [
        "drain", "name", "never", "extra"
    ]  # fmt: skip
    few = TABLE.for_adapter(())
    assert few.weights() == {"drain": 1, "name": 5, "never": 7} and few.groups is TABLE.groups


def run_random(subject: Any, num_steps: int, steps_per_case: int = 0) -> Run:
    return random_engine.run(subject, 1, num_steps, steps_per_case)


def run_hypothesis(subject: Any, num_steps: int, steps_per_case: int = 0) -> Run:
    return hypothesis_engine.run(subject, 1, num_steps, steps_per_case)


ENGINES = pytest.mark.parametrize("run", [run_random, run_hypothesis])


@ENGINES
def test_all_steps_of_all_worlds_are_counted(run: Callable[..., Run]) -> None:
    subject = Subject()
    result = run(subject, 500, 7)
    worlds = [world for world in subject.worlds if world.done]
    assert result.num_cases == len(worlds) and result.finding is None
    assert result.num_steps == sum(len(world.done) for world in worlds) >= 500
    assert result.num_steps - len(worlds[-1].done) < 500, "the last case was needed"
    assert result.situations == sum((each.situations for each in worlds), Counter())
    assert all(len(world.done) <= 8 and world.done[-1] == ["drain"] for world in worlds)
    assert max(len(world.done) for world in worlds) == 8


@ENGINES
def test_a_run_ends_with_the_finding_and_what_led_to_it(run: Callable[..., Run]) -> None:
    subject = Subject(breaks=lambda number: 3 * (number >= 4))
    result = run(subject, 10_000, 7)
    worlds = [world for world in subject.worlds if world.done]
    if len(worlds[-1].done) == 2:
        worlds.pop()  # of the picture before the last call
    last = worlds[-1]
    assert result.finding == Finding(RULE, "after 3", {"breaks": 3}, last.done)
    assert len(last.done) == 3 and result.num_cases == len(worlds)
    assert result.num_steps == sum(len(world.done) for world in worlds)
    assert result.situations == sum((each.situations for each in worlds), Counter())


def test_the_lengths_of_cases_are_those_of_the_subject() -> None:
    subject: Any = Subject()
    assert case_lengths_of(subject) == (100,)
    run_random(subject, 500)
    assert {len(world.done) for world in subject.worlds} == {101}
    subject = Subject()
    subject.case_lengths = (2, 5)
    run_random(subject, 500)
    assert {len(world.done) for world in subject.worlds} == {3, 6}
    subject = Subject()
    subject.case_lengths = (2, 5)
    run_hypothesis(subject, 500)
    assert max(len(world.done) for world in subject.worlds) == 6


def test_a_long_run_of_hypothesis_has_new_cases_all_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its first tests are of so few cases, with other seeds."""
    monkeypatch.setattr(hypothesis_engine, "CASES_AT_ONCE", at_once := 4)
    subject = Subject()
    run_hypothesis(subject, 200, 9)
    done = [repr(world.done) for world in subject.worlds if len(world.done) > 5]
    assert len(done) > 3 * at_once and len({*done}) == len(done)


def test_a_case_that_breaks_a_rule_ends_with_that_operation() -> None:
    for breaks, length in ((2, 2), (5, 5), (6, 6), (7, 6)):
        world: Any = World({"breaks": breaks}, TABLE)
        trace, violation = run_case(world, lambda bound: 0, 5)
        assert trace == world.done == [["drain"]] * length
        assert (violation is None) == (breaks == 7)


def test_a_replay_does_every_operation_until_a_rule_breaks() -> None:
    subject: Any = Subject()
    assert replay(subject, {"breaks": 0}, [["drain"], ["extra"]]) is None
    assert subject.worlds[-1].done == [["drain"], ["extra"]]
    violation = replay(subject, {"breaks": 2}, [["drain"], ["extra"], ["drain"]])
    assert violation is not None and violation.why == "after 2"
    assert subject.worlds[-1].done == [["drain"], ["extra"]]


def test_a_new_world_must_break_no_rule() -> None:
    def world(config: Any) -> Any:
        raise Violation(RULES[RULE], "at once")

    subject: Any = Subject()
    made = new_world(subject, config := {"breaks": 0})
    assert made is subject.worlds[-1] and made.config == config and made.config is not config
    subject.world = world
    with pytest.raises(AdapterError, match=f"a new world of .* breaks {RULE}: at once"):
        new_world(subject, config)


def test_a_finding_is_plain_data() -> None:
    finding = Finding(RULE, "why", {"breaks": 1}, [["drain"]])
    assert finding.to_json() == {
        "format": 1, "rule": RULE, "why": "why", "config": {"breaks": 1}, "trace": [["drain"]]
    }  # fmt: skip

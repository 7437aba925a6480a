"""The public face: Hypothesis machines that are their own tests, and the engine that runs them."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import unittest
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import Phase, reject, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, invariant, precondition, rule

from radixkv.scheduler.fuzz import targets
from radixkv.spec.adapters.cache import AdapterError
from radixkv.spec.harness import hypothesis_engine, random_engine
from radixkv.spec.harness.cache.world import CacheSubject
from radixkv.spec.harness.engine import Subject
from radixkv.spec.harness.findings.shrink import shrink
from radixkv.spec.harness.machine import (
    CacheMachine,
    CostMachine,
    HandoffMachine,
    PoolMachine,
    SchedulerMachine,
    SpecificationMachine,
    TieredSchedulerMachine,
    TierMachine,
)
from radixkv.spec.harness.operations import ALWAYS, Operation, Table
from radixkv.spec.harness.subjects import WHATS, SubjectOptions, What, make_subject
from radixkv.spec.rules.rule import Violation

from ..profiles import FACTORS, scaled
from ..scheduler.handoff.bugs import BUGS as HANDOFF_BUGS
from ..scheduler.handoff.bugs import Bug as HandoffBug
from ..scheduler.handoff.planted import planted
from ..scheduler.handoff.worlds import subject_of as handoff_subject_of
from .planted.cache_bugs import CACHE_BUGS
from .planted.matrix import subject_of
from .planted.plant import Bug
from .planted.scheduler_bugs import SCHEDULER_BUGS
from .planted.tier_bugs import TIER_BUGS
from .toys import Leaky, Plain

pytest_plugins = ["pytester"]

B = TypeVar("B", Bug, HandoffBug)

ROOT = Path(__file__).parents[2]
FEW = settings(max_examples=60, stateful_step_count=40, database=None)


@scaled(60, 100)
class TestOurCache(CacheMachine):
    make = targets.cache
    depth = "full"


@scaled(30, 50)
class TestOurPool(PoolMachine):
    make = targets.pool


@scaled(20, 100)
class TestOurTiers(TierMachine):
    make = targets.tiers


@scaled(30, 100)
class TestOurScheduler(SchedulerMachine):
    make = targets.scheduler


@scaled(20, 100)
class TestOurSchedulerOverTiers(TieredSchedulerMachine):
    make = targets.tiered_scheduler


@scaled(5, 50)
class TestOurCosts(CostMachine):
    make = targets.costs


def test_the_profile_enlarges_every_machine() -> None:
    ci, nightly = (sizes_of_machines(profile) for profile in ("ci", "nightly"))
    assert len(ci) >= 10 and ci.keys() == nightly.keys()
    for name, examples in ci.items():
        assert nightly[name] == examples * FACTORS["nightly"], name


SIZES = """
import importlib, json, sys, unittest
import tests.conftest
from hypothesis.stateful import RuleBasedStateMachine

sizes = {}
for path in sys.argv[1:]:
    module = importlib.import_module(path.removesuffix(".py").replace("/", "."))
    for name, member in vars(module).items():
        if isinstance(member, type) and member.__dict__.get("__test__", True):
            if issubclass(member, RuleBasedStateMachine):
                member = member.TestCase
            if issubclass(member, unittest.TestCase) and hasattr(member, "settings"):
                sizes[f"{path}: {name}"] = member.settings.max_examples
print(json.dumps(sizes))
"""


def sizes_of_machines(profile: str) -> dict[str, int]:
    """Return the number of examples of every machine among the tests, by file and name."""
    files = [
        str(path.relative_to(ROOT))
        for path in sorted(ROOT.glob("tests/**/test_*.py"))
        if "RuleBasedStateMachine" in (text := path.read_text()) or "harness.machine" in text
    ]
    told = subprocess.run(
        [sys.executable, "-c", SIZES, *files],
        env={**os.environ, "HYPOTHESIS_PROFILE": profile, "PYTHONPATH": str(ROOT)},
        cwd=ROOT, check=True, capture_output=True, text=True,
    )  # fmt: skip
    sizes: dict[str, int] = json.loads(told.stdout)
    return sizes


# The gate

GATE_STEPS = 20_000
GATE_BUGS = 20
GATE_HUNTS = 4
HANDOFF_BUGS_HUNTED = 10
HANDOFF_STEPS = 30_000


@pytest.mark.nightly
@pytest.mark.parametrize("what", ["cache", "pool", "scheduler", "tiers"])
def test_at_equal_steps_a_machine_kills_as_many_bugs_as_the_random_driver(what: What) -> None:
    bugs = [bug for bug in (*CACHE_BUGS, *TIER_BUGS, *SCHEDULER_BUGS) if bug.world == what]
    survivors = compare(bugs, lambda bug: nullcontext(subject_of(bug, "full")), GATE_BUGS)
    assert len(survivors) <= GATE_BUGS / 5


@pytest.mark.nightly
def test_so_does_the_machine_of_the_hand_off() -> None:
    @contextmanager
    def plant(bug: HandoffBug) -> Iterator[Subject]:
        with planted(bug) as package:
            yield handoff_subject_of(package)

    survivors = compare(HANDOFF_BUGS, plant, HANDOFF_BUGS_HUNTED, HANDOFF_STEPS)
    assert len(survivors) <= HANDOFF_BUGS_HUNTED / 5


def test_machines_of_tiers_and_hand_off_find_a_bug() -> None:
    """What is left for each commit of two long gates; `test_scheduler_spec` has the third's."""
    [of_tiers] = [bug for bug in TIER_BUGS if bug.name == "operations are handed out twice"]
    assert hypothesis_engine.run(subject_of(of_tiers, "full"), 0, 3_000).finding is not None
    [of_handoff] = [bug for bug in HANDOFF_BUGS if bug.name == "D publishes nothing"]
    with planted(of_handoff) as package:
        finding = hypothesis_engine.run(handoff_subject_of(package), 0, 3_000).finding
    assert finding is not None and finding.rule.endswith("hit-is-due")


def compare(
    bugs: Sequence[B],
    plant: Callable[[B], AbstractContextManager[Subject]],
    num_bugs: int,
    num_steps: int = GATE_STEPS,
) -> list[str]:
    """Hunt some bugs with both engines; return those that survive the machine.

    At most as many may survive it as the random driver. The draws of Hypothesis depend on the
    modules that are loaded, too. So that luck does not decide, the machine hunts a bug that only it
    has missed again, in new cases.
    """
    sample = random.Random(0).sample(bugs, min(num_bugs, len(bugs)))
    survivors: dict[str, list[str]] = {"machine": [], "random": []}
    for number, bug in enumerate(sample):
        with plant(bug) as subject:
            in_random = random_engine.run(subject, number, num_steps).finding
            if in_random is None:
                survivors["random"].append(bug.name)
            for again in range(1 if in_random is None else GATE_HUNTS):
                hunt = hypothesis_engine.run(subject, number + again * GATE_BUGS, num_steps)
                if hunt.finding is not None:
                    break
            else:
                survivors["machine"].append(bug.name)
    print(f"of {len(sample)} bugs survive {survivors}")
    assert len(survivors["machine"]) <= len(survivors["random"]), survivors
    return survivors["machine"]


def test_operations_are_drawn_by_their_weights() -> None:
    """It fails if Hypothesis draws the rules again: then `check` is as frequent as `forward`."""
    words: Counter[str] = Counter()

    @seed(5)  # how often something is drawn is not the same in each run
    @settings(FEW, phases=[Phase.generate])
    class Machine(CacheMachine):
        make = targets.cache

        def teardown(self) -> None:
            words.update(operation[0] for operation in self.trace)

    run(Machine)
    assert words["forward"] > 3 * words["check"] > 0
    assert words["admit"] > 3 * words["reset"] > 0


def test_without_weights_hypothesis_draws_the_rules() -> None:
    """So it is under a version of Hypothesis that does not read where a machine puts its own."""
    words: Counter[str] = Counter()

    @seed(5)  # how often something is drawn is not the same in each run
    @settings(FEW, phases=[Phase.generate])
    class Machine(CacheMachine):
        make = targets.cache
        depth = "full"
        # Without weights they would be most of the steps, and few requests would live to grow.
        drain = reset = evict = misuse = check = preempt = None

        def __init__(self, method: str = "runTest") -> None:
            super().__init__(method)
            self._rules_strategy = self.is_valid.__self__

        def teardown(self) -> None:
            super().teardown()
            words.update(operation[0] for operation in self.trace)

    run(Machine)
    assert words.keys() >= {"submit", "admit", "forward", "append", "launch", "done", "finish"}


def test_examples_are_not_mutated() -> None:
    """Hypothesis repeats parts of an example in five others, unless it refused a value in it."""
    configs: Counter[str] = Counter()

    @seed(5)  # how often something is drawn is not the same in each run
    @settings(FEW, phases=[Phase.generate])
    class Machine(CacheMachine):
        make = targets.cache

        def teardown(self) -> None:
            if self.trace:
                configs[str(self.world.config)] += 1

    run(Machine)
    assert len(configs) > 0.9 * configs.total() > 45


def test_what_is_collected() -> None:
    assert not CacheMachine.__test__ and TestOurCache.__test__
    loader = unittest.defaultTestLoader
    assert loader.loadTestsFromTestCase(TestOurCache).countTestCases() == 1


MACHINES: dict[What, type[SpecificationMachine]] = {
    "cache": CacheMachine, "costs": CostMachine, "handoff": HandoffMachine, "pool": PoolMachine,
    "scheduler": SchedulerMachine, "tiered_scheduler": TieredSchedulerMachine,
    "tiers": TierMachine,
}  # fmt: skip


@pytest.mark.parametrize("what", WHATS)
def test_a_machine_of_each_kind_tests_what_it_is_told_to(what: What) -> None:
    kind: Any = MACHINES[what]

    class Machine(kind):  # type: ignore[misc]
        make = getattr(targets, what)
        depth = "events"
        options = SubjectOptions(known=("S2",))

    subject: Any = Machine.subject()
    wanted: Any = make_subject(what, Machine.make, "events", SubjectOptions())
    assert subject.known == {"S2 available-is-free-plus-unused"}
    assert type(subject._subject) is type(wanted) and vars(subject._subject) == vars(wanted)
    rules = {each.function.__name__ for each in Machine("runTest").rules}
    assert rules == {each.word for each in subject.table} and Machine.__test__


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
    @settings(max_examples=1_000, stateful_step_count=12, database=None)  # short ones shrink soon
    class Machine(CacheMachine):
        make = Leaky
        options = SubjectOptions(block_sizes=(1,), pool_sizes=(4,))

    with pytest.raises(Violation) as caught:
        run(Machine)
    assert caught.value.rule.code == "D1"
    notes = "\n".join(caught.value.__notes__)
    assert "drain()    # breaks D1 drained-pool-is-whole: " in notes
    assert "before the last call:\n    " in notes
    program = notes[notes.index("state.start(config={") : notes.index("state.teardown()")]
    leaks = any(f"\nstate.{word}(" in program for word in ("drain", "admit", "serve"))
    assert leaks, "Hypothesis writes the program that was shrunk"


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


@pytest.mark.parametrize("phase", Phase)
def test_the_other_phases_are_those_of_the_settings(phase: Phase) -> None:
    @settings(phases=[phase, Phase.explain])
    class Machine(CacheMachine):
        make = Plain

    assert set(Machine.run_settings().phases) == {phase} - {Phase.explain}


def test_a_machine_without_a_manager_is_told_what_it_lacks() -> None:
    @FEW
    class Machine(CacheMachine):
        pass

    with pytest.raises(AdapterError) as caught:
        run(Machine)
    assert str(caught.value) == "Machine has no make: set it to what makes an adapter"


def test_make_may_be_a_function_and_rules_and_invariants_may_be_added() -> None:
    seen: Counter[str] = Counter()

    @FEW
    class Machine(CacheMachine):
        numbers = Bundle("numbers")

        def make(num_blocks: int, block_size: int) -> Any:  # type: ignore[misc]
            return Plain(num_blocks, block_size)

        @rule(target=numbers, number=st.integers(0, 9))
        def remember(self, number: int) -> int:
            seen["remember"] += 1
            return number

        @rule(number=numbers)
        def look(self, number: int) -> None:
            seen["look"] += 1
            assert 0 <= number <= 9

        @invariant()
        def there_is_room(self) -> None:
            seen["invariant"] += 1
            assert self.world.target.available() >= 0

    run(Machine)
    assert seen["remember"] > 20 and seen["look"] > 20 and seen["invariant"] > 1_000
    assert seen["remember"] + seen["look"] < 0.3 * seen["invariant"], "one operation in eight"


def test_rules_that_are_added_run_only_if_their_precondition_holds() -> None:
    ran: Counter[bool] = Counter()

    @FEW
    class Machine(CacheMachine):
        make = Plain

        @precondition(lambda self: len(self.trace) % 3 == 1)
        @rule()
        def sometimes(self) -> None:
            ran[len(self.trace) % 3 == 1] += 1

        @precondition(lambda self: False)
        @rule()
        def never(self) -> None:
            raise AssertionError

    run(Machine)
    assert ran[True] > 10 and not ran[False]


def test_a_machine_may_name_sizes_and_known_findings() -> None:
    sizes: set[int] = set()

    @FEW
    class Machine(CacheMachine):
        make = Leaky
        options = SubjectOptions(block_sizes=(2, 3), known=("D1", "D2"))

        def teardown(self) -> None:
            super().teardown()
            if self.trace:
                sizes.add(self.world.config["block_size"])

    run(Machine)  # it leaks, and is known to
    assert sizes == {2, 3}


class AllDrawn(Exception):
    """Ends a run of a machine that has nothing more to show."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "ours", [TestOurCache, TestOurPool, TestOurTiers, TestOurScheduler, TestOurSchedulerOverTiers]
)
def test_every_operation_is_drawn(ours: Any) -> None:
    world = ours.subject().world(ours.subject().configure(random.Random(0).randrange))
    missing = set(world.table.by_word)

    class Machine(ours):  # type: ignore[misc]
        def teardown(self) -> None:
            super().teardown()
            missing.difference_update(operation[0] for operation in self.trace)
            if not missing:
                raise AllDrawn

    Machine.TestCase.settings = settings(
        FEW, max_examples=300, stateful_step_count=80, phases=[Phase.generate]
    )
    with suppress(AllDrawn):
        run(Machine)
    assert not missing


def run(machine: type[SpecificationMachine]) -> None:
    machine("runTest").runTest()


# The engine


def test_the_engine_finds_and_its_seed_repeats() -> None:
    subject = CacheSubject(Leaky, "api")
    first, second = (hypothesis_engine.run(subject, 5, 20_000) for _ in range(2))
    assert first.finding is not None and first == second
    assert first.finding.rule == "D1 drained-pool-is-whole"
    assert len(shrink(subject, first.finding).trace) <= 3
    other = hypothesis_engine.run(subject, 6, 20_000)
    assert other.finding is not None and other.finding.trace != first.finding.trace


def test_the_engine_does_as_many_steps_as_it_is_told() -> None:
    result = hypothesis_engine.run(CacheSubject(targets.cache, "full"), 0, 10_000)
    assert result.finding is None, result.finding
    assert 10_000 <= result.num_steps < 10_000 + 102
    assert result.situations["admitted"] > 500


def test_the_engine_ends_when_every_example_is_refused() -> None:
    class Refusing:
        table: Table[Any] = Table(lambda world: {ALWAYS: [""]}, [Operation("wait", bool, 1)])

        def configure(self, below: Any) -> dict:
            reject()

    subject: Any = Refusing()
    result = hypothesis_engine.run(subject, 0, 1_000, 10)
    assert result.finding is None and result.num_steps == 0

"""A scenario or a random program finds every planted bug of the hand-off."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from types import ModuleType
from typing import Any, TypeAlias

import pytest
from hypothesis import is_hypothesis_test

from . import (
    decode_harness,
    prefill_harness,
    test_deadlocks,
    test_decode_admission,
    test_decode_scheduler,
    test_deferred_asks,
    test_fetching_asks,
    test_prefill_ends,
    test_prefill_scheduler,
)
from .bugs import BUGS, Bug
from .gateway_bugs import GATEWAY_BUGS
from .gateway_scenarios import GATEWAY_SCENARIOS
from .planted import patched_classes, planted
from .scenarios import SCENARIOS
from .scheduler_bugs import SCHEDULER_BUGS
from .worlds import run_random

Scenario: TypeAlias = Callable[[ModuleType], None]

PROGRAMS = 400
NUM_STEPS = 150


def found_by_scenarios(
    package: ModuleType, scenarios: Sequence[Scenario] = SCENARIOS
) -> str | None:
    for scenario in scenarios:
        try:
            scenario(package)
        except Exception:
            return scenario.__name__
    return None


def found_by_scheduler_tests(package: ModuleType) -> str | None:
    """Run the quick tests of the schedulers: those without parameters and without a world."""
    modules = (
        test_prefill_scheduler,
        test_prefill_ends,
        test_decode_scheduler,
        test_decode_admission,
        test_deferred_asks,
        test_fetching_asks,
        test_deadlocks,
    )
    with ExitStack() as stack:
        for module in (*modules, decode_harness, prefill_harness):
            stack.enter_context(patched_classes(module, package))
        members = [member for module in modules for member in vars(module).values()]
        # Those of Hypothesis, which take seconds, last.
        for scenario in sorted(filter(is_quick, members), key=is_hypothesis_test):
            try:
                scenario()
            except (Exception, pytest.fail.Exception):
                return str(scenario.__name__)
    return None


def is_quick(scenario: Any) -> bool:
    if not (inspect.isfunction(scenario) and scenario.__name__.startswith("test_")):
        return False
    return (
        not inspect.signature(scenario).parameters
        and "SteppedWorld" not in scenario.__code__.co_names
    )


def found_by_random_programs(package: ModuleType) -> str | None:
    for seed in range(PROGRAMS):
        finding = run_random(package, seed, NUM_STEPS).finding
        if finding is not None:
            return finding.rule
    return None


def test_a_copy_without_a_bug_passes() -> None:
    with planted(None) as package:
        assert found_by_scenarios(package, (*SCENARIOS, *GATEWAY_SCENARIOS)) is None
        assert found_by_scheduler_tests(package) is None
        for seed in range(20):
            assert run_random(package, seed, NUM_STEPS).finding is None


@pytest.mark.nightly
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_planted_bug_is_found(bug: Bug) -> None:
    with planted(bug) as package:
        assert found_by_scenarios(package) or found_by_random_programs(package), "nothing finds it"


@pytest.mark.nightly
@pytest.mark.parametrize("bug", GATEWAY_BUGS, ids=lambda bug: bug.name)
def test_a_bug_of_the_gateway_is_found(bug: Bug) -> None:
    with planted(bug) as package:
        found = found_by_scenarios(package, GATEWAY_SCENARIOS) or found_by_scenarios(package)
        assert found or found_by_random_programs(package), "nothing finds it"


@pytest.mark.nightly
@pytest.mark.parametrize("bug", SCHEDULER_BUGS, ids=lambda bug: bug.name)
def test_a_bug_of_a_scheduler_is_found(bug: Bug) -> None:
    with planted(bug) as package:
        found = found_by_scheduler_tests(package) or found_by_scenarios(package)
        assert found, "nothing finds it"

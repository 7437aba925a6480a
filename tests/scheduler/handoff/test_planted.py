"""A scenario or a random program finds every planted bug of the hand-off."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from types import ModuleType
from typing import Final, TypeAlias

import pytest

from radixkv.scheduler.handoff_simulation import INVARIANTS, Invariant

from . import (
    decode_harness,
    prefill_harness,
    test_deadlocks,
    test_decode_admission,
    test_decode_scheduler,
    test_deferred_asks,
    test_prefill_ends,
    test_prefill_scheduler,
)
from .bugs import BUGS, Bug
from .gateway_bugs import GATEWAY_BUGS
from .gateway_scenarios import GATEWAY_SCENARIOS
from .planted import patched_classes, planted, simulation_of
from .scenarios import SCENARIOS
from .scheduler_bugs import SCHEDULER_BUGS

Scenario: TypeAlias = Callable[[ModuleType], None]

PROGRAMS = 400
NUM_OPS = 300


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
    """Run the quick tests of the schedulers: those without parameters and without a simulation."""
    modules = (
        test_prefill_scheduler,
        test_prefill_ends,
        test_decode_scheduler,
        test_decode_admission,
        test_deferred_asks,
        test_deadlocks,
    )
    with ExitStack() as stack:
        for module in (*modules, decode_harness, prefill_harness):
            stack.enter_context(patched_classes(module, package))
        for scenario in [scenario for module in modules for scenario in vars(module).values()]:
            if is_quick(scenario):
                try:
                    scenario()
                except (Exception, pytest.fail.Exception):
                    return str(scenario.__name__)
    return None


def is_quick(scenario: object) -> bool:
    if not (inspect.isfunction(scenario) and scenario.__name__.startswith("test_")):
        return False
    return (
        not inspect.signature(scenario).parameters
        and "SteppedSimulation" not in scenario.__code__.co_names
    )


def found_by_random_programs(package: ModuleType) -> str | None:
    for seed in range(PROGRAMS):
        try:
            simulation_of(package).run_random(seed, NUM_OPS)
        except simulation_of(package).Failure as failure:
            return str(failure)
    return None


def test_a_copy_without_a_bug_passes() -> None:
    with planted(None) as package:
        assert found_by_scenarios(package, (*SCENARIOS, *GATEWAY_SCENARIOS)) is None
        assert found_by_scheduler_tests(package) is None
        for seed in range(20):
            simulation_of(package).run_random(seed, NUM_OPS)


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_planted_bug_is_found(bug: Bug) -> None:
    with planted(bug) as package:
        assert found_by_scenarios(package) or found_by_random_programs(package), "nothing finds it"


@pytest.mark.slow
@pytest.mark.parametrize("bug", GATEWAY_BUGS, ids=lambda bug: bug.name)
def test_a_bug_of_the_gateway_is_found(bug: Bug) -> None:
    with planted(bug) as package:
        found = found_by_scenarios(package, GATEWAY_SCENARIOS) or found_by_scenarios(package)
        assert found or found_by_random_programs(package), "nothing finds it"


BITES: Final = {
    "H1 one-start": "a start is reported twice",
    "H2 one-answer": "the end of a request is returned twice",
    "H3 same-tokens": "the seed is lost in COMMIT",
    "H4 own-content": "D publishes at the grant",
    "H5 offers-stay": "P releases offered blocks before the fence",
    "H6 no-leak": "D leaks the lease of an aborted attempt",
    "H7 all-end": "the end of an attempt is not reported to the side",
    "H8 no-evict": "nothing is reserved for requests being received",
    "H9 counted-once": "P forgets host hits",
    "H10 sent-once": "a block is granted for two prompts at once",
    "H11 begun-once": "P begins an attempt at each copy of RunPrefill",
    "H12 no-resend": "an acknowledged message is resent",
    "H13 all-attempts": "a failure that is reported twice counts twice",
    "H14 old-epochs": "messages of any epoch are accepted",
    "H15 idle-nodes": "ended attempts stay in the load",
}


@pytest.mark.slow
@pytest.mark.parametrize("invariant", INVARIANTS, ids=lambda invariant: invariant.name)
def test_every_invariant_bites(invariant: Invariant) -> None:
    [bug] = [
        bug for bug in (*BUGS, *GATEWAY_BUGS, *SCHEDULER_BUGS) if bug.name == BITES[invariant.name]
    ]
    with planted(bug) as package:
        for seed in range(PROGRAMS):
            try:
                simulation_of(package).run_random(seed, NUM_OPS)
            except simulation_of(package).Failure as failure:
                if invariant.name in str(failure):
                    return
    raise AssertionError(f"{bug.name}: no program says {invariant.name}")


@pytest.mark.slow
@pytest.mark.parametrize("bug", SCHEDULER_BUGS, ids=lambda bug: bug.name)
def test_a_bug_of_a_scheduler_is_found(bug: Bug) -> None:
    with planted(bug) as package:
        found = found_by_scheduler_tests(package) or found_by_scenarios(package)
        assert found, "nothing finds it"

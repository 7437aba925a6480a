"""Finds the planted bugs: ``python -m tests.threads.hunt`` prints a table of them."""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Iterator
from inspect import getsource
from typing import NamedTuple

from .explore import Explorer, Scenario
from .planted import BY_HAND, NOT_NEEDED, Planted, left_out
from .scheduler_scenarios import SCENARIOS as SCHEDULER
from .storage_scenarios import SCENARIOS as STORAGE

SCENARIOS: list[Scenario] = [*STORAGE, *SCHEDULER]
MAX_SCHEDULES = 3_000


class Finding(NamedTuple):
    """A planted bug, the scenario that found it, and after how many of its schedules."""

    module: str
    bug: Planted
    scenario: str | None
    num_schedules: int


def bugs() -> Iterator[tuple[str, Planted]]:
    """Yield the planted bugs with the modules they are planted in."""
    for module in dict.fromkeys(name for scenario in SCENARIOS for name in scenario.modules):
        source = getsource(importlib.import_module(f"radixkv.{module}"))
        for bug in (*left_out(source), *BY_HAND.get(module, ())):
            if bug.name not in NOT_NEEDED.get(module, {}):
                yield module, bug


def hunt(module: str, bug: Planted, seeds: range = range(MAX_SCHEDULES)) -> Finding:
    """Run every scenario of a module with a bug, a few schedules of each in turn."""
    explorers = {
        scenario.name: Explorer(scenario, {module: bug})
        for scenario in SCENARIOS
        if module in scenario.modules
    }
    step = 10
    for start in range(seeds.start, seeds.stop, step):
        for name, explorer in explorers.items():
            count = explorer.explore(range(start, start + step))
            if count is not None:
                return Finding(module, bug, name, start - seeds.start + count)
    return Finding(module, bug, None, len(seeds))


def main() -> None:
    """Print the table, of the modules whose name contains the first argument."""
    start = time.process_time()
    chosen = sys.argv[1] if len(sys.argv) > 1 else ""
    findings = [hunt(module, bug) for module, bug in bugs() if chosen in module]
    print("| module | left out or wrong | found by | schedule |\n| --- | --- | --- | --- |")
    for module, bug, scenario, number in findings:
        print(f"| `{module}` | {bug.name} | {scenario or '**not found**'} | {number} |")
    print(f"\n{len(findings)} bugs, {time.process_time() - start:.0f} CPU seconds")


if __name__ == "__main__":
    main()

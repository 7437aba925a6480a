"""Every module with a lock, under random orders of its threads; and each lock left out in turn."""

import ast
import importlib
import sys
from inspect import getsource
from pathlib import Path

import pytest

import radixkv.kvcache
import radixkv.scheduler

from .explore import Explorer
from .hunt import MAX_SCHEDULES, SCENARIOS, bugs, hunt
from .planted import BY_HAND, NOT_NEEDED, left_out

NUM_SCHEDULES = 50
ONLY_REPLACES = {"scheduler.nodes.channel.gate"}
"""Modules whose lock guards one attribute, which always gets a new object: it excludes nothing."""
RARE = {
    "LruIndex.put_back: self._lock",
    "StorageWorkers.poll: completions are taken after the lock was given back",
    "ThreadedTransport.poll: self._changed",
}
"""Of thousands of schedules one finds these on Python 3.13, whose instructions are others."""
BUGS = [
    (module, bug)
    for module, bug in bugs()
    if sys.version_info[:2] == (3, 11) or bug.name not in RARE
]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_no_order_of_the_threads_fails(scenario, pytestconfig):
    first = 1_000 * (pytestconfig.getoption("kv_seed") or 0)
    Explorer(scenario).check(range(first, first + NUM_SCHEDULES))


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("module", "bug"), BUGS, ids=[f"{module.rsplit('.')[-1]}-{bug.name}" for module, bug in BUGS]
)
def test_a_planted_bug_is_found(module, bug):
    assert hunt(module, bug).scenario is not None, f"not in {MAX_SCHEDULES} schedules"


def test_every_module_with_a_lock_has_a_scenario():
    covered = {name for scenario in SCENARIOS for name in scenario.modules}
    for package in (radixkv.kvcache, radixkv.scheduler):
        root = Path(package.__path__[0])
        for path in root.rglob("*.py"):
            parts = path.relative_to(root).with_suffix("").parts
            module = ".".join([package.__name__.removeprefix("radixkv."), *parts])
            assert module in covered | ONLY_REPLACES or not _uses_threads(path.read_text()), module


def _uses_threads(source: str) -> bool:
    names = {"Lock", "RLock", "Condition", "SimpleQueue", "Semaphore", "Barrier"}
    calls = [node.func for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    return any(ast.unparse(call).removeprefix("threading.") in names for call in calls)


@pytest.mark.parametrize("module", NOT_NEEDED)
def test_what_is_not_needed_exists(module):
    source = getsource(importlib.import_module(f"radixkv.{module}"))
    known = {bug.name for bug in (*left_out(source), *BY_HAND.get(module, ()))}
    assert NOT_NEEDED[module].keys() <= known

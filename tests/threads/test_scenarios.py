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
FINDING = {
    "background_writer": (85, 118),
    "storage_ends_at_once": (84,),
    "storage_workers_fast": (105,),
    "storage_closes": (57,),
    "storage_stuck": (107,),
    "files_lost": (82,),
    "lru_index": (70, 75, 234, 598),
    "lru_index_of_one": (75,),
    "mooncake_closes": (100, 235),
    "mooncake": (290,),
    "threaded_transport": (60, 78),
    "engine_thread": (55,),
    "engine_closes": (68,),
    "metrics_recorder": (302,),
    "engine_fails": (205,),
    "output_streams": (73, 79),
    "event_publisher": (70, 83),
}
"""Later seeds of each scenario, the first that find a planted bug on Python 3.11 (by `hunt`)."""
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
    Explorer(scenario).check(
        [*range(first, first + NUM_SCHEDULES), *FINDING.get(scenario.name, ())]
    )


def _is_found_each_time(module, bug):
    """Tell whether the schedules above find a bug."""
    return any(
        Explorer(scenario, {module: bug}).explore(
            [*range(NUM_SCHEDULES), *FINDING.get(scenario.name, ())]
        )
        for scenario in SCENARIOS
        if module in scenario.modules
    )


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("module", "bug"), BUGS, ids=[f"{module.rsplit('.')[-1]}-{bug.name}" for module, bug in BUGS]
)
def test_a_planted_bug_is_found(module, bug):
    found = hunt(module, bug)
    assert found.scenario is not None, f"not in {MAX_SCHEDULES} schedules"
    assert sys.version_info[:2] != (3, 11) or _is_found_each_time(module, bug), f"add it: {found}"


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


def test_the_table_of_the_docs_has_every_bug():
    page = (Path(__file__).parents[2] / "docs" / "threads.md").read_text("utf-8")
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| `")]
    shown = [(module.strip("| `"), name) for module, name, _, _ in rows]
    assert sorted(shown) == sorted((module, bug.name) for module, bug in bugs())
    assert f"All {len(shown)} are found" in page

"""Managers that are not ours, in docs/examples/managers, against the specification."""

import json
from pathlib import Path

import pytest

from radixkv.spec.adapters.cache import Promises
from radixkv.spec.adapters.load_target import load_target
from radixkv.spec.harness.cache.world import CacheSubject
from radixkv.spec.harness.engine import Finding, replay
from radixkv.spec.harness.findings.shrink import shrink
from radixkv.spec.harness.findings.trace_file import read_trace_file
from radixkv.spec.harness.random_engine import run
from radixkv.spec.rules.cache import CACHE_RULES
from radixkv.spec.rules.scheduler import SCHEDULER_RULES

from .designs.bugs import DESIGN_BUGS, planted
from .designs.radix import SGLang

ROOT = Path(__file__).parents[2]
MANAGERS = ROOT / "docs" / "examples" / "managers"
NUM_STEPS = 20_000
SEEDS = range(10)


def target(name: str):
    return load_target(f"{MANAGERS}/{name}")


def findings(factory) -> list[Finding]:
    """What each seed finds; each must find something."""
    found = [run(CacheSubject(factory), seed, NUM_STEPS).finding for seed in SEEDS]
    assert all(found), "a seed found nothing"
    return [each for each in found if each is not None]


@pytest.mark.parametrize("name", ["nano_style.py:make", "mini_style.py:make"])
@pytest.mark.parametrize("seed", [0, 1])
def test_a_right_manager_is_clean(name, seed):
    result = run(CacheSubject(target(name)), seed, NUM_STEPS)

    assert result.finding is None
    for situation in ("hit", "resumed with a hit", "refused", "grown into a new block"):
        assert result.situations[situation] > 100, situation


def test_the_leak_is_found_and_shrunk():
    factory = target("toy_leak.py:make")
    found = findings(factory)
    shrunk = [shrink(CacheSubject(factory), each) for each in found]

    assert {each.rule.split()[0] for each in found} <= {"S2", "D1"}
    assert [small.rule for small in shrunk] == [each.rule for each in found]
    assert min(len(small.trace) for small in shrunk) <= 6


def test_freed_copies_in_a_table_are_found():
    found = findings(target("mini_style.py:make_without_repointing"))

    # A block that is free and in a table: it is counted twice, or given out twice.
    assert {each.rule.split()[0] for each in found} <= {"S2", "A3", "C1", "C2"}


def test_freed_copies_are_found_by_what_is_overwritten():
    """Without counts to go by, the rules about content find the same mistake."""
    kind = type(target("mini_style.py:make_without_repointing")(4, 1))

    class Uncounted(kind):  # type: ignore[valid-type, misc]
        promises = Promises()

        def available(self):
            return 0 if self.requests else super().available()

    found = findings(lambda num_blocks, block_size: Uncounted(num_blocks, block_size, False))

    assert {each.rule.split()[0] for each in found} <= {"A3", "C1", "C2"}
    assert any(each.rule.startswith("C") for each in found)


@pytest.mark.parametrize(
    "path", sorted((ROOT / "docs/howto/findings").glob("*.trace.json")), ids=lambda path: path.name
)
def test_published_findings_are_whole(path):
    """Their managers are not installed here, so they are not replayed."""
    file = read_trace_file(path)
    where, _, factory = file.target.partition(":")

    assert file.finding.rule in {rule.name for rule in (*CACHE_RULES, *SCHEDULER_RULES)}
    assert f"\ndef {factory}(" in (ROOT / where).read_text()
    assert json.loads(path.read_text())["version"]


def test_ours_of_the_same_shape_breaks_the_same_rule():
    file = read_trace_file(ROOT / "docs/howto/findings/mini_sglang.trace.json")
    world = CacheSubject(target("mini_style.py:make_without_repointing")).world(file.finding.config)
    for operation in file.finding.trace[:-1]:
        world.apply(operation)

    with pytest.raises(AssertionError) as caught:
        world.apply(file.finding.trace[-1])

    assert str(caught.value) == f"[{file.finding.rule}] {file.finding.why}"


def test_a_manager_of_the_same_design_breaks_the_order_of_eviction_too():
    """The trace that shows it in SGLang shows it in ours of that design, and not when repaired."""
    file = read_trace_file(ROOT / "docs/howto/findings/sglang_lru.trace.json")
    finding = file.finding
    bug = next(bug for bug in DESIGN_BUGS if bug.name == "a split refreshes the cold suffix")
    violation = replay(CacheSubject(planted(bug), "events"), finding.config, finding.trace)

    assert violation is not None and violation.rule.name == finding.rule
    assert replay(CacheSubject(SGLang, "events"), finding.config, finding.trace) is None

"""The specification bites: every planted bug is found, and every rule finds one."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

import radixkv.kvcache
from radixkv.spec.adapters.cache_target import Depth
from radixkv.spec.harness.engine import Subject, replay
from radixkv.spec.harness.random_engine import run
from radixkv.spec.rules.events import K9
from radixkv.spec.rules.rule import RULES
from radixkv.spec.rules.scheduler import Q29

from ..profiles import PROFILE
from .planted.__main__ import TABLES
from .planted.cache_bugs import CACHE_BUGS
from .planted.change_bugs import MANY_AT_ONCE
from .planted.matrix import Hunt, Hunters, hunt, markdown, subject_of, summarize
from .planted.plant import Bug, World, bug, load, planted_sources
from .planted.scheduler_bugs import SCHEDULER_BUGS
from .planted.table import read_table
from .planted.tier_bugs import TIER_BUGS
from .planted.tiered_scheduler_bugs import TIERED_SCHEDULER_BUGS

TABLES_OF_DOCS = Path(__file__).parents[2] / "docs" / "specification"
KILLS = TABLES_OF_DOCS / "kills.jsonl"
MAX_STEPS = 50_000
NUM_SEEDS = 3 if PROFILE == "nightly" else 1

ALL_BUGS = (*CACHE_BUGS, *SCHEDULER_BUGS, *TIERED_SCHEDULER_BUGS)

NO_BUG = bug("no bug", "manager.py")
MANY_IS_ONE = bug("no bug, and two leaves are many", "manager.py", elsewhere=MANY_AT_ONCE)


@pytest.fixture(scope="module")
def kills() -> dict:
    return read_table(KILLS)


@pytest.mark.slow
@pytest.mark.parametrize("bug", CACHE_BUGS, ids=lambda bug: bug.name)
def test_a_planted_bug_is_found(bug: Bug) -> None:
    for seed in range(NUM_SEEDS):
        result = run(subject_of(bug, "full"), seed, MAX_STEPS)
        assert result.finding is not None, f"seed {seed}: survives {result.num_steps} steps"


@pytest.mark.parametrize("depth", ["api", "events", "full"])
@pytest.mark.parametrize("bug", [NO_BUG, MANY_IS_ONE], ids=lambda bug: bug.name)
def test_a_copy_without_a_bug_passes(bug, depth) -> None:
    assert run(subject_of(bug, depth), 0, 3_000).finding is None


def test_the_pool_of_a_copy_without_a_bug_passes() -> None:
    assert run(subject_of(replace(NO_BUG, world="pool"), "full"), 0, 3_000).finding is None


def test_a_copy_shares_nothing_with_the_package_and_leaves_nothing_behind() -> None:
    before = set(sys.modules), list(sys.meta_path)
    copy = load(None)
    assert (set(sys.modules), list(sys.meta_path)) == before
    assert copy is not radixkv.kvcache
    assert copy.CacheManager is not radixkv.kvcache.CacheManager
    assert copy.CacheManager.__module__.startswith("planted_")
    manager = copy.CacheManager(4, 2)
    assert type(manager._tree).__module__.startswith("planted_")
    assert manager.match([1, 2, 3]).num_blocks == 0
    assert copy.CacheManager is not load(None).CacheManager


def test_a_copy_that_cannot_be_imported_leaves_nothing_behind() -> None:
    before = set(sys.modules), list(sys.meta_path)
    broken = bug("broken", "prefix/lease.py", ("class Lease:", "1 / 0\nclass Lease:"))
    with pytest.raises(ZeroDivisionError):
        load(broken)
    assert (set(sys.modules), list(sys.meta_path)) == before


def test_a_bug_changes_its_file_only() -> None:
    changed = planted_sources(bug("one", "prefix/lease.py", ("class Lease:", "class Lease :")))
    assert list(changed) == ["prefix/lease.py"]
    assert "class Lease :" in changed["prefix/lease.py"]


@pytest.mark.parametrize(("old", "fits"), [("no such text", 0), ("self.num_blocks", 9)])
def test_a_bug_that_does_not_fit_once_is_told(old: str, fits: int) -> None:
    source = radixkv.kvcache.__file__.replace("__init__", "prefix/block_pool")
    fits = fits and Path(source).read_text().count(old)
    with pytest.raises(AssertionError) as error:
        load(bug("gone", "prefix/block_pool.py", (old, "")))
    assert str(error.value) == (
        f"prefix/block_pool.py has {old!r} {fits} times: write the bug 'gone' anew"
    )


def test_names_are_distinct() -> None:
    ruled_out = list(
        map(json.loads, (TABLES_OF_DOCS / "ruled_out.jsonl").read_text("utf-8").splitlines())
    )
    names = [bug.name for bug in (*ALL_BUGS, *TIER_BUGS)] + [entry["bug"] for entry in ruled_out]
    assert len(set(names)) == len(names)
    assert len(ruled_out) >= 57, "a bug that is planted now leaves the list"
    assert all(entry["group"] and entry["seen_in"] and entry["why"] for entry in ruled_out)
    assert {entry["rule"] for entry in ruled_out if "rule" in entry} <= RULES.keys()


def test_what_the_matrix_reports() -> None:
    found = bug("found", "manager.py", ("if last <= first:", "if True:"))
    hunters = Hunters(num_jobs=1, max_steps=200)
    kills = list(hunters.hunt_all([found, NO_BUG], ["api", "full"], num_seeds=2))
    rows = summarize([found, NO_BUG], kills)
    assert [row["rule"] for row in rows] == ["P4 publish-promptly", ""]
    assert rows[0]["depths"]["full"]["survived"] == 0
    assert rows[1]["depths"]["full"]["survived"] == 2
    assert rows[1]["shortest"] is None
    lines = markdown(rows, ["api", "full"]).splitlines()
    assert lines[2].startswith("| found | P4 publish-promptly | ")
    assert lines[3].startswith("| no bug | **survives** | ")
    # The same hunt ends the same way, and its trace breaks the same rule again.
    first = Hunt(found, "full", 0)
    again = hunt(first, max_steps=200, shrinks=True)
    assert again == next(kill for kill in kills if kill.hunt == first)
    shrunk = rows[0]["shortest"]
    violation = replay(subject_of(found, "full"), shrunk["config"], shrunk["trace"])
    assert violation is not None and violation.rule.name == "P4 publish-promptly"
    assert replay(subject_of(NO_BUG, "full"), shrunk["config"], shrunk["trace"]) is None
    proofs = hunters.prove(kills)
    assert proofs["P4 publish-promptly"]["bug"] == "found"
    assert len(proofs["P4 publish-promptly"]["finding"]["trace"]) <= len(shrunk["trace"])


def test_hypothesis_finds_one_too() -> None:
    found = bug("found", "prefix/deduplication.py", ("recycle(copies)", "pass"))
    kill = hunt(Hunt(found, "full", 0), max_steps=5_000, engine="hypothesis")
    assert kill.rule
    assert 0 < kill.steps <= 5_000


def test_the_committed_table_is_that_of_the_bugs(kills: dict) -> None:
    committed = [row["name"] for row in kills["bugs"]]
    assert sorted(committed) == sorted(bug.name for bug in ALL_BUGS), (
        f"write {KILLS.name} anew: python -m tests.spec.planted --table kills --json FOLDER"
    )
    assert kills["summary"]["survivors"] == []


def test_one_command_makes_every_committed_table() -> None:
    assert {path.stem for path in KILLS.parent.glob("kills*.jsonl")} == set(TABLES)
    for name, table in TABLES.items():
        summary = read_table(KILLS.with_stem(name))["summary"]
        committed = summary["engine"], summary["bugs"], summary["max_steps"], summary["depth"]
        assert committed == (table.engine, len(table.bugs), table.max_steps, table.depths[-1])


def test_every_rule_has_its_bug(kills: dict) -> None:
    # What Q29 says follows from Q28, which is checked first. Tiers and hand-off have own tables.
    # The bugs of K9 are planted in the index of a gateway, those of groups in their calls, in the
    # tests of these.
    rules = [rule for rule in RULES if rule not in (Q29.name, K9.name) and rule[0] not in "TXG"]
    without = [rule for rule in rules if rule not in kills["proofs"]]
    assert not without, f"no bug proves that these rules bite: {without}"


@cache
def without_bug(world: World, depth: Depth) -> Subject:
    return subject_of(replace(NO_BUG, world=world), depth)


@pytest.mark.nightly
def test_the_traces_break_their_rule(kills: dict) -> None:
    by_name = {bug.name: bug for bug in ALL_BUGS}
    shown: list[tuple[str, Depth, dict]]
    shown = [(row["name"], "full", row["shortest"]) for row in kills["bugs"]]
    shown += [(each["bug"], each["depth"], each["finding"]) for each in kills["proofs"].values()]
    for name, depth, finding in shown:
        violation = replay(subject_of(by_name[name], depth), finding["config"], finding["trace"])
        assert violation is not None, f"{name}: its trace breaks nothing"
        assert violation.rule.name == finding["rule"], name
        if not by_name[name].unclaimed:
            good = without_bug(by_name[name].world, depth)
            assert replay(good, finding["config"], finding["trace"]) is None, name

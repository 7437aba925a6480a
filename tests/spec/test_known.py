"""Known findings are counted and hide nothing else; sizes that a manager lacks are not tested."""

from __future__ import annotations

import random
import re
from collections import Counter
from copy import copy
from pathlib import Path
from typing import Any

import pytest

from radixkv.scheduler.cli.main import main
from radixkv.scheduler.fuzz import targets
from radixkv.spec.adapters.cache import AdapterError
from radixkv.spec.harness.cache.world import CacheSubject
from radixkv.spec.harness.engine import replay
from radixkv.spec.harness.findings.known import MET, KnownSubject, rules_named
from radixkv.spec.harness.findings.shrink import shrink
from radixkv.spec.harness.operations import Table
from radixkv.spec.harness.random_engine import run
from radixkv.spec.harness.subjects import WHATS, SubjectOptions, What, make_subject
from radixkv.spec.rules.rule import RULES, Violation, not_judging, require

from .designs.bugs import DESIGN_BUGS, planted
from .designs.radix import LightLLM, SGLang

MANAGERS = Path(__file__).parents[2] / "docs/examples/managers"
BROKEN = f"{MANAGERS}/mini_style.py:make_without_repointing"
TWO_NAMES = ["S2", "A3", "C2"]


def with_bug(name: str) -> CacheSubject:
    bug = next(bug for bug in DESIGN_BUGS if bug.name == name and bug.design == "SGLang")
    return CacheSubject(planted(bug), "events")


def test_a_rule_that_is_not_judged_is_counted() -> None:
    name = "S2 available-is-free-plus-unused"
    with not_judging([name]) as met:
        require(False, RULES[name], "no {}", 1)
        with pytest.raises(Violation):
            require(False, RULES["A3 allocate-distinct"], "")
    assert met == {name: 1}
    with pytest.raises(Violation):
        require(False, RULES[name], "")


def test_a_known_finding_hides_no_other() -> None:
    subject = with_bug("duplicates are lost")
    first = run(subject, 0, 20_000).finding
    assert first is not None and first.rule == "P4 publish-promptly"
    known = KnownSubject(subject, ["P4"])
    second = run(known, 0, 20_000).finding
    assert second is not None and second.rule != first.rule
    small = shrink(known, second)
    assert small.rule == second.rule and replay(known, small.config, small.trace) is not None


def test_the_world_begins_again_where_the_manager_cannot_be_followed() -> None:
    subject = KnownSubject(with_bug("a match is not locked"), [rule.split()[0] for rule in RULES])
    result = run(subject, 0, 5_000)
    assert result.finding is None and result.num_steps >= 5_000
    assert sum(times for name, times in result.situations.items() if name.startswith(MET)) > 50
    assert result.situations["admitted"] > 500


class Steps:
    """A subject and its world: each operation says what happens."""

    table = Table[Any](lambda world: {}, ())

    def __init__(self) -> None:
        self.situations: Counter[str] = Counter()

    def configure(self, below: Any) -> dict[str, Any]:
        return {}

    def world(self, config: Any) -> Any:
        return type(self)()

    def draw(self, below: Any) -> list[Any]:
        return ["does"]

    def apply(self, operation: list[Any]) -> bool:
        self.situations[operation[0]] += 1
        match operation[0]:
            case "breaks S2":
                require(False, RULES["S2 available-is-free-plus-unused"], "")
            case "breaks A3":
                require(False, RULES["A3 allocate-distinct"], "")
            case "breaks both":
                require(False, RULES["S2 available-is-free-plus-unused"], "")
                require(False, RULES["A3 allocate-distinct"], "")
            case "stops":
                raise Violation(RULES["S4 no-unexpected-error"], "")
            case "raises":
                raise LookupError("a manager")
            case "errs":
                raise AdapterError("an adapter")
        return True


def test_only_after_a_known_finding_may_the_manager_raise() -> None:
    world = KnownSubject(Steps(), ["S2"]).world({})
    with pytest.raises(LookupError, match="a manager"):
        world.apply(["raises"])
    assert world.apply(["breaks S2"]) and world.apply(["raises"]) and world.apply(["does"])
    with pytest.raises(Violation):
        world.apply(["breaks A3"])


def test_a_new_world_has_met_no_known_finding() -> None:
    world = KnownSubject(Steps(), ["S2", "S4"]).world({})
    for last in ("stops", "raises"):
        assert world.apply(["breaks S2"]) and world.apply([last])
        with pytest.raises(LookupError, match="a manager"):
            world.apply(["raises"])


def test_each_world_has_the_sizes_of_the_first() -> None:
    """A world may change the configuration that it is made of."""

    class Spoils(Steps):
        def world(self, config: Any) -> Any:
            assert config == {"size": 4}
            config.clear()
            return super().world(config)

    config = {"size": 4}
    world = KnownSubject(Spoils(), ["S4"]).world(config)
    for _ in range(2):
        assert world.apply(["stops"]) and world.apply(["does"])
    assert config == {"size": 4}


def test_an_adapter_that_errs_is_told_before_and_after_a_known_finding() -> None:
    world = KnownSubject(Steps(), ["S2"]).world({})
    for _ in range(2):
        with pytest.raises(AdapterError, match="an adapter"):
            world.apply(["errs"])
        assert world.apply(["breaks S2"])


def test_each_known_finding_is_counted_once_with_what_led_to_it() -> None:
    world = KnownSubject(Steps(), ["S2", "S4"]).world({})
    for word in ("does", "breaks S2", "stops", "does", "stops"):
        assert world.apply([word])
    assert world.situations == {
        f"{MET}S2 available-is-free-plus-unused": 1, f"{MET}S4 no-unexpected-error": 2,
        "does": 2, "breaks S2": 1, "stops": 2,
    }  # fmt: skip


def test_what_is_met_in_the_last_operation_is_counted_with_its_situations() -> None:
    world = KnownSubject(Steps(), ["S2"]).world({})
    with pytest.raises(Violation, match="A3"):
        world.apply(["breaks both"])
    assert world.situations == {f"{MET}S2 available-is-free-plus-unused": 1, "breaks both": 1}


@pytest.mark.parametrize("what", WHATS)
def test_without_a_known_finding_a_known_subject_and_its_worlds_are_the_same(what: What) -> None:
    subject = make_subject(what, getattr(targets, what), "full")
    known = KnownSubject(subject, [])
    public = {name for name in dir(subject) if not name.startswith("_")} - {"world"}
    for each in (known, copy(known)):
        assert all(getattr(each, name) == getattr(subject, name) for name in public)
        assert hasattr(each, "simpler") == hasattr(subject, "simpler")
    config = subject.configure(random.Random(1).randrange)
    one, other = (each.world(config) for each in (subject, known))
    first, second = random.Random(2).randrange, random.Random(2).randrange
    for _ in range(20):
        operation = one.draw(first)
        assert operation == other.draw(second) and one.apply(operation) == other.apply(operation)
        assert one.picture() == other.picture() and one.situations == other.situations
    assert [each.word for each in one.table] == [each.word for each in other.table]
    assert one.config == other.config == config


def test_a_run_counts_the_situations_of_all_its_worlds() -> None:
    class Ends(Steps):
        case_lengths = (3,)
        num_drains = 0

        def apply(self, operation: list[Any]) -> bool:
            Ends.num_drains += operation == ["drain"]
            return super().apply(["breaks A3"] if Ends.num_drains == 2 else operation)

    result = run(Ends(), 0, 100)
    assert result.finding is not None and result.finding.rule == "A3 allocate-distinct"
    assert (result.num_cases, result.num_steps) == (2, 8)
    assert result.situations == {"does": 6, "drain": 1, "breaks A3": 1}


def test_each_name_of_a_rule_is_that_of_no_other() -> None:
    """Some codes are the begin of others, such as A1 of A10."""
    for name in RULES:
        code, word = name.split()
        assert rules_named([name]) == rules_named([code]) == {name}
        assert rules_named([word]) == {each for each in RULES if each.split()[1] == word}


def test_rules_have_two_names() -> None:
    assert rules_named(["S2", "no-leak", "A3 allocate-distinct"]) >= {
        "S2 available-is-free-plus-unused", "S1 no-leak", "A3 allocate-distinct"
    }  # fmt: skip
    for name in RULES:
        code, _, words = name.partition(" ")
        assert rules_named([code]) == rules_named([name]) == {name}
        assert rules_named([words]) == {each for each in RULES if each.partition(" ")[2] == words}
    with pytest.raises(AdapterError, match="known: there is no rule 'S99'"):
        rules_named(["S99"])


def test_the_command_reports_the_known_ones(capsys: Any, tmp_path: Path) -> None:
    found = tmp_path / "found.json"
    options = ["--target", BROKEN, "--steps", "9000", "--seed", "0", "--json", str(found)]
    assert main(["fuzz", *options, "--known", *TWO_NAMES]) == 1
    text = capsys.readouterr().out
    assert text.startswith("C1 ") and "\nknown findings met: " in text
    assert main(["fuzz", "--replay", str(found)]) == 1  # the file names the known ones, too
    assert capsys.readouterr().out.startswith("C1 ")
    for known, status in (([*TWO_NAMES, "C1"], 0), (TWO_NAMES, 1), (["C1"], 1)):
        assert main(["fuzz", "--replay", str(found), "--known", *known]) == status
        assert capsys.readouterr().out.startswith("C1 ") == (known == TWO_NAMES), "only those"
    assert main(["fuzz", *options, "--known", *TWO_NAMES, "C1"]) == 0


def test_the_generator_and_the_shrinker_keep_to_the_sizes() -> None:
    below = random.Random(1).randrange
    assert {CacheSubject(LightLLM).configure(below)["block_size"] for _ in range(40)} == {1}
    subject = make_subject("cache", SGLang, "api", SubjectOptions((256,), (5, 9)))
    drawn = [subject.configure(below) for _ in range(40)]
    assert {each["block_size"] for each in drawn} == {256}
    assert {each["num_blocks"] for each in drawn} == {5, 9}
    assert run(subject, 0, 500).finding is None
    broken = with_bug("duplicates are lost")
    subject = CacheSubject(broken.factory, "api", [4, 8], [6, 7])
    finding = run(subject, 0, 20_000).finding
    assert finding is not None
    small = shrink(subject, finding).config
    assert small["block_size"] in (4, 8) and small["num_blocks"] in (6, 7)


@pytest.mark.parametrize("sizes", [(0,), (4, -1), 4, ("4",), None])
def test_sizes_are_positive(sizes: Any) -> None:
    broken = type("Broken", (SGLang,), {"block_sizes": sizes})
    text = re.escape(f"block_sizes must be positive integers, got {sizes!r}")
    with pytest.raises(AdapterError, match=f"^{text}$"):
        CacheSubject(broken)

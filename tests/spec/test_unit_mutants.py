"""The hunt for mutants by the unit tests of their file: which, by which tests, with which end."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from . import unit_mutants
from .mutants import HUNTED as BY_WORLDS
from .mutants import explained
from .mutations import Mutant, all_mutants, tree_of
from .unit_mutants import EQUIVALENT, HUNTED, ROOT, PackageCopy, Result, choose, report

FILE = "kvcache/storage/value_format.py"
SMALL = "tests/kvcache/storage/test_value_format.py"


def test_every_file_exists_and_so_do_its_tests() -> None:
    for file, tests in HUNTED.items():
        assert (ROOT / file).is_file() and tests
        assert all((ROOT / test).is_file() for test in tests), file
    assert not {file.removeprefix("kvcache/") for file in HUNTED} & BY_WORLDS.keys()


def test_every_explanation_is_of_a_mutant() -> None:
    reasons = explained(EQUIVALENT)
    files = {file for file, _, _ in reasons}
    keys = {each.key for file in files for each in all_mutants(file, (ROOT / file).read_text())}
    assert files <= HUNTED.keys() and not reasons.keys() - keys
    assert all(len(why.split()) >= 3 for why in reasons.values())


def test_a_seed_chooses_the_same_mutants_and_another_one_others() -> None:
    def keys(seed: int) -> list[tuple[str, str, str]]:
        return [mutant.key for found in choose([FILE], 5, seed) for mutant in found]

    assert keys(1) == keys(1) and len(keys(1)) == 5
    assert len({*keys(1), *keys(2), *keys(3)}) > 5
    [all_of_it] = choose([FILE], 10**6, 0)
    assert all_of_it == all_mutants(FILE, (ROOT / FILE).read_text())
    [named] = choose([FILE], 10**6, 0, only=f"{all_of_it[3].function}: {all_of_it[3].change}")
    assert all_of_it[3] in named


@pytest.mark.nightly
def test_a_file_without_and_with_a_bug_and_one_that_does_not_end(tmp_path: Path) -> None:
    copy, source = PackageCopy(tmp_path), (ROOT / FILE).read_text("utf-8")
    assert copy.run_tests(FILE, source, [SMALL], 300) == ""
    killed_by = copy.run_tests(FILE, f"{source}\nMAGIC = VERSION = None\n1 / 0\n", [SMALL], 300)
    assert killed_by.startswith("ERROR tests/kvcache/storage")
    assert copy.run_tests(FILE, f"{source}\nwhile True: pass\n", [SMALL], 5) == "no end"
    assert (tmp_path / "radixkv" / FILE).read_text("utf-8") == source


def mutants(number: int) -> list[Mutant]:
    return all_mutants(FILE, (ROOT / FILE).read_text())[:number]


def test_the_tests_must_pass_with_other_lines_before_a_mutant_counts_as_killed() -> None:
    """A test that looks at line numbers would kill every mutant, and hide what no test sees."""
    run: list[str] = []

    class Copy:
        def run_tests(self, file: str, source: str, tests: Sequence[str], limit_s: float) -> str:
            run.append(source)
            return failing

    source, copy = (ROOT / FILE).read_text("utf-8"), cast(PackageCopy, Copy())
    failing = ""
    assert [result.killed_by for result in unit_mutants.hunt(mutants(2), copy)] == ["", ""]
    trees = [ast.parse(source), *(tree_of(each, source) for each in mutants(2))]
    assert run == [ast.unparse(tree) for tree in trees]
    failing = "FAILED a test"
    with pytest.raises(AssertionError, match=f"without a mutant of {FILE}: {failing}"):
        next(unit_mutants.hunt(mutants(1), copy))


def test_survivors_are_told_with_their_reason(capsys: pytest.CaptureFixture[str]) -> None:
    killed, known, unknown = mutants(3)
    results = [Result(killed, "FAILED a", 1), Result(known, "", 1), Result(unknown, "", 1)]
    assert report(results, {known.key: "it is the same"}) == results[2:]
    told = capsys.readouterr().out.splitlines()
    assert told[0] == f"{FILE}:{known.line}: {known.function}: {known.change}"
    assert told[1] == "    it is the same" and told[3] == "    UNEXPLAINED"
    assert told[4] == "3 mutants, 1 killed, 1 explained, 1 unexplained"


@pytest.mark.parametrize(("killed_by", "status"), [("FAILED a test", 0), ("", 1)])
def test_the_exit_status_tells_of_a_survivor(
    killed_by: str, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hunt(found: Sequence[Mutant], copy: Any) -> Iterator[Result]:
        return (Result(mutant, killed_by, 0.04) for mutant in found)

    monkeypatch.setattr(unit_mutants, "hunt", hunt)
    path = tmp_path / "results.json"
    arguments = ["--files", "value_format", "--sample", "2", "--json", str(path)]
    assert unit_mutants.main(arguments) == status
    [first, second] = json.loads(path.read_text())
    assert first["file"] == second["file"] == FILE and first["killed_by"] == killed_by
    assert first["seconds"] == 0.0 and {"function", "line", "change"} <= first.keys()

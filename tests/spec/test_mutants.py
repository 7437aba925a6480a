"""The hunt for mutants of `kvcache/`: all of them, each by its name, each with its end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from . import mutants
from .mutants import HUNTED, LEFT_OUT, explained, kill, report
from .mutations import Mutant, all_mutants, code_of
from .planted.plant import FOLDER, sources


def named(file: str, function: str, change: str) -> Mutant:
    """Return the mutant of a name."""
    (found,) = [each for each in all_mutants(file) if each.key == (file, function, change)]
    return found


DIES = ("prefix/lease.py", "Lease.num_blocks", "self.row >= 0  ->  self.row > 0")
LIVES = ("prefix/radix_tree.py", "RadixTree.walk", "position < end  ->  position <= end")


def test_the_mutants_are_the_same_each_time_and_have_different_names() -> None:
    found = [mutant for file in HUNTED for mutant in all_mutants(file)]
    assert found == [mutant for file in HUNTED for mutant in all_mutants(file)]
    assert len({mutant.key for mutant in found}) == len(found) > 2_000


def test_every_mutant_is_a_program_and_another_one() -> None:
    for file in ("prefix/node.py", "prefix/lease.py", "tokens.py"):
        original = compile(sources()[file], str(FOLDER / file), "exec")
        for mutant in all_mutants(file):
            assert code_of(mutant) != original, mutant


def test_equal_changes_of_one_function_are_told_apart() -> None:
    changes = {mutant.change for mutant in all_mutants("manager.py")}
    assert {"minimum=1  ->  minimum=0", "minimum=1  ->  minimum=0  [2]"} <= changes


def test_every_file_is_hunted_or_left_out_with_a_reason() -> None:
    files = {path.relative_to(FOLDER).as_posix() for path in FOLDER.rglob("*.py")}
    assert not HUNTED.keys() & LEFT_OUT.keys()
    assert files == {*HUNTED, *(file for file in files if file in LEFT_OUT or _folder(file))}
    assert all(why for why in LEFT_OUT.values())


def _folder(file: str) -> bool:
    return any(file.startswith(f"{folder}/") for folder in LEFT_OUT)


def test_a_mutant_of_what_only_tiers_use_dies_in_their_world() -> None:
    change = "self.num_promoted_blocks = 0  ->  self.num_promoted_blocks = 1"
    assert (
        kill(named("prefix/lease.py", "Lease.__init__", change), 1_000)
        == "T7 request-continues-after-loaded-blocks"
    )


def test_what_is_chosen_is_hunted(monkeypatch, capsys) -> None:
    def hunt(found: Sequence[Mutant], num_steps: int, num_jobs: int) -> Iterator[str]:
        assert [mutant.key for mutant in found] == [LIVES]
        return iter([""])

    monkeypatch.setattr(mutants, "hunt", hunt)
    assert mutants.main(["--file", LIVES[0], "--only", f"{LIVES[1]}: {LIVES[2]}"]) == 0
    assert "1 mutants, 0 killed, 1 explained" in capsys.readouterr().out


def test_what_checks_is_left_alone() -> None:
    functions = {mutant.function for file in HUNTED for mutant in all_mutants(file)}
    assert "CacheManager.publish" in functions and "as_count" in functions
    assert not {"CacheManager.check", "RadixTree.nodes", "make_namespace"} & functions
    assert not {name for name in functions if name.endswith("__repr__")}
    assert not any("assert" in mutant.change for file in HUNTED for mutant in all_mutants(file))


def test_a_mutant_dies_and_an_equivalent_one_lives() -> None:
    assert kill(named(*DIES), 1_000)
    assert kill(named(*LIVES), 1_000) == ""


def test_every_explanation_is_of_a_mutant_and_has_words() -> None:
    keys = {mutant.key for file in HUNTED for mutant in all_mutants(file)}
    assert not explained().keys() - keys, "explained, and no mutant (any more)"
    assert all(len(why.split()) >= 3 for why in explained().values())


def test_a_change_is_explained_once(tmp_path, monkeypatch) -> None:
    entry = '[[equivalent]]\nfile = "a.py"\nfunction = "f"\nchanges = ["x  ->  y"]\nwhy = "z"\n'
    monkeypatch.setattr(mutants, "EQUIVALENT", tmp_path / "twice.toml")
    mutants.EQUIVALENT.write_text(entry)
    assert explained() == {("a.py", "f", "x  ->  y"): "z"}
    mutants.EQUIVALENT.write_text(entry * 2)
    with pytest.raises(ValueError, match=r"^\('a.py', 'f', 'x  ->  y'\) is explained twice$"):
        explained()


def test_an_explanation_without_a_survivor_is_told(capsys) -> None:
    lives, dies = named(*LIVES), named(*DIES)
    reasons = {LIVES: "no reason", DIES: "wrong", (LIVES[0], "f", "a  ->  b"): "gone"}
    assert report([lives, dies], ["", "R3"], reasons) == 2
    told = capsys.readouterr().out.splitlines()
    assert told[0].endswith(f"RadixTree.walk: {LIVES[2]}") and told[1] == "    no reason"
    assert told[2:] == [
        f"kvcache/prefix/lease.py: Lease.num_blocks: {DIES[2]}",
        "    is explained, and does not survive",
        "kvcache/prefix/radix_tree.py: f: a  ->  b",
        "    is explained, and does not survive",
        "2 mutants, 1 killed, 1 explained, 0 unexplained, 2 explanations of none",
    ]


def test_an_explanation_of_no_mutant_stops_the_hunt(monkeypatch, capsys) -> None:
    monkeypatch.setattr(mutants, "explained", lambda: {("gone.py", "f", "a  ->  b"): "it was so"})
    assert mutants.main(["--file", LIVES[0]]) == 1
    told = "kvcache/gone.py: f: a  ->  b\n    is explained, and is no mutant\n"
    assert capsys.readouterr().out == told


@pytest.mark.parametrize(("reasons", "status"), [({LIVES: "no child has that key"}, 0), ({}, 1)])
def test_the_exit_status_tells_of_an_unexplained_survivor(
    reasons: dict, status: int, monkeypatch, capsys
) -> None:
    def hunt(found: Sequence[Mutant], num_steps: int, num_jobs: int) -> Iterator[str]:
        assert num_jobs == 1
        return (kill(mutant, num_steps) for mutant in found)

    monkeypatch.setattr(mutants, "hunt", hunt)
    monkeypatch.setattr(mutants, "explained", lambda: reasons)
    only = f"{LIVES[1]}: {LIVES[2]}"
    arguments = ["--file", LIVES[0], "--only", only, "--steps", "300", "--jobs", "1"]
    assert mutants.main(arguments) == status
    assert ("UNEXPLAINED" in capsys.readouterr().out) == bool(status)

"""docs/handoff.md has the tables of states that the code asserts."""

from collections.abc import Mapping
from enum import Enum
from pathlib import Path

import pytest

from radixkv.scheduler.handoff import DECODE_MOVES, PREFILL_MOVES
from radixkv.scheduler.handoff.invariants import INVARIANTS

PAGE = Path(__file__).parents[3] / "docs" / "handoff.md"


def table(moves: Mapping[tuple[Enum, Enum], str]) -> str:
    rows = [f"| {old.value} | {new.value} | {why} |" for (old, new), why in moves.items()]
    return "\n".join(["| from | to | when |", "| --- | --- | --- |", *rows])


@pytest.mark.parametrize("moves", [PREFILL_MOVES, DECODE_MOVES], ids=["prefill", "decode"])
def test_the_page_has_the_table_of_the_code(moves: Mapping[tuple[Enum, Enum], str]) -> None:
    assert table(moves) in PAGE.read_text("utf-8"), f"write it into the page:\n{table(moves)}"


def test_the_page_has_every_invariant() -> None:
    rows = [f"| {each.name} | {each.text} |" for each in INVARIANTS]
    wanted = "\n".join(["| name | what must hold |", "| --- | --- |", *rows])
    assert wanted in PAGE.read_text("utf-8"), f"write it into the page:\n{wanted}"

"""The committed table of instructions is that of the code."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from .instructions import Table, text_of

ROOT = Path(__file__).parents[2]
TEXT = Path(__file__).with_name("instructions.json").read_text("utf-8")


@pytest.fixture(scope="module")
def counted() -> Table:
    command = [sys.executable, "-m", "tests.costs.instructions"]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    table: Table = json.loads(done.stdout)
    return table


def test_the_calls_execute_the_instructions_of_the_table(counted: Table) -> None:
    table: Table = json.loads(TEXT)
    if sys.version_info[:2] == (3, 11):
        assert counted == table, f"write it anew: {Path('tests/costs/instructions.py')} says how"
    assert {subject: calls.keys() for subject, calls in counted.items()} == {
        subject: calls.keys() for subject, calls in table.items()
    }
    for subject, calls in table.items():  # other versions have other instructions
        for name, counts in calls.items():
            for here, there in zip(counted[subject][name], counts, strict=True):
                assert there / 2 <= here <= 2 * there, (subject, name)


def test_the_table_is_written_as_it_is_read() -> None:
    assert text_of(json.loads(TEXT)) + "\n" == TEXT

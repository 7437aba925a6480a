"""`benchmarks/handoffs.py` with short prompts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.nightly
def test_each_number_of_groups_and_pair_of_nodes_has_a_row() -> None:
    done = subprocess.run(
        [
            sys.executable,
            "benchmarks/handoffs.py",
            "--rounds=1",
            "--tokens=64",
            "--transports=nixl",
        ],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in (0, 1), done.stderr  # one round of short prompts may miss the goal
    rows = [line.split(" | ")[1:3] for line in done.stdout.splitlines() if "| nixl |" in line]
    assert [groups for groups, _ in rows[:3]] == ["1", "4", "8 (all)"], done.stderr
    assert rows[3:] == [["2", "2"], ["2", "4"], ["4", "2"], ["4", "4"]], done.stderr

"""Results and progress of commands."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest

from radixkv.kvcache.storage import Status, StorageStats
from radixkv.scheduler.cli.shared.output import ProgressBar, describe_storage, emit
from radixkv.scheduler.terminal.console import table


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def _use_terminal(monkeypatch: pytest.MonkeyPatch) -> _Terminal:
    """Make stderr a terminal, outside CI; no fixture, since pytest replaces stderr after those."""
    stream = _Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.delenv("CI", raising=False)
    return stream


def test_parts_are_printed_in_order_and_long_strings_are_not_wrapped(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "results.json"
    emit(str(path), {"a": 1}, "x" * 200, "", table((), [("b", "1")]), "[c]")
    assert capsys.readouterr().out == "x" * 200 + "\n\nb  1\n[c]\n"
    assert json.loads(path.read_text()) == {"a": 1}


def test_progress_shows_each_stage_and_is_erased(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = _use_terminal(monkeypatch)
    with ProgressBar(quiet=False) as progress:
        progress("reading", 1, 4)
        progress("simulation", 1_000, 2_000)
    shown = terminal.getvalue()
    assert "reading" in shown and "25% (1 of 4)" in shown
    assert "simulation" in shown and "50% (1,000 of 2,000)" in shown
    assert shown.endswith("\x1b[2K")


def test_progress_is_silent_when_told_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = _use_terminal(monkeypatch)
    with ProgressBar(quiet=True) as progress:
        progress("reading", 1, 4)
    assert terminal.getvalue() == ""


def test_progress_is_silent_in_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = _use_terminal(monkeypatch)
    monkeypatch.setenv("CI", "true")
    with ProgressBar(quiet=False) as progress:
        progress("reading", 1, 4)
    assert terminal.getvalue() == ""


def test_progress_is_silent_without_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CI", raising=False)
    with ProgressBar(quiet=False) as progress:
        progress("reading", 1, 4)
    assert capsys.readouterr().err == ""


def test_each_count_of_a_storage_has_its_name() -> None:
    stats = StorageStats({Status.LOADED: 1}, 2, 3, 4, 5, {"OSError": 6}, 7, 8, 9, 10, {})
    assert describe_storage(stats) == {
        "blocks": {"loaded": 1},
        "stored_bytes": 2,
        "loaded_bytes": 3,
        "dropped_bytes": 4,
        "errors": {"OSError": 6},
    }

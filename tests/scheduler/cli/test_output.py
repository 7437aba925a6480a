"""Tables and progress lines."""

from __future__ import annotations

import io
import sys

import pytest

from radixkv.scheduler.cli.output import format_table
from radixkv.scheduler.cli.progress import ProgressLine


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def _use_terminal(monkeypatch: pytest.MonkeyPatch) -> _Terminal:
    """Make stderr a terminal, outside CI; no fixture, since pytest replaces stderr after those."""
    stream = _Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.delenv("CI", raising=False)
    return stream


def test_a_table_is_aligned() -> None:
    assert format_table([("name", "us"), ("a", "10.5")]) == "name    us\na     10.5"


def test_progress_shows_each_stage_and_is_erased(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = _use_terminal(monkeypatch)
    with ProgressLine(quiet=False) as progress:
        progress("reading", 1, 4)
        progress("simulation", 1_000, 2_000)
    shown = terminal.getvalue()
    assert "reading: 25% (1 of 4)" in shown
    assert "simulation: 50% (1,000 of 2,000)" in shown
    assert shown.endswith("\r\x1b[K")


def test_progress_is_silent_when_told_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = _use_terminal(monkeypatch)
    with ProgressLine(quiet=True) as progress:
        progress("reading", 1, 4)
    assert terminal.getvalue() == ""


def test_progress_is_silent_in_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = _use_terminal(monkeypatch)
    monkeypatch.setenv("CI", "true")
    with ProgressLine(quiet=False) as progress:
        progress("reading", 1, 4)
    assert terminal.getvalue() == ""


def test_progress_is_silent_without_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CI", raising=False)
    with ProgressLine(quiet=False) as progress:
        progress("reading", 1, 4)
    assert capsys.readouterr().err == ""

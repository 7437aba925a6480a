"""Results and progress of commands."""

from __future__ import annotations

import io
import json
import os
import sys
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.progress import Progress

from radixkv.kvcache.storage import Status, StorageStats
from radixkv.scheduler.cli.errors import BadInputError
from radixkv.scheduler.cli.shared.output import (
    ProgressBar,
    check_destination,
    describe_node,
    describe_storage,
    emit,
)
from radixkv.scheduler.nodes import NodeStats
from radixkv.scheduler.nodes.transport.base import Fault, TransportStats
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


@pytest.mark.parametrize("json_path", [None, "-", "file"])
@pytest.mark.parametrize("results", [{"a": 1}, '["b"]'])
def test_results_go_where_the_option_says(
    json_path: str | None, results: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "results.json"
    emit(str(path) if json_path == "file" else json_path, results, "the text")
    written = results if isinstance(results, str) else '{\n  "a": 1\n}\n'
    assert capsys.readouterr().out == (written if json_path == "-" else "the text\n")
    assert [each.read_text() for each in tmp_path.iterdir()] == [written] * (json_path == "file")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_json_has_not_is_a_bug(value: float, tmp_path: Path) -> None:
    for path in ("-", str(tmp_path / "results.json")):
        with pytest.raises(ValueError, match="not JSON compliant"):
            emit(path, {"a": [value]})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("option", ["--json", "--svg"])
def test_a_destination_must_be_a_file_that_can_be_written(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new, lost = tmp_path / "old", tmp_path / "new", tmp_path / "lost" / "new"
    old.touch()
    asked: list[tuple[Path, int]] = []

    def access(path: Path, mode: int) -> bool:  # root may write everywhere
        asked.append((path, mode))
        return is_writable

    monkeypatch.setattr(os, "access", access)
    for path in (old, new):
        is_writable = True
        check_destination(str(path), option)
        is_writable = False
        with pytest.raises(BadInputError) as refused:
            check_destination(str(path), option)
        assert str(refused.value) == f"{option} {path}: permission denied"
    assert asked == [(path, os.W_OK) for path in (old, old, tmp_path, tmp_path)]
    is_writable = True
    check_destination(None, option)
    wrong = {
        str(tmp_path): f"{option} {tmp_path}: expected a file, got a directory",
        str(lost): f"{option} {lost}: the directory {lost.parent} does not exist",
    }
    if option == "--json":
        check_destination("-")
    else:
        wrong["-"] = f"{option} needs the name of a file, got -"
    for name, message in wrong.items():
        with pytest.raises(BadInputError) as refused:
            check_destination(name, option)
        assert str(refused.value) == message


def test_progress_shows_each_stage_and_is_erased(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = _use_terminal(monkeypatch)
    with ProgressBar(quiet=False) as progress:
        assert "0%" not in terminal.getvalue()  # nothing, before the first stage
        progress("reading", 1, 4)
        progress("simulation", 1_000, 2_000)
    shown = terminal.getvalue()
    assert "reading" in shown and "25% (1 of 4)" in shown
    assert "simulation" in shown and "50% (1,000 of 2,000)" in shown
    assert shown.endswith("\x1b[2K")


def test_only_a_new_stage_starts_a_new_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the remaining time would never be known."""
    _use_terminal(monkeypatch)
    started, reset = list[str](), Progress.reset

    def recorded(self: Progress, *args: Any, description: str, **options: Any) -> None:
        started.append(description)
        reset(self, *args, description=description, **options)

    monkeypatch.setattr(Progress, "reset", recorded)
    with ProgressBar(quiet=False) as progress:
        for stage in ("reading", "reading", "simulation", "simulation", "reading"):
            progress(stage, 1, 4)
    assert started == ["reading", "simulation", "reading"]


def test_what_is_printed_beside_the_progress_stays_on_stdout(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = _use_terminal(monkeypatch)
    with ProgressBar(quiet=False) as progress:
        progress("reading", 1, 4)
        print("a result")
    assert capsys.readouterr().out == "a result\n"
    assert "a result" not in terminal.getvalue()


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


def test_each_fault_of_a_node_has_its_name_and_all_counts_are_told() -> None:
    faults = Counter({fault: number for number, fault in enumerate(Fault, 1)})
    engine: Any = StorageStats({}, 2, 3, 4, 5, {"OSError": 6}, 7, 8, 9, 10, {})  # any counts
    transport = TransportStats(offers=1, pulls=2, faults=faults)
    told = describe_node(NodeStats(engine, transport))
    assert told["engine"] == asdict(engine)
    assert told["transport"] == {
        **asdict(transport),
        "faults": {fault.value: number for number, fault in enumerate(Fault, 1)},
    }
    assert told.keys() == {"engine", "transport"}
    storage: Any = SimpleNamespace(stats=lambda: engine)
    more = describe_node(NodeStats(engine, transport), storage)
    assert more == {**told, "storage": describe_storage(engine)}

"""`radixkv replay`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from radixkv.scheduler.commands import replay


def test_text_and_json_file(radixkv: Any, trace: Path, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    outcome = radixkv("replay", trace, "--json", path)
    assert outcome.status == 0, outcome.stdout
    assert outcome.stdout.strip()
    assert outcome.stderr == ""
    assert isinstance(json.loads(path.read_text()), dict)


def test_json_alone_on_stdout(radixkv: Any, trace: Path) -> None:
    outcome = radixkv("replay", trace, "--requests", 2, "--json", "-", "--quiet")
    assert outcome.status == 0
    assert isinstance(json.loads(outcome.stdout), dict)


def test_malformed_lines_are_refused_or_skipped(radixkv: Any, trace: Path) -> None:
    trace.write_text(trace.read_text() + "{\n")
    refused = radixkv("replay", trace)
    assert refused.status == 2
    assert refused.stderr.startswith(f"radixkv: {trace}, line 6: is not JSON: ")
    assert radixkv("replay", trace, "--skip-malformed").status == 0


def test_a_failed_check_is_status_1(
    radixkv: Any, trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failed:
        ok = False

        def text(self) -> str:
            return "FAILED"

        def to_json(self) -> dict[str, Any]:
            return {"ok": False}

    calls: list[Any] = []

    def run_replay(*args: Any, progress: Any, **options: Any) -> Failed:
        calls.append((args, options))
        return Failed()

    monkeypatch.setattr(replay, "run_replay", run_replay)
    outcome = radixkv("replay", trace, "--requests", 3, "--model", "m", "--gpu", "g")
    assert (outcome.status, outcome.stdout) == (1, "FAILED\n")
    assert calls == [
        (
            (trace, 3),
            {"skip_malformed": False, "model": "m", "gpu": "g", "costs": None},
        )
    ]


@pytest.mark.parametrize("option", ["--model", "--gpu"])
def test_an_unknown_name_is_refused(radixkv: Any, trace: Path, option: str) -> None:
    outcome = radixkv("replay", trace, option, "no-such-thing")
    assert outcome.status == 2
    assert "no-such-thing" in outcome.stderr
    assert outcome.stderr.count("\n") == 1


def test_missing_costs_are_refused(radixkv: Any, trace: Path, tmp_path: Path) -> None:
    outcome = radixkv("replay", trace, "--costs", tmp_path / "none.json")
    assert outcome.status == 2
    assert "none.json" in outcome.stderr
    assert outcome.stderr.count("\n") == 1

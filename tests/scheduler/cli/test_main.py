"""The command line as a whole: help, version, destinations of results, exit statuses."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from jax.errors import JaxRuntimeError

from radixkv.kvcache import OutOfBlocksError
from radixkv.scheduler.cli import hits

MAIN = "radixkv.scheduler.cli.main"
COMMANDS = ["replay", "hits", "generate", "serve", "bench", "fuzz", "storage"]


def _python(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *argv], capture_output=True, text=True, check=False, timeout=300
    )


def test_help_lists_the_commands(radixkv: Any) -> None:
    outcome = radixkv("--help")
    assert outcome.status == 0
    assert all(f"\n    {command} " in outcome.stdout for command in COMMANDS)


@pytest.mark.parametrize(
    "command",
    [
        *COMMANDS,
        *(f"bench {name}" for name in ("cache", "evict", "decode")),
        *(f"storage {name}" for name in ("ls", "verify", "gc")),
    ],
)
def test_each_command_has_help(radixkv: Any, command: str) -> None:
    outcome = radixkv(*command.split(), "--help")
    assert outcome.status == 0
    assert outcome.stdout.startswith(f"usage: radixkv {command} ")


def test_help_loads_neither_numpy_nor_jax() -> None:
    script = (
        "import sys\n"
        "from radixkv.scheduler.cli.main import main\n"
        "assert main(['--help']) == 0\n"
        "assert main(['no-such-command']) == 2\n"
        "loaded = {'numpy', 'jax', 'rich', 'radixkv.kvcache'} & set(sys.modules)\n"
        "assert not loaded, loaded\n"
    )
    finished = _python("-c", script)
    assert finished.returncode == 0, finished.stderr


def test_version(radixkv: Any) -> None:
    outcome = radixkv("--version")
    assert outcome.status == 0
    assert outcome.stdout.startswith("radixkv ")


def test_runs_as_a_module() -> None:
    finished = _python("-m", MAIN, "hits", "no-such-file", "--device-blocks=4")
    assert finished.returncode == 2
    assert finished.stderr == ("radixkv: no-such-file: cannot be read: No such file or directory\n")


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        ([], "the following arguments are required: COMMAND (see `radixkv --help`)"),
        (["bench"], "the following arguments are required: BENCHMARK (see `radixkv bench --help`)"),
        (["nope"], "invalid choice: 'nope'"),
        (
            ["hits", "t", "--device-blocks", "0"],
            "expected an integer from 1 to 2147483647, got '0'",
        ),
        (
            ["hits", "t", "--device-blocks", "2147483648"],
            "expected an integer from 1 to 2147483647, got '2147483648'",
        ),
        (
            ["replay", "--requests", "x"],
            "argument --requests: expected an integer from 1 to 2147483647, got 'x'",
        ),
        (["replay", "--what"], "unrecognized arguments: --what (see `radixkv replay --help`)"),
        (
            ["fuzz", "--jobs", "257"],
            "argument --jobs: expected an integer from 1 to 256, got '257'",
        ),
    ],
    ids=["command", "benchmark", "unknown", "zero", "too large", "no number", "option", "jobs"],
)
def test_wrong_usage_is_one_line(radixkv: Any, argv: list[str], complaint: str) -> None:
    outcome = radixkv(*argv)
    assert outcome.status == 2
    assert complaint in outcome.stderr
    assert outcome.stderr.startswith("radixkv: ")
    assert outcome.stderr.count("\n") == 1


def test_json_to_a_file_leaves_the_text_on_stdout(
    radixkv: Any, trace: Path, tmp_path: Path
) -> None:
    path = tmp_path / "results.json"
    outcome = radixkv("hits", trace, "--device-blocks", 100, "--json", path)
    assert outcome.stdout.startswith("5 requests, ")
    assert json.loads(path.read_text())["hit_blocks"] == 3


@pytest.mark.parametrize(
    ("name", "reason"),
    [("", "expected a file, got a directory"), ("missing/results.json", "the directory")],
    ids=["a directory", "in no directory"],
)
def test_a_destination_that_cannot_be_written_is_refused_first(
    radixkv: Any, tmp_path: Path, name: str, reason: str
) -> None:
    # The trace does not exist either: the destination is looked at before any work.
    outcome = radixkv("hits", "none", "--device-blocks", 4, "--json", tmp_path / name)
    assert outcome.status == 2
    assert outcome.stderr.startswith(f"radixkv: --json {tmp_path / name}: {reason}")


def test_a_destination_that_may_not_be_written_is_refused_first(
    radixkv: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Root may write anywhere, and tests may run as root.
    monkeypatch.setattr(os, "access", lambda path, mode: path not in (tmp_path, tmp_path / "old"))
    (tmp_path / "old").touch()
    for name in ("new", "old"):
        outcome = radixkv("hits", "none", "--device-blocks", 4, "--json", tmp_path / name)
        message = f"radixkv: --json {tmp_path / name}: permission denied\n"
        assert outcome == (2, "", message)


def test_stdout_may_be_closed(radixkv: Any, trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    assert radixkv("hits", trace, "--device-blocks", 4).status == 0


def test_a_tier_larger_than_the_trace_takes_no_more_memory(radixkv: Any, trace: Path) -> None:
    largest = 2**31 - 1
    sizes = [("--device-blocks", 1000, "--host-blocks", 1000)]
    sizes.append(("--device-blocks", largest, "--host-blocks", largest))
    small, large = (radixkv("hits", trace, *size) for size in sizes)
    assert large.status == 0
    assert large == small


@pytest.mark.parametrize(
    "argv",
    [
        ["replay"],
        ["generate", "m", "--prompts", "p", "--max-new-tokens", 1],
        ["decode-node", "m", "--gateway", "127.0.0.1:1"],
        ["bench", "evict", "--evict", 1, "--chain", 1],
    ],
    ids=lambda argv: argv[0],
)
def test_a_tier_that_the_machine_has_no_memory_for_is_refused(
    radixkv: Any, monkeypatch: pytest.MonkeyPatch, argv: list[object]
) -> None:
    monkeypatch.setattr(os, "sysconf", {"SC_PHYS_PAGES": 1_000, "SC_PAGE_SIZE": 4_096}.get)
    message = (
        "radixkv: --device-blocks 256001 needs 4,096,016 bytes for bookkeeping alone, but this "
        "machine has 4,096,000 bytes of memory\n"
    )
    assert radixkv(*argv, "--device-blocks", 256_001) == (2, "", message)


def _raise(error: BaseException) -> Any:
    def run(arguments: argparse.Namespace) -> int:
        raise error

    return run


def test_an_interrupt_waits_until_a_command_is_loaded() -> None:
    program = """
import signal
from radixkv.scheduler.terminal.interrupts import hold_interrupts
signal.signal(signal.SIGINT, signal.default_int_handler)
try:
    with hold_interrupts():
        signal.raise_signal(signal.SIGINT)
        print("loaded")
except KeyboardInterrupt:
    print("interrupted")
"""
    assert _python("-c", program).stdout == "loaded\ninterrupted\n"


def _while_interrupted() -> AssertionError:
    error = AssertionError("an engine that an interrupt left unfinished")
    error.__context__ = KeyboardInterrupt()
    return error


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (KeyboardInterrupt(), 130, "radixkv: interrupted\n"),
        (_while_interrupted(), 130, "radixkv: interrupted\n"),
        (MemoryError("1 TiB"), 2, "radixkv: not enough memory on this machine: 1 TiB\n"),
        (
            JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 99 bytes."),
            2,
            "radixkv: not enough memory on the device: RESOURCE_EXHAUSTED: Out of memory "
            "allocating 99 bytes.\n",
        ),
        (PermissionError(13, "Permission denied", "f"), 2, "radixkv: f: Permission denied\n"),
        (OutOfBlocksError(3, 2), 2, "radixkv: needs 3 blocks, but only 2 are free or evictable\n"),
    ],
    ids=["interrupt", "interrupted", "memory", "device memory", "file", "refusal"],
)
def test_errors_of_a_command_are_one_line(
    radixkv: Any, monkeypatch: pytest.MonkeyPatch, error: BaseException, status: int, message: str
) -> None:
    monkeypatch.setattr(hits, "run", _raise(error))
    outcome = radixkv("hits", "t", "--device-blocks", 1)
    assert outcome == (status, "", message)


def test_a_defect_keeps_its_traceback(radixkv: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hits, "run", _raise(AssertionError("a broken invariant")))
    with pytest.raises(AssertionError, match="a broken invariant"):
        radixkv("hits", "t", "--device-blocks", 1)


def test_a_reader_that_goes_away_is_no_error(trace: Path) -> None:
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "radixkv.scheduler.cli.main",
            "hits",
            str(trace),
            "--device-blocks=4",
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.wait(timeout=300) == 141
    assert process.stderr.read() == ""
    process.stderr.close()

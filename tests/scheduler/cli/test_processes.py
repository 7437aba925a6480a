"""A command on several processes: what its options refuse, and how a process of a group ends."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from radixkv.scheduler.cli import serve
from radixkv.scheduler.cli.shared import processes
from radixkv.scheduler.cli.shared.model_loading import mesh_of_options
from radixkv.scheduler.cli.shared.processes import group_of_options, leave_to_process_0
from radixkv.scheduler.errors import GroupError
from radixkv.scheduler.nodes import process_group
from radixkv.scheduler.nodes.channel.secret import ENVIRONMENT

GENERATE = ["generate", "m", "--prompts", "p", "--max-new-tokens", 1]
SERVE = ["serve", "m"]
LOOPBACK = "127.0.0.1:1234"
SECOND = ["--coordinator", LOOPBACK, "--num-processes", 2, "--process-id", 1]


@pytest.mark.parametrize("command", [GENERATE, SERVE], ids=["generate", "serve"])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (SECOND[:2], "--coordinator needs --num-processes"),
        (SECOND[2:4], "--num-processes needs --coordinator"),
        (SECOND[4:], "--process-id needs --coordinator"),
        (SECOND[:4], "--coordinator needs --process-id"),
        ([*SECOND[:2], *SECOND[4:]], "--coordinator needs --num-processes"),
        ([*SECOND[:5], 2], "--process-id must be less than --num-processes 2, got 2"),
        ([*SECOND, "--disaggregate"], "--disaggregate cannot be combined with --coordinator"),
        ([*SECOND, "--gateway", "a:1"], "--gateway cannot be combined with --coordinator"),
    ],
)
def test_options_that_do_not_fit_together(
    radixkv: Any, command: list[Any], options: list[Any], message: str
) -> None:
    assert radixkv(*command, *options) == (2, "", f"radixkv: {message}\n")


def test_ray_has_processes_of_its_own(radixkv: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "check_ray", lambda command: None)
    outcome = radixkv(*SERVE, *SECOND, "--ray", "prefill=1,decode=1")
    assert outcome == (2, "", "radixkv: --ray cannot be combined with --coordinator\n")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--num-processes", 1], "expected an integer from 2 to 2147483647, got '1'"),
        (["--process-id", -1], "expected an integer from 0 to 2147483647, got '-1'"),
    ],
)
def test_numbers_out_of_range(radixkv: Any, options: list[Any], message: str) -> None:
    outcome = radixkv(*SERVE, *options)
    assert outcome.status == 2
    assert message in outcome.stderr


@pytest.mark.parametrize(
    ("coordinator", "secret", "message"),
    [
        (
            "localhost:1234",
            "",
            "--coordinator: an address is like 127.0.0.1:5557 or [::1]:5557, got 'localhost:1234'",
        ),
        (
            "0.0.0.0:1234",
            "",
            "--coordinator: nobody can connect to 0.0.0.0:1234: it must be one address of a "
            "machine, with a port",
        ),
        (
            "10.0.0.1:1234",
            "",
            "--coordinator 10.0.0.1:1234 can be reached from other machines, so it needs a secret: "
            "set RADIXKV_SECRET, the same for all processes",
        ),
        (LOOPBACK, "short", "a secret needs 16 bytes, got 5"),
    ],
    ids=["name", "all", "open", "short"],
)
@pytest.mark.parametrize("command", [GENERATE, SERVE], ids=["generate", "serve"])
def test_addresses_and_secrets_that_cannot_be_used(
    radixkv: Any,
    monkeypatch: pytest.MonkeyPatch,
    command: list[Any],
    coordinator: str,
    secret: str,
    message: str,
) -> None:
    monkeypatch.setenv(ENVIRONMENT, secret)
    outcome = radixkv(*command, "--coordinator", coordinator, *SECOND[2:])
    assert outcome == (2, "", f"radixkv: {message}\n")


def test_the_library_that_is_missing(radixkv: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "find_spec", lambda name: None)
    message = "--coordinator needs the library 'zmq': pip install 'radixkv[nodes]'"
    assert radixkv(*GENERATE, *SECOND) == (2, "", f"radixkv: {message}\n")


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What a group does in this process, which joins none."""
    done: list[Any] = []

    class Group:
        def __init__(self, bind: str, **options: Any) -> None:
            done.append((bind, options))

        def __enter__(self) -> Group:
            return self

        def __exit__(self, kind: Any, *error: object) -> None:
            done.append(kind)

    monkeypatch.delenv(ENVIRONMENT, raising=False)
    monkeypatch.setattr(processes, "_keep_stdout", lambda: done.append("stdout"))
    monkeypatch.setattr(process_group, "init_processes", lambda *given: done.append(given))
    monkeypatch.setattr(process_group, "ProcessGroup", Group)
    monkeypatch.setattr(jax.distributed, "shutdown", lambda: done.append("shutdown"))
    monkeypatch.setattr(os, "_exit", done.append)
    return done


ARGUMENTS = argparse.Namespace(coordinator="[::1]:1234", num_processes=3, process_id=2)
BEGUN: list[Any] = ["stdout", ("[::1]:1234", 3, 2), ("[::1]:0", {"secret": None, "timeout_s": 600})]


def test_a_group_that_ends_well(events: list[Any]) -> None:
    with group_of_options(ARGUMENTS) as group:
        assert group is not None
        assert events == BEGUN
    assert events == [*BEGUN, None, "shutdown"]


def test_a_group_leaves_sigterm_as_it_was(
    events: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """JAX has a handler that ends nothing."""
    before = signal.getsignal(signal.SIGTERM)

    def init(*_: object) -> None:
        signal.signal(signal.SIGTERM, lambda *_: None)

    monkeypatch.setattr(process_group, "init_processes", init)
    try:
        with group_of_options(ARGUMENTS):
            during = signal.getsignal(signal.SIGTERM)
        assert during is signal.getsignal(signal.SIGTERM) is before
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize(
    ("error", "status", "text"),
    [
        (GroupError("process 1 is lost"), 1, "radixkv: process 1 is lost\n"),
        (FileNotFoundError(2, "No such file", "p"), 2, "radixkv: p: No such file\n"),
        (KeyboardInterrupt(), 130, "radixkv: interrupted\n"),
        (KeyError("a defect"), 1, "KeyError: 'a defect'\n"),
    ],
    ids=["group", "input", "interrupt", "defect"],
)
def test_an_error_ends_a_process_of_a_group_at_once(
    events: list[Any],
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    status: int,
    text: str,
) -> None:
    with group_of_options(ARGUMENTS):
        raise error
    assert events == [*BEGUN, type(error), status]  # and no shutdown
    out, err = capsys.readouterr()
    assert out == ""
    assert err.endswith(text)


@pytest.mark.parametrize("has_stderr", [True, False])
def test_what_libraries_print_on_stdout_goes_to_stderr(has_stderr: bool) -> None:
    script = f"""
import os, sys
from radixkv.scheduler.cli.shared.processes import _keep_stdout
sys.stderr = sys.stderr if {has_stderr} else None
print("before", end=", ")
_keep_stdout()
os.write(1, b"a library")
print("after")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    told = "a library" if has_stderr else ""
    assert (done.stdout, done.stderr) == ("before, after\n", told)


def test_only_process_0_opens_what_is_shared_or_written() -> None:
    given = {"json": "f", "storage": "s", "storage_max_bytes": 1, "kv_events": "e"}
    given["kv_events_replay"] = "r"
    for process_id, expected in ((None, given), (0, given), (1, dict.fromkeys(given))):
        arguments = argparse.Namespace(**given, process_id=process_id)
        leave_to_process_0(arguments)
        assert {name: getattr(arguments, name) for name in given} == expected


def test_a_group_has_all_devices_unless_tp_says_fewer() -> None:
    group: Any = SimpleNamespace()
    assert mesh_of_options(argparse.Namespace(tp=None)) is None
    for tp, number in ((None, jax.device_count()), (1, 1)):
        mesh = mesh_of_options(argparse.Namespace(tp=tp), group)
        assert mesh is not None and mesh.size == number

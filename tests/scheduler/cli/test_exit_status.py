"""Why a command ends: its exit status, and what it says."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from radixkv.kvcache.errors import RadixKVError
from radixkv.scheduler.cli import main
from radixkv.scheduler.cli.errors import BadInputError
from radixkv.scheduler.cli.exit_status import report, say
from radixkv.scheduler.errors import GroupError, HandoffFailedError, NodesFailedError


class JaxRuntimeError(RuntimeError):
    """Has the name of JAX's error, which is not imported."""


class Other(RuntimeError):
    """Has what JAX says of memory, but is no error of JAX."""


FULL = "RESOURCE_EXHAUSTED: out of memory"
NO_DEVICE = "Unable to initialize backend 'foo': it is not in the list of known backends"
LOST: list[type[Any]] = [GroupError, HandoffFailedError, NodesFailedError]


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        *((SystemExit(code), code or 0, "") for code in (None, 0, 1, 2)),
        (BadInputError("a  value\nis wrong"), 2, "a value is wrong"),
        *((kind("it is lost"), 1, "it is lost") for kind in LOST),
        (FileNotFoundError(2, "No such file", "p"), 2, "p: No such file"),
        (OSError("an error without a file"), 2, "an error without a file"),
        (RadixKVError("of the library"), 2, "of the library"),
        (MemoryError("10 GiB"), 2, "not enough memory on this machine: 10 GiB"),
        (JaxRuntimeError(FULL), 2, f"not enough memory on the device: {FULL}"),
        (RuntimeError(NO_DEVICE), 2, NO_DEVICE),
        (RuntimeError(f"the engine did not start: Traceback\n\nE: {NO_DEVICE}"), 2, NO_DEVICE),
        (KeyboardInterrupt(), 130, "interrupted"),
        *(
            (defect, None, "")
            for defect in (JaxRuntimeError("INTERNAL"), Other(FULL), KeyError(NO_DEVICE))
        ),
    ],
)
def test_a_defect_has_no_status_and_all_else_one_line(
    error: BaseException, status: int | None, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report(error) == status
    assert capsys.readouterr() == ("", f"radixkv: {said}\n" if said else "")


@pytest.mark.parametrize("has_stderr", [True, False])
def test_stdout_does_not_take_the_place_of_stderr(
    has_stderr: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A service may have closed stderr, and somebody may parse what is on stdout."""
    if not has_stderr:
        monkeypatch.setattr(sys, "stderr", None)
    say("a line")
    assert report(BadInputError("a reason")) == 2
    lines = "radixkv: a line\nradixkv: a reason\n" if has_stderr else ""
    assert capsys.readouterr() == ("", lines)


def test_commands_print_on_stderr_only_if_it_is_there() -> None:
    """All print by `say`, or look for stderr themselves."""
    folder = Path(main.__file__).parent
    printing = [
        file.relative_to(folder).as_posix()
        for file in sorted(folder.rglob("*.py"))
        if "file=sys.stderr" in file.read_text()
    ]
    assert printing == ["exit_status.py", "shared/startup.py"]


def test_an_error_while_an_interrupt_is_handled_is_an_interrupt(
    capsys: pytest.CaptureFixture[str],
) -> None:
    error = ValueError("of Hypothesis")
    error.__context__ = KeyboardInterrupt()
    assert report(error) == 130
    assert capsys.readouterr().err == "radixkv: interrupted\n"


def test_what_a_reader_that_went_away_has_not_read_goes_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "stdout"
    with path.open("w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        assert report(BrokenPipeError()) == 141
        os.write(stdout.fileno(), b"the flush at the exit")
        monkeypatch.undo()
    assert path.read_text() == ""


@pytest.mark.parametrize("outcome", ["flushed", "closed", "broken"])
def test_stdout_is_flushed_before_a_command_has_succeeded(
    outcome: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = SimpleNamespace(run=lambda arguments: 3)
    monkeypatch.setattr(main, "import_module", lambda *_: command)
    with (tmp_path / "stdout").open("w") as file:
        stdout = Mock(fileno=file.fileno)
        stdout.flush.side_effect = BrokenPipeError if outcome == "broken" else None
        with monkeypatch.context() as patched:
            patched.setattr(sys, "stdout", None if outcome == "closed" else stdout)
            status = main.main(["hits", "a trace", "--device-blocks", "4"])
    assert status == (141 if outcome == "broken" else 3)
    assert stdout.flush.call_count == (outcome != "closed")


@pytest.mark.parametrize("scheme", ["redis", "rediss", "s3", "https"])
@pytest.mark.parametrize("secret", ["user:secret", ":secret", "secret", "a@secret", "secret@b:c"])
def test_a_refusal_shows_no_password_of_a_url(
    scheme: str, secret: str, capsys: pytest.CaptureFixture[str]
) -> None:
    url, shown = f"{scheme}://{secret}@host:1/0", f"{scheme}://...@host:1/0"
    hits = ["hits", "a trace", "--device-blocks"]
    for arguments, told in (
        ([*hits, "4", url, "more"], f"unrecognized arguments: {shown} more"),
        (
            [*hits, url],
            f"argument --device-blocks: expected an integer from 1 to 2147483647, got {shown!r}",
        ),
    ):
        assert main.main(arguments) == 2
        said = f"radixkv: {told} (see `radixkv hits --help`)\n"
        assert capsys.readouterr() == ("", said)

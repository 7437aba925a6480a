"""Consoles, tables and log lines of commands and reports."""

from __future__ import annotations

import io
import logging
import sys

import pytest

from radixkv.scheduler.terminal.console import PIPE_WIDTH, make_console, table, to_text
from radixkv.scheduler.terminal.log_lines import listen


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_table_has_a_rule_below_its_headers() -> None:
    text = to_text(table(["name", "us"], [("a", "10.5"), ("[b]", "1")]))
    assert text == "name    us\n──────────\na     10.5\n[b]      1"


def test_a_table_may_have_no_headers() -> None:
    assert to_text(table([], [("a", "10"), ("longer", "1")])) == "a       10\nlonger   1"
    assert to_text(table([], [])) == ""


def test_a_cell_that_is_too_long_is_folded() -> None:
    text = to_text(table([], [("x" * 2 * PIPE_WIDTH, "1")]))
    assert text.count("x") == 2 * PIPE_WIDTH
    assert max(map(len, text.splitlines())) <= PIPE_WIDTH


@pytest.mark.parametrize("stderr", [False, True])
def test_a_pipe_gets_text_of_a_fixed_width(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, stderr: bool
) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    monkeypatch.setenv("FORCE_COLOR", "1")
    console = make_console(stderr=stderr)
    assert console.width == PIPE_WIDTH
    console.print(table(["a head"], [["[red]1"], [":cat:"]]))
    assert capsys.readouterr()[stderr] == "a head\n──────\n[red]1\n:cat: \n"


def test_a_terminal_gets_styles_at_its_own_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stdout", terminal := _Terminal())
    console = make_console()
    assert console.width == 30
    console.print(table(["head"], [["1"]]))
    assert "\x1b[1mhead" in terminal.getvalue()


def test_no_color_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stdout", terminal := _Terminal())
    monkeypatch.setenv("NO_COLOR", "1")
    make_console().print("red", style="red")
    assert terminal.getvalue() == "red\n"


def test_a_broken_pipe_is_left_to_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stdout", Broken())
    with pytest.raises(BrokenPipeError):
        make_console().print("text")


@pytest.mark.parametrize("level", [logging.NOTSET, logging.ERROR])
def test_a_logger_is_as_before_when_nobody_listens_any_more(level: int) -> None:
    logger, taken = logging.getLogger(f"tests.of.{level}"), list[str]()
    logger.setLevel(level)

    def take(record: logging.LogRecord) -> None:
        taken.append(record.getMessage())

    with pytest.raises(ValueError, match=r"^the end$"), listen(logger.name, take):
        logger.getChild("below").info("heard")
        raise ValueError("the end")
    logger.info("not heard")
    assert (taken, logger.level, logger.handlers) == (["heard"], level, [])

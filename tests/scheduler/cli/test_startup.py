"""The compilation cache of commands, and what they print while an engine starts."""

from __future__ import annotations

import io
import logging
import platform
import pwd
import stat
import sys
import warnings
from hashlib import sha256
from pathlib import Path

import pytest

from radixkv.scheduler.cli.shared.startup import report_on_stderr, set_compilation_cache

DIRECTORY = "JAX_COMPILATION_CACHE_DIR"
LOGGER = logging.getLogger("radixkv.scheduler.engine.programs")


@pytest.mark.parametrize("xdg", [True, False])
def test_the_cache_is_in_the_users_cache_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, xdg: bool
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    environment = {"XDG_CACHE_HOME": str(tmp_path / "xdg")} if xdg else {}
    set_compilation_cache(environment, enabled=True)
    directory = Path(environment[DIRECTORY])
    assert directory.parent == tmp_path / ("xdg" if xdg else "home/.cache") / "radixkv"
    assert directory.name.startswith("programs-")
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700  # a program is executable code
    assert environment["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] == "0"
    again = dict(environment)
    set_compilation_cache(again, enabled=True)
    assert again == environment


def test_what_the_user_has_set_wins(tmp_path: Path) -> None:
    chosen = {
        DIRECTORY: str(tmp_path / "own"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "3",
        "XDG_CACHE_HOME": str(tmp_path / "xdg"),
    }
    environment = dict(chosen)
    set_compilation_cache(environment, enabled=True)
    assert environment.items() >= chosen.items()
    assert list(tmp_path.iterdir()) == []  # JAX makes it


def test_small_and_quick_programs_are_kept_unless_the_user_says_else(tmp_path: Path) -> None:
    prefix = "JAX_PERSISTENT_CACHE_MIN_"
    ours = {f"{prefix}COMPILE_TIME_SECS": "0", f"{prefix}ENTRY_SIZE_BYTES": "-1"}
    for chosen in ({}, *({name: "5"} for name in ours)):
        environment = {DIRECTORY: str(tmp_path), **chosen}
        set_compilation_cache(environment, enabled=True)
        assert environment == {DIRECTORY: str(tmp_path), **ours, **chosen}


CPUINFO = "processor\t: 0\nmodel name\t: {model}\n{word}\t: {flags}\nbogomips\t: 1\n"


def cache_name(cpuinfo: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """The name of the cache on a machine with some /proc/cpuinfo, or without."""

    def read_text(path: Path, encoding: str) -> str:
        assert str(path) == "/proc/cpuinfo"
        if cpuinfo is None:
            raise FileNotFoundError
        return cpuinfo

    environment = {"XDG_CACHE_HOME": str(tmp_path)}
    with monkeypatch.context() as patched:
        patched.setattr(Path, "read_text", read_text)
        set_compilation_cache(environment, enabled=True)
    return Path(environment[DIRECTORY]).name


@pytest.mark.parametrize("word", ["flags", "Features"])
def test_processors_with_the_same_features_share_a_cache(
    word: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    machine = platform.machine()

    def name(**fields: str) -> str:
        return cache_name(CPUINFO.format(word=word, **fields), monkeypatch, tmp_path)

    one = name(model="a", flags="fpu avx")
    assert (
        one.removeprefix(f"programs-{machine}-")
        == sha256(f"{word}\t: fpu avx".encode()).hexdigest()[:8]
    )
    assert one == name(model="b", flags="fpu avx") != name(model="a", flags="fpu avx512")


def test_a_machine_that_names_no_features_has_a_cache_by_what_else_it_names(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    names = set()
    for model in ("a", "b"):
        names.add(cache_name(f"model: {model}\nmore\n", monkeypatch, tmp_path))
        monkeypatch.setattr(platform, "processor", lambda model=model: f"processor {model}")
        names.add(cache_name(None, monkeypatch, tmp_path))
    assert len(names) == 4


@pytest.mark.parametrize("chosen", [None, "true", "1", "false"])
def test_the_flag_turns_every_cache_off(tmp_path: Path, chosen: str | None) -> None:
    environment = {DIRECTORY: str(tmp_path / "own")}
    if chosen is not None:
        environment["JAX_ENABLE_COMPILATION_CACHE"] = chosen
    set_compilation_cache(environment, enabled=False)
    assert environment["JAX_ENABLE_COMPILATION_CACHE"] == "false"
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_cannot_be_made_costs_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "radixkv").write_text("a file")
    environment = {"XDG_CACHE_HOME": str(tmp_path)}
    set_compilation_cache(environment, enabled=True)
    assert DIRECTORY not in environment
    said = capsys.readouterr().err
    assert said.startswith("radixkv: warning: no compilation cache: [Errno ")
    assert said.count("\n") == 1


def test_a_user_without_a_home_costs_a_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def find_user(uid: int) -> None:
        raise KeyError(f"uid not found: {uid}")

    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", find_user)
    environment: dict[str, str] = {}
    set_compilation_cache(environment, enabled=True)
    assert DIRECTORY not in environment
    said = "radixkv: warning: no compilation cache: Could not determine home directory.\n"
    assert capsys.readouterr() == ("", said)


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("is_terminal", [True, False])
def test_lines_on_stderr(monkeypatch: pytest.MonkeyPatch, is_terminal: bool) -> None:
    """On a terminal, the next line replaces each."""
    stderr = _Terminal() if is_terminal else io.StringIO()
    monkeypatch.setattr(sys, "stderr", stderr)
    with report_on_stderr():
        warnings.simplefilter("always")  # pytest makes errors of them
        for place in (1, 2):
            LOGGER.info("compiling %d of %d programs", place, 2)
        warnings.warn("it is slow", stacklevel=1)
    LOGGER.info("compiling after the start")
    end = "\r" if is_terminal else "\n"
    erase = "\x1b[K" if is_terminal else ""
    assert stderr.getvalue() == (
        f"{erase}radixkv: compiling 1 of 2 programs{end}"
        f"{erase}radixkv: compiling 2 of 2 programs{end}"
        f"{erase}radixkv: warning: it is slow\n{erase}"
    )
    assert not LOGGER.isEnabledFor(logging.INFO)


def test_a_service_without_stderr_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    with report_on_stderr():
        warnings.simplefilter("always")
        LOGGER.info("compiling 1 of 1 programs")
        warnings.warn("it is slow", stacklevel=1)

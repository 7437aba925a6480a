"""The compilation cache of commands, and what they print while an engine starts."""

from __future__ import annotations

import io
import logging
import os
import stat
import subprocess
import sys
import warnings
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


def test_a_command_caches_its_programs_and_the_library_does_not(
    model_dir: Path, tmp_path: Path
) -> None:
    prompts = tmp_path / "prompts.json"
    prompts.write_text("[[1, 2, 3]]")
    generate = ["generate", model_dir, "--prompts", prompts, "--max-new-tokens", 1]
    generate += ["--token-budget", 3, "--device-blocks", 2]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("JAX_")}
    environment["XDG_CACHE_HOME"] = str(tmp_path / "cache")

    def run(program: str, *arguments: object) -> int:
        """Return how many programs are stored after a run."""
        line = [sys.executable, "-c", program, *map(str, arguments)]
        subprocess.run(line, env=environment, check=True, capture_output=True)
        return sum(path.name.endswith("-cache") for path in (tmp_path / "cache").rglob("*"))

    command = (
        "import sys; from radixkv.scheduler.cli.main import main; sys.exit(main(sys.argv[1:]))"
    )
    library = (
        "import sys; from radixkv.scheduler.models import load_model; "
        "from radixkv.scheduler.engine import Engine; "
        "Engine(load_model(sys.argv[1]), block_size=16, num_blocks=1, token_budget=3, "
        "max_running=1, max_model_len=4)"
    )
    assert run(library, model_dir) == 0
    assert run(command, *generate, "--no-compilation-cache") == 0
    stored = run(command, *generate)
    assert stored >= 3  # decode, extend, and the one that draws
    assert run(command, *generate) == stored


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

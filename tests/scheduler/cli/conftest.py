"""A tiny trace and a tiny model, and the command line as a function."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from radixkv.scheduler.cli.main import main
from radixkv.scheduler.models import make_tiny_checkpoint

from .generating import PROMPTS


class Outcome(NamedTuple):
    """What one command did."""

    status: int
    stdout: str
    stderr: str


@pytest.fixture
def radixkv(capsys: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    """Run a command in this process."""

    def run(*argv: object) -> Outcome:
        status = main([str(argument) for argument in argv])
        return Outcome(status, *capsys.readouterr())

    return run


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Five requests; the last one repeats the first one's prompt and more."""
    requests = [
        (1000, 10, [0, 1]),
        (1536, 3, [0, 2, 3]),
        (100, 40, [4]),
        (1024, 1, [5, 6]),
        (1300, 20, [0, 1, 7]),
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text(
        "".join(
            json.dumps(
                {
                    "timestamp": 1000 * index,
                    "input_length": input_length,
                    "output_length": output_length,
                    "hash_ids": hash_ids,
                }
            )
            + "\n"
            for index, (input_length, output_length, hash_ids) in enumerate(requests)
        )
    )
    return path


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint, which no test changes."""
    directory = tmp_path_factory.mktemp("model")
    make_tiny_checkpoint(directory)
    return directory


@pytest.fixture
def without_sizes(model_dir: Path, tmp_path: Path) -> list[object]:
    """The arguments of a `radixkv generate` that completes `PROMPTS`, without sizes."""
    path = tmp_path / "prompts.json"
    path.write_text(json.dumps(PROMPTS))
    return ["generate", model_dir, "--prompts", path, "--max-new-tokens", 8, "--ignore-eos"]


@pytest.fixture
def arguments(without_sizes: list[object]) -> list[object]:
    """The same with sizes."""
    return [*without_sizes, "--block-size", 4, "--token-budget", 8]

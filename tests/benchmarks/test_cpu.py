"""The comparison with transformers on a CPU: its command, its table, and our side of it."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from radixkv.scheduler.models import make_tiny_checkpoint

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

sys.path.insert(0, str(BENCHMARKS))
cpu = import_module("cpu")
sys.path.remove(str(BENCHMARKS))


def run(*arguments: object, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARKS / "cpu.py"), *map(str, arguments)]
    environment = {**os.environ, **variables}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)


@pytest.mark.nightly
def test_our_side_generates_the_same_from_a_cached_prompt(tmp_path: Path) -> None:
    make_tiny_checkpoint(tmp_path)
    worker = cpu.Worker(sys.executable, "radixkv", tmp_path, "float32")
    prompts = [list(range(10 * row, 10 * row + cpu.PROMPT_TOKENS)) for row in range(1, 3)]
    first, again = (worker.run(cpu.Turn(prompts, 4, True)) for _ in range(2))
    alone = worker.run(cpu.Turn(prompts[1:], 1, False))
    worker.close()
    assert first[1] == again[1]
    assert [len(tokens) for tokens in first[1]] == [4, 4]
    assert alone[1] == [first[1][1][:1]]
    assert min(first[0], again[0], alone[0]) > 0
    assert [version.split()[0] for version in worker.versions] == ["radixkv", "jax"]


def test_a_row_has_the_medians_and_the_median_of_ratios() -> None:
    row = cpu.format_row("bfloat16", "decode", [(0.1, 0.1), (0.3, 0.2), (0.2, 0.4)])
    assert row == "| bfloat16 | decode | 200.0 ms | 200.0 ms | 1.00 [0.50 to 1.50] |"


def test_a_missing_torch_is_named_with_the_way_to_get_it(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('it is hidden')")
    done = run(PYTHONPATH=str(tmp_path))
    assert done.returncode == 1 and not done.stdout
    assert done.stderr == (
        f"{sys.executable} has no torch and transformers (ImportError: it is hidden). To get them: "
        "pip install torch transformers --extra-index-url https://download.pytorch.org/whl/cpu, or "
        "name the interpreter of an environment that has them: --torch-python PATH\n"
    )


@pytest.mark.parametrize(
    ("arguments", "status", "text"),
    [
        (["--torch-python", "/no/python"], 1, "/no/python: No such file or directory"),
        (["--rounds", "0"], 2, "argument --rounds: expected a positive integer, got '0'"),
        (["--steps", "x"], 2, "argument --steps: expected a positive integer, got 'x'"),
        (["--dtypes", "float16"], 2, "argument --dtypes: invalid choice: 'float16'"),
    ],
)
def test_wrong_arguments_are_refused(arguments: list[str], status: int, text: str) -> None:
    done = run(*arguments)
    assert done.returncode == status
    assert text in done.stderr and not done.stdout

"""`radixkv generate` as a user runs it: a process of its own."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import radixkv.scheduler

PREFIX = [(11 * i) % 1000 + 2 for i in range(20)]
PROMPTS = [[*PREFIX, 3], [*PREFIX, 4], PREFIX, [7]]


def generate(model_dir: Path, tmp_path: Path, *options: str) -> dict[str, Any]:
    """Run the command on a small budget, which has few programs to compile."""
    prompts, results = tmp_path / "prompts.json", tmp_path / "results.json"
    prompts.write_text(json.dumps(PROMPTS))
    command = [sys.executable, "-m", "radixkv.scheduler.cli", "generate", str(model_dir)]
    command += ["--prompts", str(prompts), "--max-new-tokens", "6", "--block-size", "4"]
    command += ["--token-budget", "4", "--json", str(results), "--ignore-eos", *options]
    # Where this process found radixkv, installed or not.
    roots = {str(Path(path).parent.parent) for path in radixkv.scheduler.__path__}
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(roots)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert [json.loads(line) for line in done.stdout.splitlines()[: len(PROMPTS)]]
    return json.loads(results.read_text(encoding="utf-8"))


@pytest.mark.parametrize("family", ["qwen3"])
def test_outputs_are_the_same_with_and_without_the_prefix_cache(
    model_dir: Callable[[str], Path], tmp_path: Path, family: str
) -> None:
    cached = generate(model_dir(family), tmp_path)
    plain = generate(model_dir(family), tmp_path, "--no-prefix-cache")
    assert cached["outputs"] == plain["outputs"]
    assert [len(output) for output in cached["outputs"]] == [6] * len(PROMPTS)
    assert cached["stats"]["scheduler"]["hit_tokens"] == 20 + 19
    assert plain["stats"]["scheduler"]["hit_tokens"] == 0
    for results in (cached, plain):
        assert results["stats"]["compilations_at_warm_up"] > 0
        assert results["stats"]["compilations_after_warm_up"] == 0

"""`radixkv generate` as a user runs it: a process of its own."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

PREFIX = [(11 * i) % 1000 + 2 for i in range(20)]
PROMPTS = [[*PREFIX, 3], [*PREFIX, 4], PREFIX, [7]]


def generate(model_dir: Path, tmp_path: Path, *options: str) -> dict[str, Any]:
    """Run the command on a small budget, which has few programs to compile."""
    prompts, results = tmp_path / "prompts.json", tmp_path / "results.json"
    prompts.write_text(json.dumps(PROMPTS))
    command = [sys.executable, "-m", "radixkv.scheduler.cli", "generate", str(model_dir)]
    command += ["--prompts", str(prompts), "--max-new-tokens", "6", "--block-size", "4"]
    command += ["--token-budget", "4", "--json", str(results), "--ignore-eos", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert [json.loads(line) for line in done.stdout.splitlines()[: len(PROMPTS)]]
    return json.loads(results.read_text(encoding="utf-8"))


def test_outputs_are_the_same_with_and_without_the_prefix_cache(
    model_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    cached = generate(model_dir("qwen3"), tmp_path)
    plain = generate(model_dir("qwen3"), tmp_path, "--no-prefix-cache")
    assert cached["outputs"] == plain["outputs"]
    assert [len(output) for output in cached["outputs"]] == [6] * len(PROMPTS)
    assert cached["stats"]["scheduler"]["hit_tokens"] == 20 + 19
    assert plain["stats"]["scheduler"]["hit_tokens"] == 0
    for results in (cached, plain):
        assert results["stats"]["compilations_at_warm_up"] > 0
        assert results["stats"]["compilations_after_warm_up"] == 0

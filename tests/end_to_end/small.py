"""Prompts of the tests with processes, and sizes for which few programs are compiled.

All have the same sizes, so that each program is compiled once: JAX's cache, which the processes
share with the one that runs the tests, has it for the next.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

from radixkv.scheduler.engine import Engine
from radixkv.scheduler.models import Model
from radixkv.scheduler.request import Request

PREFIX: Final = [(11 * i) % 1000 + 2 for i in range(20)]
PROMPTS: Final = [[*PREFIX, 3], [*PREFIX, 4], PREFIX, [7], [*PREFIX, 3]]
NEW_TOKENS: Final = 12
SIZES: Final[dict[str, Any]] = {
    "block_size": 4,
    "token_budget": 4,
    "max_running": 4,
    "max_model_len": len(PROMPTS[0]) + NEW_TOKENS,
}
NUM_BLOCKS: Final = 14
"""So few that blocks are soon reused by other requests."""

NODE_OPTIONS: Final = (
    "--device-blocks",
    NUM_BLOCKS,
    *(word for name, size in SIZES.items() for word in (f"--{name.replace('_', '-')}", size)),
)
"""Options of the node commands."""


def make_engine(model: Model) -> Engine:
    """One engine of these sizes."""
    return Engine(model, num_blocks=NUM_BLOCKS, **SIZES)


def make_requests() -> list[Request]:
    return [Request(str(place), prompt, NEW_TOKENS) for place, prompt in enumerate(PROMPTS)]


def generate(model_dir: Path, tmp_path: Path, *options: object) -> dict[str, Any]:
    """Complete the prompts with the command, in a process of its own."""
    prompts, results = tmp_path / "prompts.json", tmp_path / "results.json"
    prompts.write_text(json.dumps(PROMPTS))
    command = [sys.executable, "-m", "radixkv.scheduler.cli.main", "generate", model_dir]
    command += ["--prompts", prompts, "--max-new-tokens", NEW_TOKENS]
    if "--gateway" not in options:  # whose nodes have sizes of their own
        command += ["--block-size", SIZES["block_size"], "--token-budget", SIZES["token_budget"]]
    command += ["--json", results, "--ignore-eos", *options]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    said = [line for line in done.stderr.splitlines() if "radixkv: compiling " not in line]
    assert (done.returncode, said) == (0, []), done.stderr
    assert [json.loads(line) for line in done.stdout.splitlines()[: len(PROMPTS)]]
    return json.loads(results.read_text(encoding="utf-8"))

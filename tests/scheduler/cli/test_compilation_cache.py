"""The compilation cache of commands, in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


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

"""Compare prefill and decode on one CPU core with transformers on torch, and print a table.

Run:
    python benchmarks/cpu.py [--rounds N] [--torch-python PATH] [--dry-run]

The model is a random Llama of 300M parameters, the same for both. Prompts have 128 tokens::

    prefill          a new prompt: its first token
    decode, R rows   R prompts whose KV is cached: some tokens of each, greedy

Each side is one process per dtype, and both are on one core. They take turns in every case of
every round. The figure is the CPU time of the process with all its threads, per step; a ratio is
the median of the rounds' ratios. radixkv's side is an `Engine` with its scheduler and cache, the
other `LlamaForCausalLM` with a `DynamicCache` and SDPA, in a loop. In float32, their tokens must
be equal.

torch and transformers are not installed with radixkv. Install them here, or give the interpreter
of another environment that has them as `--torch-python`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Protocol, TextIO

from machine import describe_machine, installed

DTYPES = ("float32", "bfloat16")
ROWS = (1, 8, 32)
"""Rows of the decode cases."""
PROMPT_TOKENS = 128
GET_TORCH = (
    "pip install torch transformers --extra-index-url https://download.pytorch.org/whl/cpu, "
    "or name the interpreter of an environment that has them: --torch-python PATH"
)
MODEL: dict[str, Any] = {
    "vocab_size": 32_000,
    "hidden_size": 1536,
    "intermediate_size": 4096,
    "num_hidden_layers": 8,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "torch_dtype": "bfloat16",
}
TINY: dict[str, Any] = {"torch_dtype": "bfloat16"}


@dataclass(frozen=True)
class Turn:
    """A case for one side to run.

    Attributes:
        prompts: one of PROMPT_TOKENS tokens for each row.
        num_steps: tokens to generate after each.
        is_cached: whether the KV of the prompts is kept from turn to turn.
    """

    prompts: list[list[int]]
    num_steps: int
    is_cached: bool


class Side(Protocol):
    """One of the two that are compared."""

    def generate(self, turn: Turn) -> list[list[int]]:
        """Return the tokens after each prompt."""


class OurSide:
    """An engine of radixkv, which keeps prompts in its prefix cache."""

    def __init__(self, directory: Path, dtype: str) -> None:
        """Load the model and compile its programs."""
        from radixkv.scheduler import Request
        from radixkv.scheduler.engine import Engine
        from radixkv.scheduler.models import load_model

        self._new_request = Request
        self._engine = Engine(
            load_model(directory, dtype),
            block_size=16,
            num_blocks=512,
            token_budget=PROMPT_TOKENS,
            max_running=max(ROWS),
            max_model_len=1024,
        )
        self.versions = [f"radixkv {installed('radixkv')}", f"jax {installed('jax')}"]

    def generate(self, turn: Turn) -> list[list[int]]:
        """Return the tokens after each prompt."""
        requests = [
            self._new_request(str(row), prompt, turn.num_steps)
            for row, prompt in enumerate(turn.prompts)
        ]
        for request in requests:
            self._engine.add_request(request)
        self._engine.run()
        return [list(request.output_tokens) for request in requests]


class TorchSide:
    """A model of transformers, whose caches are cut back to the prompts after each turn."""

    def __init__(self, directory: Path, dtype: str) -> None:
        """Load the model."""
        import torch
        from transformers import DynamicCache, LlamaForCausalLM

        self._torch, self._new_cache = torch, DynamicCache
        self._model = LlamaForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype))
        self._model.eval()
        self._caches: dict[int, Any] = {}
        self.versions = [f"torch {torch.__version__}", f"transformers {installed('transformers')}"]

    def generate(self, turn: Turn) -> list[list[int]]:
        """Return the tokens after each prompt."""
        torch = self._torch
        with torch.inference_mode():
            inputs = torch.tensor(turn.prompts)
            cache = self._new_cache()
            if turn.is_cached:
                rows = len(turn.prompts)
                if rows not in self._caches:
                    self._compute(inputs[:, :-1], self._caches.setdefault(rows, cache))
                cache, inputs = self._caches[rows], inputs[:, -1:]
            outputs = []
            for _ in range(turn.num_steps):
                inputs = self._compute(inputs, cache)
                outputs.append(inputs)
            if turn.is_cached:
                cache.crop(-turn.num_steps)
            tokens: list[list[int]] = torch.cat(outputs, dim=1).tolist()
        return tokens

    def _compute(self, inputs: Any, cache: Any) -> Any:
        """Compute tokens `[rows, n]`; return the next of each row, `[rows, 1]`."""
        computed = self._model(inputs, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return computed.logits[:, -1].argmax(-1, keepdim=True)


SIDES: dict[str, Callable[[Path, str], Any]] = {"radixkv": OurSide, "torch": TorchSide}


class Worker:
    """A side in a process of its own; a line of JSON in each direction per turn."""

    def __init__(self, python: str, side: str, directory: Path, dtype: str) -> None:
        """Start the process, and wait until it is ready."""
        self._side = side
        command = [python, __file__, "--worker", side, str(directory), dtype]
        threads = {"OMP_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu"}
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **threads},
        )
        self.versions: list[str] = self._read()["versions"]

    def run(self, turn: Turn) -> tuple[float, list[list[int]]]:
        """Return the CPU time of a turn per step, in seconds, and the tokens after each prompt."""
        assert self._process.stdin is not None
        print(json.dumps(asdict(turn)), file=self._process.stdin, flush=True)
        answer = self._read()
        return answer["cpu_s"] / turn.num_steps, answer["tokens"]

    def close(self) -> None:
        """End the process."""
        self._process.communicate()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            sys.exit(f"{self._side} ended with exit status {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer


def work(side: str, directory: Path, dtype: str, answers: TextIO) -> None:
    """Run the turns that come on stdin."""
    runner = SIDES[side](directory, dtype)
    print(json.dumps({"versions": runner.versions}), file=answers, flush=True)
    for line in sys.stdin:
        turn = Turn(**json.loads(line))
        start = time.process_time()
        tokens = runner.generate(turn)
        answer = {"cpu_s": time.process_time() - start, "tokens": tokens}
        print(json.dumps(answer), file=answers, flush=True)


def compare(
    directory: Path, dtype: str, arguments: argparse.Namespace
) -> tuple[list[str], list[str]]:
    """Return the rows of the table for a dtype, and the versions of both sides."""
    import numpy as np

    rng = np.random.default_rng(0)
    vocab_size = json.loads((directory / "config.json").read_text())["vocab_size"]

    def prompts(rows: int) -> list[list[int]]:
        made: list[list[int]] = rng.integers(2, vocab_size, (rows, PROMPT_TOKENS)).tolist()
        return made

    cached = {rows: prompts(rows) for rows in ROWS}
    names = [f"prefill of {PROMPT_TOKENS} tokens"]
    names += [f"decode, {rows} row{'s' * (rows > 1)}" for rows in ROWS]
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    pythons = {"radixkv": sys.executable, "torch": arguments.torch_python}
    workers = {side: Worker(pythons[side], side, directory, dtype) for side in SIDES}
    # Two rounds are not counted: one computes the prompts, one uses all code for the first time.
    for number in range(-1, arguments.rounds + 1):
        turns = [Turn(prompts(1), 1, False)]
        turns += [Turn(cached[rows], arguments.steps, True) for rows in ROWS]
        for name, turn in zip(names, turns, strict=True):
            print(f"{dtype}, round {number} of {arguments.rounds}: {name}", file=sys.stderr)
            order = list(workers)[:: 1 if number % 2 else -1]
            results = {side: workers[side].run(turn) for side in order}
            (our_s, our_tokens), (torch_s, torch_tokens) = (results[side] for side in SIDES)
            if dtype == "float32" and our_tokens != torch_tokens:
                sys.exit(f"{name}: radixkv generates {our_tokens}, torch {torch_tokens}")
            if number > 0:
                times[name].append((our_s, torch_s))
    for worker in workers.values():
        worker.close()
    rows = [format_row(dtype, name, pairs) for name, pairs in times.items()]
    return rows, [version for worker in workers.values() for version in worker.versions]


def format_row(dtype: str, name: str, times: Sequence[tuple[float, float]]) -> str:
    """Return a row of the table from pairs of seconds: radixkv's and torch's."""
    ours, torchs = zip(*times, strict=True)
    ratios = [our / other for our, other in times]
    return (
        f"| {dtype} | {name} | {1e3 * median(ours):.1f} ms | {1e3 * median(torchs):.1f} ms "
        f"| {median(ratios):.2f} [{min(ratios):.2f} to {max(ratios):.2f}] |"
    )


def main() -> None:
    """Compare both sides in each dtype, and print the table."""
    if sys.argv[1:2] == ["--worker"]:
        # A library may print; only answers may reach the other process.
        with os.fdopen(os.dup(1), "w") as answers:
            os.dup2(2, 1)
            work(sys.argv[2], Path(sys.argv[3]), sys.argv[4], answers)
        return
    arguments = parse_arguments()
    check_torch(arguments.torch_python)
    core = min(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {core})  # inherited by both sides
    from radixkv.scheduler.models.tiny import make_tiny_checkpoint

    with tempfile.TemporaryDirectory() as directory:
        make_tiny_checkpoint(directory, overrides=TINY if arguments.dry_run else MODEL)
        tables = [compare(Path(directory), dtype, arguments) for dtype in arguments.dtypes]
    command = " ".join(["python benchmarks/cpu.py", *sys.argv[1:]])
    print(f"- Command: `{command}`")
    print(f"- Measured: {describe_machine(*tables[0][1])}, core {core} only")
    print("\n| dtype | Case | radixkv, CPU per step | torch | radixkv / torch |")
    print("| --- | --- | ---: | ---: | ---: |")
    for rows, _ in tables:
        print("\n".join(rows))


def check_torch(python: str) -> None:
    """Exit with a message if an interpreter cannot import torch and transformers."""
    command = [python, "-c", "import torch, transformers"]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        sys.exit(f"--torch-python {python}: {error.strerror}")
    if done.returncode != 0:
        reason = done.stderr.strip().splitlines()[-1]
        sys.exit(f"{python} has no torch and transformers ({reason}). To get them: {GET_TORCH}")


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=positive, default=5, help="default: %(default)s")
    parser.add_argument(
        "--steps", type=positive, default=8,
        help="decode steps of a turn; default: %(default)s",
    )  # fmt: skip
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument(
        "--torch-python", default=sys.executable, metavar="PATH",
        help="interpreter that has torch and transformers; default: this one",
    )  # fmt: skip
    parser.add_argument(
        "--dry-run", action="store_true", help="a tiny model, to check that the program runs"
    )
    return parser.parse_args()


def positive(text: str) -> int:
    """Parse a positive integer."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a positive integer, got '{text}'")
    return int(text)


if __name__ == "__main__":
    main()

"""A model that several processes share: the same tokens, and an end when one fails or differs."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest

from radixkv.scheduler.models import make_tiny_checkpoint
from radixkv.scheduler.nodes.channel.secret import ENVIRONMENT
from radixkv.scheduler.request import SamplingParams
from radixkv.scheduler.serving import LLM, GenerationParams

from ..ports import reserved_port
from .on_processes import KILLED, LOST, PROMPTS, make_engine, serve, serve_new_weights

ROOT = Path(__file__).parents[2]
TINY = {"num_key_value_heads": 4, "num_hidden_layers": 1, "vocab_size": 256}
PATIENCE_S = 500

pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, and beside it one that differs in its weights alone."""
    made = tmp_path_factory.mktemp("models")
    make_tiny_checkpoint(made / "model", overrides=TINY)
    make_tiny_checkpoint(made / "other", overrides=TINY, seed=5)
    return made / "model"


@pytest.fixture(scope="module")
def alone(directory: Path) -> dict[str, Any]:
    """What one device serves."""
    engine = make_engine(directory, None)
    served = serve(engine)
    assert engine.close(timeout_s=1000)
    return served


def on_processes(
    directory: Path, what: str, num_processes: int = 2, num_devices: int = 1
) -> list[tuple[int, str, str]]:
    """Return the status, stdout and stderr of each process; all have ended."""
    program = ["-m", "tests.end_to_end.on_processes"]
    with reserved_port() as port:
        lines = [
            [*program, str(process), str(num_processes), str(port), str(directory), what]
            for process in range(num_processes)
        ]
        with started(directory, lines, num_devices) as processes:
            return ends_of(processes)


@contextmanager
def started(
    directory: Path, lines: Sequence[Sequence[str]], num_devices: int = 1
) -> Iterator[list[subprocess.Popen[str]]]:
    """Python processes with these arguments, which share compiled programs."""
    flags = f"--xla_force_host_platform_device_count={num_devices}"
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": flags,
        "JAX_COMPILATION_CACHE_DIR": str(directory.with_name("programs")),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        ENVIRONMENT: "of all these processes",
    }
    processes = [
        subprocess.Popen(
            [sys.executable, *line],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for line in lines
    ]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def ends_of(processes: Sequence[subprocess.Popen[str]]) -> list[tuple[int, str, str]]:
    """Wait until all have ended, and return the status, stdout and stderr of each."""
    texts = [process.communicate(timeout=PATIENCE_S) for process in processes]
    return [(process.returncode, *each) for process, each in zip(processes, texts, strict=True)]


@pytest.mark.parametrize(("processes", "devices"), [(2, 1), (2, 2)])
def test_several_processes_serve_as_one_does(directory, alone, processes, devices):
    (status, output, errors), *others = on_processes(directory, "serve", processes, devices)
    assert status == 0, errors
    assert [each[0] for each in others] == [0] * len(others), others
    served = json.loads(output.splitlines()[-1])  # after those of Gloo
    assert served["outputs"] == alone["outputs"]
    for name in ("preemptions", "host_hits"):
        assert served[name] > 0
    assert served["devices"] == processes * devices
    assert served["logprobs"] == pytest.approx(alone["logprobs"], abs=1e-4)
    assert served["prompt"][1:] == pytest.approx(alone["prompt"][1:], abs=1e-4)


@pytest.mark.parametrize("what", ["other weights", "trained weights"])
def test_new_weights_come_to_each_process(directory, what):
    (status, output, errors), (other, _, others) = on_processes(directory, what)
    assert (status, other) == (0, 0), (errors, others)
    engine = make_engine(directory, None)
    expected = serve_new_weights(engine, directory, "other", what)
    assert engine.close(timeout_s=1000)
    assert json.loads(output.splitlines()[-1]) == expected


@pytest.mark.parametrize(
    ("what", "statuses", "leads", "follows"),
    [
        ("killed", [LOST, KILLED], "process 1 is lost: ", ""),
        ("leader killed", [KILLED, LOST], "", r"process 0 at 127.0.0.1:\d+ is lost$"),
        (
            "forged",
            [LOST, LOST],
            "process 1 reports call 30 with another digest: it has executed other calls than ",
            "",
        ),
        (
            "stale weights",
            [LOST, LOST],
            "process 1 is lost: ",
            r"new weights differ: process 0 has (\w{16}), this one (?!\1)\w{16}$",
        ),
        (
            "other options",
            [LOST, LOST],
            "process 1 has block_size 8, process 0 4: all need the same$",
            "process 1 has block_size 8, process 0 4: all need the same$",
        ),
        (
            "other model",
            [LOST, LOST],
            r"process 1 has weights \w+, process 0 \w+: all need the same$",
            r"process 1 has weights \w+, process 0 \w+: all need the same$",
        ),
    ],
)
def test_a_process_that_fails_or_differs_ends_all(directory, what, statuses, leads, follows):
    ended = on_processes(directory, what)
    assert [status for status, _, _ in ended] == statuses, ended
    for (_, _, errors), pattern in zip(ended, (leads, follows), strict=True):
        assert not pattern or re.search(f"^GroupError: {pattern}", errors, re.M), errors


# The commands

MAIN = ["-m", "radixkv.scheduler.cli.main"]
KILLED_MAIN = """
import sys
from radixkv.scheduler.cli.main import main
from radixkv.scheduler.nodes.process_group import ProcessGroup
from tests.end_to_end.on_processes import kill_at
join = ProcessGroup.join
def join_and_end(group, options):
    join(group, options)
    kill_at(group, 5)
ProcessGroup.join = join_and_end
sys.exit(main(sys.argv[1:]))
"""
"""The command, in a process that ends as one that is killed does."""


def of_processes(port: int, command: Sequence[str]) -> list[list[str]]:
    """The arguments of each of two processes of a command."""
    address = f"127.0.0.1:{port}"
    options = ["--coordinator", address, "--num-processes", "2", "--process-id"]
    return [[*MAIN, *command, *options, str(process)] for process in range(2)]


@pytest.fixture
def generate(directory: Path, tmp_path: Path) -> list[str]:
    """A command whose requests are preempted, parked and stored."""
    (tmp_path / "prompts.json").write_text(json.dumps(PROMPTS))
    sizes = ["--block-size=4", "--device-blocks=14", "--token-budget=8", "--max-new-tokens=12"]
    return [
        *("generate", str(directory), "--prompts", str(tmp_path / "prompts.json")),
        *(*sizes, "--reserve-tokens=0", "--temperature=0.9", "--ignore-eos", "--json=-"),
        *("--host-blocks=15", "--preempt=storage", f"--storage=file://{tmp_path}/blocks"),
    ]


def test_generate_on_several_processes(directory, tmp_path, generate):
    """Each of one process and two computes what the other has stored no more."""

    def complete(num_processes: int) -> dict[str, Any]:
        lines = [[*MAIN, *generate]]
        with reserved_port() as port:
            if num_processes == 2:
                lines = of_processes(port, generate)
            with started(directory, lines) as processes:
                (status, output, errors), *others = ends_of(processes)
        assert (status, [each[:2] for each in others]) == (0, [(0, "")] * len(others)), errors
        results: dict[str, Any] = json.loads(output)
        stats = results["stats"]
        assert stats["num_devices"] == num_processes
        assert stats["scheduler"]["preemptions"] > 0
        return results

    for first, second in ((1, 2), (2, 1)):
        stored, loaded = complete(first), complete(second)
        assert stored["outputs"] == loaded["outputs"]
        assert stored["stats"]["storage"]["stored_bytes"] > 0
        hits = [each["stats"]["scheduler"]["storage_hit_tokens"] for each in (stored, loaded)]
        assert hits[0] == 0 < hits[1]
        shutil.rmtree(tmp_path / "blocks")


def test_generate_ends_when_a_process_is_killed(directory, generate):
    with reserved_port() as port:
        first, second = of_processes(port, generate)
        with started(directory, [first, ["-c", KILLED_MAIN, *second[2:]]]) as processes:
            (status, output, errors), follower = ends_of(processes)
    assert (status, output, follower[0]) == (1, "", KILLED), (errors, follower)
    assert errors.splitlines()[-1] == "radixkv: process 1 is lost: Host unreachable"


def test_generate_ends_when_a_process_has_no_model(directory, tmp_path, generate):
    with reserved_port() as port:
        first, second = of_processes(port, generate)
        second[second.index(str(directory))] = str(tmp_path / "none")
        with started(directory, [first, second]) as processes:
            (status, output, errors), follower = ends_of(processes)
    message = f"{tmp_path}/none"
    assert (status, output) == (1, ""), errors
    assert follower[:2] == (2, ""), follower
    reason = follower[2].splitlines()[-1].removeprefix("radixkv: ")
    assert message in reason
    assert errors.splitlines()[-1] == f"radixkv: process 1: {reason}"


@contextmanager
def served(directory: Path) -> Iterator[tuple[str, list[subprocess.Popen[str]]]]:
    """The URL of a server on two processes, and these."""
    sizes = ["--block-size=4", "--max-model-len=64", "--token-budget=8", "--max-running=4"]
    command = ["serve", str(directory), "--port=0", "--served-model-name=tiny", *sizes]
    with reserved_port() as port, started(directory, of_processes(port, command)) as processes:
        stderr = processes[0].stderr
        assert stderr is not None
        lines = []
        for line in stderr:
            lines.append(line)
            if found := re.fullmatch(r"radixkv: tiny is served at (http://\S+)\n", line):
                break
        else:
            raise AssertionError(f"not served: {lines}, {ends_of(processes)}")
        yield found[1], processes


def complete(url: str) -> list[int]:
    """The tokens of a completion."""
    fields = {"model": "tiny", "prompt": PROMPTS[0], "max_tokens": 8, "seed": 3}
    body = json.dumps(fields | {"ignore_eos": True, "return_token_ids": True}).encode()
    with urlopen(Request(f"{url}/completions", body), timeout=PATIENCE_S) as response:
        tokens: list[int] = json.load(response)["choices"][0]["token_ids"]
    return tokens


def test_serve_on_several_processes(directory):
    llm = LLM(directory, block_size=4, num_blocks=32, max_model_len=64, token_budget=8)
    params = GenerationParams(8, SamplingParams(temperature=1.0, seed=3), ignore_eos=True)
    [expected] = llm.generate([PROMPTS[0]], params)
    with served(directory) as (url, processes):
        assert complete(url) == list(expected.token_ids)
        processes[1].send_signal(signal.SIGTERM)  # ends it only with process 0
        assert complete(url) == list(expected.token_ids)
        processes[0].send_signal(signal.SIGTERM)
        (status, output, errors), follower = ends_of(processes)
    assert (status, output, follower[:2]) == (0, "", (0, "")), (errors, follower)


def test_serve_ends_when_a_process_is_killed(directory):
    with served(directory) as (url, processes):
        assert len(complete(url)) == 8
        processes[1].kill()
        (status, output, errors), _ = ends_of(processes)
    assert (status, output) == (1, ""), errors
    assert errors.splitlines()[-1] == "radixkv: process 1 is lost: Host unreachable"

"""A model that several processes share: the same tokens, and an end when one fails or differs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from radixkv.scheduler.models import make_tiny_checkpoint

from ..ports import reserved_port
from .on_processes import KILLED, LOST, make_engine, serve

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
    flags = f"--xla_force_host_platform_device_count={num_devices}"
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": flags,
        "JAX_COMPILATION_CACHE_DIR": str(directory.with_name("programs")),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    program = [sys.executable, "-m", "tests.end_to_end.on_processes"]
    with reserved_port() as port:
        processes = [
            subprocess.Popen(
                [*program, str(process), str(num_processes), str(port), str(directory), what],
                cwd=ROOT,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for process in range(num_processes)
        ]
        try:
            ended = [process.communicate(timeout=PATIENCE_S) for process in processes]
        finally:
            for process in processes:
                process.kill()
    return [(process.returncode, *texts) for process, texts in zip(processes, ended, strict=True)]


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

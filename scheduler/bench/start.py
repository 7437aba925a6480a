"""CPU time from the start of a process until its engine can serve, without and with a cache.

::

    cold   a new process, an empty compilation cache     starts, compiles every program, stores it
    warm   another one, with the cache of the first      starts, loads every program

The model has Llama 8B's shapes with a sixteenth of its width, and zeros as weights. The times are
those of whole processes with all their threads, with the import of JAX.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

_WIDTH: Final = 16
_CONFIG: Final[dict[str, Any]] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128_256 // _WIDTH,
    "hidden_size": 4096 // _WIDTH,
    "intermediate_size": 14_336 // _WIDTH,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128 // _WIDTH,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "rope_theta": 500_000.0,
}
_SIZES: Final[dict[str, Any]] = {
    "block_size": 16,
    "num_blocks": 256,
    "token_budget": 512,
    "max_running": 64,
    "max_model_len": 4096,
}
"""Defaults of the nodes, and the smallest cache for the longest request."""


def bench_start(num_layers: int) -> dict[str, Any]:
    """Start an engine in two processes, one after the other.

    Args:
        num_layers: Layers of the model.

    Returns:
        JSON-serialisable results: the sizes, `programs`, `cold_cpu_s` and `warm_cpu_s`.

    Raises:
        RuntimeError: A process failed; with its stderr.
    """
    with tempfile.TemporaryDirectory() as directory:
        programs, cold = _start(num_layers, directory)
        _, warm = _start(num_layers, directory)
    return {
        "layers": num_layers,
        **_SIZES,
        "programs": programs,
        "cold_cpu_s": cold,
        "warm_cpu_s": warm,
    }


def _start(num_layers: int, directory: str) -> tuple[int, float]:
    """Start one process; return its number of programs and its CPU time in seconds."""
    cache = {
        "JAX_COMPILATION_CACHE_DIR": directory,
        "JAX_ENABLE_COMPILATION_CACHE": "true",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    others = {
        name: value
        for name, value in os.environ.items()
        if not (name.startswith("JAX_") and "_CACHE" in name)  # of the user's own cache
    }
    before = _children_cpu_s()
    done = subprocess.run(
        [sys.executable, "-m", __name__, str(num_layers)],
        env={**others, **cache},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"the engine did not start: {done.stderr.strip()}")
    return json.loads(done.stdout), _children_cpu_s() - before


def _children_cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _make_engine(num_layers: int) -> None:
    """Make an engine, and print the number of its programs."""
    # Here, because the process that measures needs none of it.
    import jax
    import numpy as np

    from ..engine import Engine
    from ..models import Model
    from ..models.checkpoint import build_params, tensor_shapes
    from ..models.config import parse_config

    config = parse_config({**_CONFIG, "num_hidden_layers": num_layers}, Path("config.json"))
    shapes = tensor_shapes(config)
    params = build_params(config, lambda name: jax.device_put(np.zeros(shapes[name], np.float32)))
    print(Engine(Model(config, params), **_SIZES).stats().compilations_at_warm_up)


if __name__ == "__main__":
    _make_engine(int(sys.argv[1]))

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from radixkv.scheduler.models import Batch, Model, forward, load_model, make_tiny_checkpoint

BLOCK_SIZE = 16
TABLE_WIDTH = 24  # blocks of a request: 384 tokens
TOKEN_BUCKETS = (64, 384)
GOLDENS: dict[str, Any] = json.loads(
    (Path(__file__).parents[2] / "goldens" / "models.json").read_text(encoding="utf-8")
)

_step = jax.jit(forward, static_argnums=0, static_argnames="decode", donate_argnums=(3, 4))


class Runner:
    """A minimal engine for `forward`: fixed rows, each with its own blocks."""

    def __init__(self, model: Model, *, num_rows: int = 1) -> None:
        config = model.config
        num_blocks = num_rows * TABLE_WIDTH
        shape = (num_blocks + 1, config.num_kv_heads, BLOCK_SIZE, config.head_dim)
        dtype = model.params.embedding.dtype
        self.model = model
        self.num_rows = num_rows
        # Finite garbage: reads before writes must show in the logits.
        self.k_pools = tuple(jnp.full(shape, 7.0, dtype) for _ in range(config.num_layers))
        self.v_pools = tuple(jnp.full(shape, 7.0, dtype) for _ in range(config.num_layers))
        blocks = np.random.RandomState(0).permutation(num_blocks).astype(np.int32) + 1
        self.tables = blocks.reshape(num_rows, TABLE_WIDTH)
        self.computed = np.zeros(num_rows, np.int32)

    def step(
        self, chunks: dict[int, list[int]], *, decode: bool = False, masked: int = 0
    ) -> np.ndarray:
        """Append a chunk to each given row; return logits `[num_rows, vocab]`.

        The first `masked` positions of a row keep the KV that they have.
        """
        total = self.num_rows if decode else sum(len(chunk) for chunk in chunks.values())
        bucket = total if decode else min(size for size in TOKEN_BUCKETS if size >= total)
        flat = np.zeros((3, bucket), np.int32)
        flat[2] = -1
        rows = np.zeros((4, self.num_rows), np.int32)
        start = 0
        for row, chunk in chunks.items():
            start = row if decode else start
            stop = start + len(chunk)
            positions = self.computed[row] + np.arange(len(chunk))
            slots = self.tables[row, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
            slots = np.where(positions < masked, -1, slots)
            flat[:, start:stop] = chunk, positions, slots
            self.computed[row] += len(chunk)
            rows[:, row] = self.computed[row], len(chunk), start, stop - 1
            start = stop
        arrays = (*flat, self.tables, *rows)
        batch = Batch(*(jnp.asarray(array, jnp.int32) for array in arrays))
        logits, self.k_pools, self.v_pools = _step(
            self.model.config, self.model.params, batch, self.k_pools, self.v_pools, decode=decode
        )
        return np.asarray(logits)

    def prefill(self, prompt: list[int], *, chunk: int, row: int = 0) -> np.ndarray:
        """Compute a prompt in chunks; return the logits `[vocab]` of its last token."""
        for start in range(0, len(prompt), chunk):
            logits = self.step({row: prompt[start : start + chunk]})
        return logits[row]

    def decode_greedily(self, logits: np.ndarray, num_tokens: int, row: int = 0) -> list[int]:
        """Continue a row from the logits of its last token."""
        tokens = [int(logits.argmax())]
        while len(tokens) < num_tokens:
            tokens.append(int(self.step({row: tokens[-1:]}, decode=True)[row].argmax()))
        return tokens


@pytest.fixture(scope="session")
def goldens() -> dict[str, Any]:
    return GOLDENS


@pytest.fixture
def make_runner() -> Callable[..., Runner]:
    return Runner


@pytest.fixture(scope="session")
def golden_directory(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @functools.cache
    def make(case: str) -> Path:
        golden = GOLDENS["cases"][case]
        directory = tmp_path_factory.mktemp(case)
        make_tiny_checkpoint(
            directory, golden["family"], golden["seed"], overrides=golden["overrides"]
        )
        return directory

    return make


@pytest.fixture(scope="session")
def golden_model(golden_directory: Callable[[str], Path]) -> Callable[[str], Model]:
    return functools.cache(lambda case: load_model(golden_directory(case)))

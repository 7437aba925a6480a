"""Decode steps of an engine: tokens per second, and the time that the device waits for the host.

The weights are random and made on the device. The gap is the difference of two times per step::

    engine           plan | dispatch ... read | plan | dispatch ...      as users run it
    back to back     the program of its last step, again and again       no host between
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .absent import AbsentError
from .problems import ModelSizes, Record

BLOCK_SIZE = 64


def random_model_shapes(entries: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors of `random_model`."""
    from radixkv.scheduler.models.checkpoint import tensor_shapes
    from radixkv.scheduler.models.config import parse_config

    return tensor_shapes(parse_config(entries, Path("config.json")))


def random_model(entries: dict[str, Any]) -> Any:
    """A model in bfloat16 of the shapes that the entries of a config.json give."""
    from radixkv.scheduler.models import Model
    from radixkv.scheduler.models.checkpoint import build_params
    from radixkv.scheduler.models.config import parse_config

    config = parse_config(entries, Path("config.json"))
    shapes = random_model_shapes(entries)
    keys = dict(zip(shapes, jax.random.split(jax.random.key(0), len(shapes)), strict=True))

    def read(name: str) -> jax.Array:
        if name.endswith("norm.weight"):
            return jnp.ones(shapes[name], jnp.bfloat16)
        return _normal(keys[name], shapes[name])

    return Model(config, build_params(config, read))


@jax.jit
def _scaled(values: jax.Array) -> jax.Array:
    return values * jnp.bfloat16(0.02)


def _normal(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    scaled: jax.Array = _scaled(jax.random.normal(key, shape, jnp.bfloat16))
    return scaled


def model(sizes: ModelSizes, start_clock: Any) -> Iterator[Record]:
    """Measure decode steps of an engine with all its rows running."""
    try:
        from radixkv.scheduler import Request
        from radixkv.scheduler.engine import Engine
    except ImportError as missing:
        raise AbsentError(f"{missing.name} is not installed") from None

    budget = 4 * sizes.rows
    # The first rows decode while the prompts of the others are computed.
    first_steps = math.ceil(sizes.rows * sizes.prompt_tokens / (budget - sizes.rows)) + sizes.rows
    new_tokens = first_steps + sizes.steps
    length = sizes.prompt_tokens + new_tokens
    engine = Engine(
        random_model(sizes.config),
        block_size=BLOCK_SIZE,
        num_blocks=sizes.rows * (1 + math.ceil(length / BLOCK_SIZE)),
        token_budget=budget,  # a small one: few programs to compile
        max_running=sizes.rows,
        max_model_len=length,
        prefix_cache=False,
        reserve_tokens=None,
    )
    start_clock()
    rng = np.random.default_rng(0)
    names = [str(row) for row in range(sizes.rows)]
    for name in names:
        prompt = rng.integers(0, sizes.config["vocab_size"], sizes.prompt_tokens).tolist()
        engine.add_request(Request(name, prompt, new_tokens))

    def tokens() -> list[int]:
        return [len(request.output_tokens) for request in engine.scheduler.running]

    while len(tokens()) < sizes.rows or min(tokens()) < 3:
        engine.step()
    programs = engine._runner._programs
    calls: list[Any] = []
    run = programs.run

    def recording(*arguments: Any, **named: Any) -> Any:
        calls[:] = [arguments]
        return run(*arguments, **named)

    programs.run = recording
    before, begin = sum(tokens()), time.perf_counter()
    for _ in range(sizes.steps):
        engine.step()
    took, made = time.perf_counter() - begin, sum(tokens()) - before
    shape, params, packed, _, arrays = calls[0]
    for name in names:
        engine.abort(name)
    engine.run()
    stats = engine.stats()
    assert shape.is_decode, shape
    assert not stats.compilations_after_warm_up, stats
    yield {
        "model": f"{stats.dtype}, {sizes.config['num_hidden_layers']} layers,"
        f" {sizes.rows} rows of {sizes.prompt_tokens} tokens, {stats.attention_backend}",
        "tokens_per_s": made / took,
        "step_s": took / sizes.steps,
        "alone_s": _back_to_back(sizes, engine, run, shape, params, packed, arrays),
    }


def _back_to_back(
    sizes: ModelSizes, engine: Any, run: Any, shape: Any, params: Any, packed: Any, arrays: Any
) -> float:
    """Seconds of a step when the host only dispatches the same one again and again."""
    state = engine._runner._batch.state
    rounds = []
    for _ in range(2):  # the first is a warm-up
        begin = time.perf_counter()
        for _ in range(sizes.steps):
            tokens, _, state = run(shape, params, packed, state, arrays)
        jax.block_until_ready(tokens)
        rounds.append((time.perf_counter() - begin) / sizes.steps)
    engine._runner._batch.state = state
    return rounds[-1]

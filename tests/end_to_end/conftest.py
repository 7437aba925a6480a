"""Tiny models, and engines that share their compiled programs."""

from __future__ import annotations

import copy
import functools
import json
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from radixkv.kvcache import BlockArrays, CacheManager, EventBatch, HostConfig
from radixkv.kvcache.storage import Storage, StorageNamespace
from radixkv.scheduler.engine import Engine, ModelRunner
from radixkv.scheduler.engine.batch_state import DeviceBatch
from radixkv.scheduler.engine.tier_copies import TierCopies
from radixkv.scheduler.mixed import MixedScheduler
from radixkv.scheduler.models import Model, load_model, make_tiny_checkpoint
from radixkv.scheduler.models.tensor_parallel import pool_sharding, whole
from radixkv.scheduler.request import GREEDY, Request, SamplingParams

from .small import make_engine, make_requests

NUM_BLOCKS = 160
TOKEN_BUDGET = 32
MAX_RUNNING = 4
MAX_MODEL_LEN = 384
SIZES: dict[str, Any] = {
    "num_blocks": NUM_BLOCKS,
    "token_budget": TOKEN_BUDGET,
    "max_running": MAX_RUNNING,
    "max_model_len": MAX_MODEL_LEN,
}
"""An engine of these sizes finds its programs in JAX's cache."""


@pytest.fixture(scope="session")
def goldens() -> dict[str, Any]:
    path = Path(__file__).parents[1] / "goldens" / "models.json"
    return json.loads(path.read_text(encoding="utf-8"))["cases"]


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @functools.cache
    def make(family: Any) -> Path:
        directory = tmp_path_factory.mktemp(family)
        make_tiny_checkpoint(directory, family)
        return directory

    return make


@pytest.fixture(scope="session")
def model(model_dir: Callable[[str], Path]) -> Callable[[str], Model]:
    return functools.cache(lambda family: load_model(model_dir(family)))


@pytest.fixture(scope="session")
def engine(model: Callable[[str], Model]) -> Callable[[str, int], Engine]:
    """An engine that has compiled its programs; each is made once."""

    @functools.cache
    def make(family: str, block_size: int) -> Engine:
        return Engine(model(family), block_size=block_size, **SIZES)

    return make


@pytest.fixture
def llama(engine: Callable[[str, int], Engine]) -> Engine:
    """The engine that most tests of nodes use: to compile another takes ten seconds."""
    return engine("llama", 4)


@pytest.fixture(scope="session")
def small_outputs(model: Callable[[str], Model]) -> list[list[int]]:
    """What one engine, and one request at a time, generates from the prompts of `small`."""
    engine = make_engine(model("qwen3"))
    requests = make_requests()
    for request in requests:
        engine.add_request(request)
        engine.run()
    return [list(request.output_tokens) for request in requests]


def fresh(
    engine: Engine,
    *,
    num_blocks: int | None = None,
    host: HostConfig | None = None,
    storage: Storage | None = None,
    storage_namespace: StorageNamespace | None = None,
    on_events: Callable[[EventBatch], object] | None = None,
    **options: Any,
) -> Engine:
    """Return an engine with the same programs and other options, and pools full of NaN.

    Compiling is nearly all of an engine's time in these tests. NaN is what a pool may hold on a
    device: one that is read before it is written, even times zero, shows in every later token.

    Args:
        engine: whose programs to use.
        num_blocks: usable blocks, at most those of the arrays.
        host, storage, storage_namespace, on_events: of `Engine`.
        options: of `MixedScheduler`.
    """
    manager = engine.manager
    num_blocks = manager.num_blocks if num_blocks is None else num_blocks
    assert num_blocks <= manager.num_blocks
    other = copy.copy(engine)
    other.manager = CacheManager(
        num_blocks,
        manager.block_size,
        host=host,
        storage=storage_namespace,
        record_events=on_events is not None,
    )
    other._on_events = on_events
    options = {"token_budget": TOKEN_BUDGET, "max_running": MAX_RUNNING, "depth": 2} | options
    other.scheduler = MixedScheduler(other.manager, **options)
    other._in_flight, other._finished, other._advanced = deque(), [], []
    other._runner = fresh_runner(engine._runner, other.manager, storage)
    return other


def fresh_runner(
    runner: ModelRunner, manager: CacheManager, storage: Storage | None = None
) -> ModelRunner:
    """Return a runner with the same programs over another manager, and pools full of NaN."""
    other = copy.copy(runner)
    other.manager = manager
    shapes, mesh = jax.eval_shape(lambda: runner.arrays.keys), runner.model.mesh
    on_devices: Any = {"device": pool_sharding(mesh)}
    other.arrays = BlockArrays(
        tuple(jnp.full(pool.shape, jnp.nan, pool.dtype, **on_devices) for pool in shapes),
        tuple(jnp.full(pool.shape, jnp.nan, pool.dtype, **on_devices) for pool in shapes),
    )
    other._batch = DeviceBatch(runner._batch.num_slots, runner._batch.width, whole(mesh))
    other._adjustments = copy.copy(runner._adjustments)
    other._adjustments._counts = None  # those of the slots of one runner
    tiers = manager.tiers
    other._tiers = None if tiers is None else TierCopies(tiers, other.arrays, storage)
    other._results = deque()
    other._steps = other._padding_tokens = other._late_compilations = 0
    return other


def let_copies_end(runner: ModelRunner) -> None:
    """Wait for all that is under way between the tiers, and for what follows from it."""
    tiers = runner.manager.tiers
    while tiers is not None and tiers.num_open_operations:
        assert runner._tiers is not None
        runner.dispatch()
        runner._tiers.wait()
        runner.collect()


def complete(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    samplings: Sequence[SamplingParams] = (GREEDY,),
) -> list[list[int]]:
    """Complete all prompts at once; the pool must be whole afterwards."""
    requests = [
        Request(str(i), prompt, max_new_tokens, sampling=samplings[i % len(samplings)])
        for i, prompt in enumerate(prompts)
    ]
    for request in requests:
        engine.add_request(request)
    finished = engine.run()
    assert sorted(map(id, finished)) == sorted(map(id, requests))
    assert_nothing_leaked(engine)
    return [request.output_tokens for request in requests]


def assert_nothing_leaked(engine: Engine) -> None:
    """No request is left, and every block is free or evictable."""
    assert not engine.has_work
    engine.manager.check()
    cache = engine.stats().cache
    assert cache.live_leases == cache.private_blocks == 0
    assert cache.free_blocks + cache.idle_blocks == cache.num_blocks

"""The programs of an engine: layer by layer or as one, their number, and how they are compiled."""

from __future__ import annotations

import functools
import itertools
import logging
import os
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import pytest

from radixkv.kernels.backends import TargetDevice
from radixkv.kvcache import CacheManager
from radixkv.scheduler.engine import Engine, ModelRunner, model_runner, programs
from radixkv.scheduler.models import Model, load_model, make_tiny_checkpoint
from radixkv.scheduler.request import GREEDY, SamplingParams

from ..kernels.lowering import H100, on_h100
from .conftest import complete, fresh

PROMPTS = [[5 + i, *range(40, 40 + 7 * i)] for i in range(6)]
SAMPLED = (GREEDY, SamplingParams(temperature=0.9, seed=1), SamplingParams(temperature=1.3, seed=2))
SIZES: dict[str, Any] = {
    "block_size": 4,
    "num_blocks": 160,
    "token_budget": 32,
    "max_running": 4,
    "max_model_len": 384,
}


@pytest.fixture(scope="module")
def by_layer(model: Callable[[str], Model]) -> Callable[[str], Engine]:
    """The engines of the other tests, as if their models had many layers."""

    @functools.cache
    def make(family: str) -> Engine:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(programs, "_MOST_UNROLLED_LAYERS", 1)
            return Engine(model(family), **SIZES)

    return make


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_layer_by_layer_gives_the_same_tokens(engine, by_layer, family):
    for samplings in ((GREEDY,), SAMPLED):
        expected = complete(fresh(engine(family, 4)), PROMPTS, 8, samplings)
        serving = fresh(by_layer(family))
        assert complete(serving, PROMPTS, 8, samplings) == expected
        assert serving.stats().compilations_after_warm_up == 0


def test_layer_by_layer_writes_in_place(by_layer):
    serving = fresh(by_layer("llama"))
    arrays = serving._runner.arrays
    places = [pool.unsafe_buffer_pointer() for pool in (*arrays.keys, *arrays.values)]
    complete(serving, PROMPTS, 4, SAMPLED)
    after = [*arrays.keys, *arrays.values]
    assert [pool.unsafe_buffer_pointer() for pool in after] == places


@pytest.mark.parametrize("num_layers", [1, 5], ids=["unrolled", "layer by layer"])
def test_no_step_copies_a_pool_of_bfloat16(tmp_path, num_layers):
    make_tiny_checkpoint(tmp_path, overrides={"num_hidden_layers": num_layers})
    sizes = {**SIZES, "num_blocks": 2**14}
    runner = Engine(load_model(tmp_path, "bfloat16"), **sizes)._runner
    pool = runner.arrays.keys[0]
    assert pool.dtype.name == "bfloat16"
    compiled = runner._programs._programs.values()
    analyses: list[Any] = [each.memory_analysis() for each in compiled]
    assert max(each.temp_size_in_bytes for each in analyses) < pool.nbytes / 2


@pytest.mark.parametrize(("num_layers", "is_by_layer"), [(4, False), (5, True)])
def test_a_cpu_runs_deep_models_layer_by_layer(tmp_path, caplog, num_layers, is_by_layer):
    """The number of programs does not depend on how deep they are."""
    make_tiny_checkpoint(tmp_path, overrides={"num_hidden_layers": num_layers})
    model = load_model(tmp_path)
    with caplog.at_level(logging.INFO, "radixkv.scheduler.engine"):
        serving = Engine(model, **SIZES)
    number = 3 * 3 + 1 if is_by_layer else 3 + 1  # per shape, and the one that draws
    assert [record.getMessage() for record in caplog.records] == [
        f"compiling {place} of {number} programs" for place in range(1, number + 1)
    ]
    # The one that draws, and another one that sends a request, may be another engine's.
    assert number - 1 <= serving.stats().compilations_at_warm_up <= number + 1
    assert len(complete(serving, PROMPTS, 2, SAMPLED)) == len(PROMPTS)
    assert serving.stats().compilations_after_warm_up == 0


def test_accelerators_run_all_layers_at_once(model, monkeypatch):
    device = TargetDevice("NVIDIA H200", "9.0", 132, "gpu")
    monkeypatch.setattr(programs, "target_device", lambda: device)
    monkeypatch.setattr(programs, "_MOST_UNROLLED_LAYERS", 1)
    lowered: list[object] = []
    monkeypatch.setattr(programs, "_compile", lambda lowerings: lowered.extend(lowerings))
    Engine(model("llama"), **SIZES)
    assert len(lowered) == 4 and not any(isinstance(key, tuple) for key in lowered)


def test_accelerators_run_a_program_per_size_of_a_group(tmp_path, monkeypatch):
    device = TargetDevice("NVIDIA H200", "9.0", 132, "gpu")
    monkeypatch.setattr(programs, "target_device", lambda: device)
    lowered: list[Any] = []
    monkeypatch.setattr(programs, "_compile", lambda lowerings: lowered.extend(lowerings))
    make_tiny_checkpoint(tmp_path, overrides={"num_hidden_layers": 3})
    sizes: dict[str, Any] = {"token_budget": 16, "max_running": 2, "max_model_len": 64}
    manager = CacheManager(16, 4)
    ModelRunner(load_model(tmp_path), manager, decode=False, num_groups=2, **sizes)
    *steps, draw = lowered
    assert [(key[0], *key[2:]) for key in steps] == [
        ("layers", 1),
        ("layers", 2),
        ("head",),
        ("embed",),
    ]
    assert draw == "draw"


@pytest.mark.parametrize(("dtype", "head_dim"), [("float32", 64), ("bfloat16", 96)])
def test_an_h100_runs_the_backend_that_is_reported(tmp_path, dtype, head_dim, monkeypatch):
    """Attention kernels are in the programs for it exactly if the report says so."""
    monkeypatch.setattr(programs, "_compile", lambda lowerings: {})  # those of this machine
    heads = {"num_attention_heads": 4, "head_dim": head_dim, "num_hidden_layers": 1}
    make_tiny_checkpoint(tmp_path, overrides=heads)
    runner = Engine(load_model(tmp_path, dtype), **{**SIZES, "block_size": 16})._runner
    model, arrays, kernels = runner.model, runner.arrays, {}
    state, logits = runner._batch.state, runner._programs.logits
    with on_h100(), warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        attention = model_runner._choose_attention(model, arrays, 32, 4)
        for shape in (runner._shapes.decode[-1], runner._shapes.extend[-1]):
            given = model.params, programs._empty(shape), state, logits, arrays.keys, arrays.values
            traced = programs._step.trace(model.config, None, shape, 16, *given)
            text = traced.lower(lowering_platforms=("cuda",)).as_text()
            kernels[shape.is_decode] = text.count("mosaic_gpu_v2")
    assert len(warned) == (attention.backend == "xla")
    if dtype == "float32":  # only `kv_write`
        assert attention == ("xla", "mosaic needs q of bfloat16 or float16, got float32")
        assert kernels == {True: 1, False: 1}
    else:
        assert attention == ("mosaic", f"{H100.device_kind} runs mosaic with bfloat16")
        assert kernels == {True: 3, False: 3}  # attention, the merge of its parts, `kv_write`


class _Lowered:
    """What compiles when it is told to, or fails."""

    def __init__(self, error: Exception | None, may_end: threading.Event) -> None:
        self._error = error
        self._may_end = may_end

    def compile(self, compiler_options: dict[str, str | bool] | None) -> str:
        if self._error is not None:
            raise self._error
        assert self._may_end.wait(60.0)
        return "compiled"


def test_a_compilation_that_fails_ends_the_others(monkeypatch):
    """Those that have begun end; the rest are not begun."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    may_end, error = threading.Event(), MemoryError("too large")
    may_end.set()
    begun = itertools.count()

    def lower(each: Exception | None) -> Any:
        next(begun)
        return _Lowered(each, may_end)

    threads = set(threading.enumerate())
    with pytest.raises(MemoryError, match="too large"):
        programs._compile({key: functools.partial(lower, error) for key in range(3)})
    with pytest.raises(jax.errors.JaxRuntimeError):
        programs._compile({0: functools.partial(_raise, jax.errors.JaxRuntimeError("no"))})
    assert set(threading.enumerate()) <= threads  # others may have ended
    assert next(begun) == 3


def _raise(error: Exception) -> Any:
    raise error


def test_programs_are_compiled_in_parallel(monkeypatch):
    """The first ends only when the second has begun."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    second = threading.Event()

    class Second:
        def compile(self, compiler_options: dict[str, str | bool] | None) -> str:
            second.set()
            return "second"

    lowerings: Any = {1: lambda: _Lowered(None, second), 2: Second}
    compiled: Any = programs._compile(lowerings)
    assert compiled == {1: "compiled", 2: "second"}


def test_programs_that_wait_are_not_compiled_after_one_has_failed(monkeypatch):
    is_shut_down, compiled = threading.Event(), list[int]()

    class Pool(ThreadPoolExecutor):
        def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
            super().shutdown(wait=False, cancel_futures=cancel_futures)
            is_shut_down.set()
            super().shutdown(wait=wait)

    class Program:
        def __init__(self, number: int) -> None:
            self.number = number

        def compile(self, options: Any) -> None:
            compiled.append(self.number)
            if self.number == 0:
                raise ZeroDivisionError
            assert is_shut_down.wait(60)

    monkeypatch.setattr(programs, "ThreadPoolExecutor", Pool)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0})
    lowerings: Any = {number: functools.partial(Program, number) for number in range(5)}
    with pytest.raises(ZeroDivisionError):
        programs._compile(lowerings)
    assert compiled in ([0], [0, 1])

"""Errors of the engine by their text; the engine continues to serve."""

import re
import warnings
from contextlib import closing
from typing import Any

import jax
import numpy as np
import pytest

from radixkv.kernels import backends
from radixkv.kernels.backends import TargetDevice
from radixkv.kvcache import CountError, NamespaceError, RadixKVError, RequestTooLargeError
from radixkv.scheduler.engine import Engine, model_runner, programs
from radixkv.scheduler.errors import ConfigError, RequestError
from radixkv.scheduler.handoff import Timing
from radixkv.scheduler.nodes import DecodeEngine, PrefillEngine
from radixkv.scheduler.nodes.transport import InProcessExchange, InProcessTransport
from radixkv.scheduler.policy import Fcfs, Priority
from radixkv.scheduler.request import Request

from .conftest import MAX_MODEL_LEN, MAX_RUNNING, NUM_BLOCKS, TOKEN_BUDGET, complete, fresh

SIZES: dict[str, Any] = {
    "block_size": 16,
    "num_blocks": NUM_BLOCKS,
    "token_budget": TOKEN_BUDGET,
    "max_running": MAX_RUNNING,
    "max_model_len": MAX_MODEL_LEN,
}
NO_POLICY = "policy must be an object with a method `order`, such as Fcfs() or Priority(), got "


def refused(error: type[RadixKVError], text: str):
    return pytest.raises(error, match=f"^{re.escape(text)}$")


@pytest.mark.parametrize(
    ("prompt", "new", "error", "text"),
    [
        (
            [5, 1024, 2000],
            1,
            RequestError,
            "request 'a': token 1024 at position 1 is outside the vocabulary of 1024",
        ),
        (
            [-1],
            1,
            RequestError,
            "request 'a': token -1 at position 0 is outside the vocabulary of 1024",
        ),
        (
            [5] * 380,
            5,
            RequestError,
            "request 'a': 380 prompt tokens and 5 new ones are more than max_model_len 384",
        ),
        ([5] * 81, 1, RequestTooLargeError, "81 tokens need 21 blocks, but the pool has 20"),
    ],
)
def test_requests_that_cannot_run_are_refused(engine, prompt, new, error, text):
    serving = fresh(engine("llama", 4), num_blocks=20)
    with refused(error, text):
        serving.add_request(Request("a", prompt, new))
    assert not serving.has_work
    complete(serving, [[0, 1023], [5] * 80], 1)


def test_a_request_of_the_greatest_length_runs(engine):
    (tokens,) = complete(fresh(engine("llama", 4)), [[5] * (MAX_MODEL_LEN - 2)], 2)
    assert len(tokens) == 2


def test_a_live_id_is_refused(engine):
    serving = fresh(engine("llama", 4))
    serving.add_request(Request("a", [1], 1))
    with refused(RequestError, "request 'a' is already active"):
        serving.add_request(Request("a", [2], 1))
    assert len(serving.run()) == 1


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        (
            {"max_model_len": 8193},
            ConfigError,
            "max_model_len must be at most the model's 8192 positions, got 8193",
        ),
        ({"max_model_len": 0}, CountError, "max_model_len must be at least 1, got 0"),
        ({"max_model_len": "64"}, CountError, "max_model_len must be an integer, got '64'"),
        (
            {"max_running": 33},
            ConfigError,
            "max_running must be at most token_budget 32, got 33",
        ),
        ({"token_budget": 16.0}, CountError, "token_budget must be an integer, got 16.0"),
        ({"num_blocks": 0}, CountError, "num_blocks must be at least 1, got 0"),
        ({"block_size": 0}, CountError, "block_size must be at least 1, got 0"),
        ({"block_size": "16"}, CountError, "block_size must be an integer, got '16'"),
        ({"reserve_tokens": -1}, CountError, "reserve_tokens must be at least 0, got -1"),
        ({"reserve_tokens": "none"}, CountError, "reserve_tokens must be an integer, got 'none'"),
        ({"policy": "fcfs"}, ConfigError, f"{NO_POLICY}'fcfs'"),
        ({"policy": Priority}, ConfigError, f"{NO_POLICY}{Priority!r}"),
    ],
)
def test_options_that_cannot_work_are_refused(model, options, error, text):
    with refused(error, text):
        Engine(model("llama"), **{**SIZES, **options})


@pytest.mark.parametrize(
    ("node", "options", "error", "text"),
    [
        (
            PrefillEngine,
            {"num_blocks": "64"},
            CountError,
            "num_blocks must be an integer, got '64'",
        ),
        (
            PrefillEngine,
            {"max_offered_bytes": 0},
            CountError,
            "max_offered_bytes must be at least 1, got 0",
        ),
        (DecodeEngine, {"max_running": 4.0}, CountError, "max_running must be an integer, got 4.0"),
        (PrefillEngine, {"policy": Fcfs}, ConfigError, f"{NO_POLICY}{Fcfs!r}"),
        (DecodeEngine, {"policy": "priority"}, ConfigError, f"{NO_POLICY}'priority'"),
    ],
)
def test_nodes_refuse_them_too(model, node, options, error, text):
    life = {"epoch": 1, "now": 0.0, "timing": Timing()}
    with closing(InProcessTransport(InProcessExchange())) as transport, refused(error, text):
        node(model("llama"), transport, **{**life, **SIZES, **options})


@pytest.mark.parametrize(
    "device",
    [
        TargetDevice("NVIDIA A100", "8.0", 108, "gpu"),
        TargetDevice("AMD Instinct MI300X", None, 304, "gpu"),
    ],
)
def test_a_gpu_without_a_kernel_of_attention_gets_one_warning(model, monkeypatch, device):
    for module in (backends, model_runner):
        monkeypatch.setattr(module, "target_device", lambda: device)
    monkeypatch.setattr(programs, "_compile", lambda lowerings: {})  # for this machine
    reason = f"mosaic needs an NVIDIA GPU of compute capability 9.0, got {device.name}"
    with pytest.warns(UserWarning) as caught:
        serving = Engine(model("llama"), **SIZES)
    assert [str(each.message) for each in caught] == [
        f"{device.name} computes attention by XLA, without a kernel made for it: {reason}"
    ]
    assert caught[0].filename == __file__
    stats = serving.stats()
    assert (stats.attention_backend, stats.attention_reason) == ("xla", reason)


def test_a_cpu_gets_no_warning(model, monkeypatch):
    monkeypatch.setattr(programs, "_compile", lambda lowerings: {})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Engine(model("llama"), **SIZES).stats().attention_backend == "xla"


def test_a_reset_that_is_refused_changes_nothing(engine):
    serving = fresh(engine("llama", 4), depth=2)
    request = Request("reset", [1, 2, 3], 4)
    serving.add_request(request)
    serving.step()  # it is in flight
    before = request.num_scheduled, request.output_tokens[:], serving.stats()
    keep: Any = b"a namespace"
    with refused(NamespaceError, "keep must be a list of namespaces, each of them bytes"):
        serving.reset_cache(keep)
    assert (request.num_scheduled, request.output_tokens, serving.stats()) == before
    assert serving.run() == [request]


OTHER_WEIGHTS = {
    "half as wide": lambda leaf: leaf.astype(np.float16),
    "twice as wide": lambda leaf: leaf.astype(np.float64),
    "integers": lambda leaf: leaf.astype(np.int32),
    "shorter": lambda leaf: leaf[1:],
    "of another rank": lambda leaf: leaf[None],
    "left out": lambda leaf: None,
}


@pytest.mark.parametrize("how", OTHER_WEIGHTS)
def test_weights_of_which_one_array_is_another_change_nothing(engine, model, how):
    serving, params = fresh(engine("llama", 4), depth=2), model("llama").params
    request = Request("new weights", [1, 2, 3], 4)
    serving.add_request(request)
    serving.step()  # it is in flight
    before = request.num_scheduled, request.output_tokens[:], serving.stats()
    leaves, structure = jax.tree.flatten(params)
    for index, leaf in enumerate(leaves):
        others = [*leaves]
        others[index] = OTHER_WEIGHTS[how](np.asarray(leaf))
        with refused(
            ConfigError, "params must have the same shapes and dtypes as those of the model"
        ):
            serving.reset_cache(params=jax.tree.unflatten(structure, others))
    assert len(leaves) > 10
    assert (request.num_scheduled, request.output_tokens, serving.stats()) == before
    assert serving._runner.model.params is params
    assert serving.run() == [request]

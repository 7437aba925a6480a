"""Numbers that a caller gets who names none: each is a decision, which a change makes anew."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from radixkv.kvcache import HostConfig, TierDriver
from radixkv.kvcache.storage import FileBackend, StorageNamespace, StorageWorkers
from radixkv.kvcache.storage.mooncake.backend import MooncakeBackend
from radixkv.kvcache.storage.object_storage.backend import s3_store
from radixkv.kvcache.storage.redis import RedisAddress, RedisBackend
from radixkv.scheduler.decode import DecodeScheduler
from radixkv.scheduler.engine import Engine
from radixkv.scheduler.fairness import AdmissionFairness
from radixkv.scheduler.mixed import MixedScheduler
from radixkv.scheduler.models.rope import RopeConfig
from radixkv.scheduler.prefill import PrefillScheduler
from radixkv.scheduler.request import Request, SamplingParams

DEFAULTS: list[tuple[Any, dict[str, Any]]] = [
    (HostConfig, {"write": None, "hits": 0}),
    (TierDriver, {"max_bytes_in_flight": 2**30, "max_blocks_per_copy": 32, "num_threads": 2}),
    (TierDriver.close, {"timeout_s": 5.0}),
    (StorageWorkers, {"num_threads": 4}),
    (StorageWorkers.close, {"timeout_s": 5.0}),
    (StorageNamespace, {"tp_rank": 0, "tp_size": 1, "layout": "kv,layer,head,token,dim"}),
    (FileBackend, {"sync": "none"}),
    (RedisBackend, {"prefix": "radixkv:", "ttl_s": None, "timeout_s": 1.0}),
    (RedisBackend, {"connect_timeout_s": 1.0, "ca_file": None}),
    (RedisAddress, {"host": "localhost", "port": 6379, "db": 0, "tls": False}),
    (MooncakeBackend, {"port": 50051, "timeout_s": 1.0, "connect_timeout_s": 5.0}),
    (s3_store, {"timeout_s": 5.0, "connect_timeout_s": 1.0}),
    (MixedScheduler, {"reserve_tokens": 512, "preempt": "recompute", "depth": 1, "policy": None}),
    (DecodeScheduler, {"reserve_tokens": 512, "preempt": "recompute", "depth": 1, "policy": None}),
    (PrefillScheduler, {"policy": None}),
    (Engine, {"reserve_tokens": 512, "preempt": "recompute", "depth": 2, "prefix_cache": True}),
    (Engine.close, {"timeout_s": 30.0}),
    (AdmissionFairness, {"max_overtaken": 256}),
    (Request, {"priority": 0, "stop_token_ids": (), "namespace": b"", "logprobs": None}),
    (SamplingParams, {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "seed": 0, "min_p": 0.0}),
    (SamplingParams, {"repetition_penalty": 1.0, "presence_penalty": 0.0, "min_tokens": 0}),
    (RopeConfig, {"theta": 1e4, "kind": "default", "factor": 1.0, "high_freq_factor": 4.0}),
]


@pytest.mark.parametrize(
    ("function", "defaults"),
    DEFAULTS,
    ids=[f"{function.__qualname__}-{next(iter(values))}" for function, values in DEFAULTS],
)
def test_what_is_chosen_for_a_caller(function: Any, defaults: dict[str, Any]) -> None:
    parameters = inspect.signature(function).parameters
    assert {name: parameters[name].default for name in defaults} == defaults

"""Default sizes of an engine."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.kvcache import CountError
from radixkv.scheduler import ConfigError
from radixkv.scheduler.models import ModelConfig, load_config, make_tiny_checkpoint
from radixkv.scheduler.serving import sizes
from radixkv.scheduler.serving.sizes import (
    DeviceMemory,
    EngineSizes,
    choose_sizes,
    device_memory,
    least_memory,
    machine_memory,
    sizes_of_process_0,
)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    directory = tmp_path_factory.mktemp("model")
    make_tiny_checkpoint(directory)
    return load_config(directory)


PER_TOKEN = 2 * 2 * 2 * 16 * 4
"""Bytes of a token of the tiny model in float32: keys and values, layers, heads, dimensions."""


@given(
    platform=st.sampled_from(["cpu", "gpu"]),
    num_bytes=st.integers(1, 2**38),
    used_bytes=st.integers(0, 2**34),
    fraction=st.none() | st.floats(0.01, 1),
    block_size=st.integers(1, 256),
    max_running=st.none() | st.integers(1, 256),
    max_model_len=st.none() | st.integers(1, 8192),
    kv_copies=st.integers(1, 4),
)
def test_weights_and_blocks_fit_the_memory(
    config,
    platform,
    num_bytes,
    used_bytes,
    fraction,
    block_size,
    max_running,
    max_model_len,
    kv_copies,
):
    memory = DeviceMemory(platform, num_bytes, used_bytes)
    limit = fraction or (0.3 if platform == "cpu" else 0.9)

    def choose():
        return choose_sizes(
            config,
            4,
            memory,
            block_size=block_size,
            max_running=max_running,
            max_model_len=max_model_len,
            memory_fraction=fraction,
            kv_copies=kv_copies,
        )

    bytes_per_block = PER_TOKEN * block_size
    on_devices = kv_copies * bytes_per_block
    if used_bytes + 2 * on_devices > int(limit * num_bytes):  # a block, and the padding
        with pytest.raises(ConfigError, match=r" has no room for blocks of "):
            choose()
        return
    room = (int(limit * num_bytes) - used_bytes) // on_devices - 1
    if max_model_len is not None and max_model_len > room * block_size:
        with pytest.raises(ConfigError, match=r"^max_model_len must be at most the "):
            choose()
        return
    chosen = choose()
    assert chosen.bytes_per_block == bytes_per_block
    taken = used_bytes + (chosen.num_blocks + 1) * on_devices
    assert taken <= limit * num_bytes
    most = chosen.max_running * -(-chosen.max_model_len // block_size)
    is_full = taken + on_devices > int(limit * num_bytes)
    assert is_full or chosen.num_blocks == most
    assert chosen.num_blocks <= most or max_model_len is None
    assert chosen.max_running <= chosen.token_budget or max_running is not None
    if max_model_len is None:
        assert chosen.max_model_len == min(8192, chosen.num_blocks * block_size)
    else:
        assert chosen.max_model_len == max_model_len


def test_sizes_that_are_given_are_taken(config):
    chosen = choose_sizes(
        config,
        2,
        DeviceMemory("gpu", 2**30, 2**29),
        block_size=8,
        num_blocks=10**6,
        token_budget=64,
        max_running=3,
    )
    found = (chosen.num_blocks, chosen.token_budget, chosen.max_running, chosen.max_model_len)
    assert found == (10**6, 64, 3, 8192)
    rest = "3 requests at a time, of up to 8,192 tokens, 64 tokens per step"
    weights = "512 MiB of weights and 1,000,000 blocks of 8 tokens take"
    assert str(chosen) == f"{weights} 2.41 GiB of 1 GiB (241%); {rest}"
    assert str(replace(chosen, kv_copies=2)) == f"{weights} 4.31 GiB of 1 GiB (431%); {rest}"


@pytest.mark.parametrize(
    ("platform", "token_budget", "max_running"),
    [
        *(("cpu", number, min(number, 16)) for number in (1, 8, 15, 16, 17)),
        *(("gpu", number, min(number, 128)) for number in (8, 127, 128, 129)),
    ],
)
def test_no_more_requests_run_than_a_step_has_tokens(
    config: ModelConfig, platform: str, token_budget: int, max_running: int
) -> None:
    memory = DeviceMemory(platform, 2**30, 0)
    assert choose_sizes(config, 4, memory, token_budget=token_budget).max_running == max_running


def test_the_longest_request_fits_into_all_blocks(config):
    def choose(max_model_len: int) -> EngineSizes:
        memory = DeviceMemory("gpu", 2**30, 0)
        return choose_sizes(config, 4, memory, num_blocks=80, max_model_len=max_model_len)

    assert choose(1280).max_model_len == 1280
    text = r"^max_model_len must be at most the 1,280 tokens of 80 blocks, got 1,281$"
    with pytest.raises(ConfigError, match=text):
        choose(1281)


@pytest.mark.parametrize("num_blocks", [1, 2, 9])
@pytest.mark.parametrize("host_blocks", [0, 1, 5])
@pytest.mark.parametrize("kv_copies", [1, 2])
def test_what_is_told_has_the_padding_of_every_pool(
    num_blocks: int, host_blocks: int, kv_copies: int
) -> None:
    mib = 2**20
    sizes = EngineSizes(16, num_blocks, 64, 4, 128, 3 * mib, mib, 100 * mib, host_blocks, kv_copies)
    total = 3 + (num_blocks + 1) * kv_copies
    told = str(sizes)
    assert told.startswith(f"3 MiB of weights and {num_blocks} blocks of 16 tokens take ")
    assert f" take {total} MiB of 100 MiB ({total}%); " in told
    host = f"; {host_blocks} blocks on the host take {host_blocks + 1} MiB"
    assert told.endswith(host if host_blocks else " tokens per step")


@pytest.mark.parametrize(("machine", "host_blocks"), [(30, 2), (109, 9), (110, 10), (500, 10)])
def test_storage_has_a_host_tier_of_as_many_blocks_if_the_machine_has_room(
    config: ModelConfig, machine: int, host_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a tenth of its memory, given in blocks; the padding is one more."""
    per_block = 16 * PER_TOKEN
    monkeypatch.setattr(sizes, "machine_memory", lambda: machine * per_block)
    memory = DeviceMemory("gpu", 2**30, 0)
    for has_storage in (False, True):
        chosen = choose_sizes(config, 4, memory, num_blocks=10, has_storage=has_storage)
        assert chosen.host_blocks == (host_blocks if has_storage else 0)


def test_no_room(config):
    text = "the model takes 8 GiB, and a fraction of 0.5 of 16 GiB has no room for blocks of 8 KiB"
    with pytest.raises(ConfigError, match=f"^{re.escape(text)}$"):
        choose_sizes(config, 4, DeviceMemory("gpu", 2**34, 2**33), memory_fraction=0.5)


@pytest.mark.parametrize(
    "name", ["block_size", "num_blocks", "token_budget", "max_running", "max_model_len"]
)
@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "must be at least 1, got 0"),
        (-1, "must be at least 1, got -1"),
        (2.5, "must be an integer, got 2.5"),
        ("8", "must be an integer, got '8'"),
        (False, "must be an integer, got False"),
    ],
)
def test_sizes_that_are_no_counts(config, name, value, text):
    size: Any = {name: value}
    with pytest.raises(CountError, match=f"^{name} {text}$"):
        choose_sizes(config, 4, DeviceMemory("gpu", 2**34, 0), **size)


@pytest.mark.parametrize("fraction", [-0.1, 0, 1.1, "0.5"])
def test_fractions_that_are_none(config, fraction):
    text = f"^memory_fraction must be above 0 and at most 1, got {re.escape(repr(fraction))}$"
    with pytest.raises(ConfigError, match=text):
        choose_sizes(config, 4, DeviceMemory("gpu", 2**34, 0), memory_fraction=fraction)


def test_the_memory_of_a_machine_is_that_of_its_container(tmp_path, monkeypatch):
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(sizes, "_CGROUP_LIMIT", limit)
    physical = machine_memory()
    assert physical > 2**28
    limit.write_text("max\n")
    assert machine_memory() == physical
    limit.write_text("1000000\n")
    assert machine_memory() == 1_000_000
    assert device_memory(jnp.zeros(1), 5) == DeviceMemory("cpu", 1_000_000, 5)


class FakeArray:
    """An array on a GPU that reports some memory."""

    platform, device_kind = "gpu", "GPU X"

    def __init__(self, stats: dict[str, int] | None, process_index: int = 0) -> None:
        self._stats, self.process_index = stats, process_index
        self.others: list[FakeArray] = []

    def devices(self) -> set[FakeArray]:
        return {self, *self.others}

    def memory_stats(self) -> dict[str, int] | None:
        assert self.process_index == 0, "only its own process knows the memory of a device"
        return self._stats


def test_the_memory_of_a_gpu():
    array = FakeArray({"bytes_limit": 100, "bytes_in_use": 30})
    assert device_memory(array, 20) == DeviceMemory("gpu", 100, 30)  # type: ignore[arg-type]
    # The smallest and the fullest of several devices count for each.
    array.others = [FakeArray({"bytes_limit": 90, "bytes_in_use": 40})]
    assert device_memory(array, 20) == DeviceMemory("gpu", 180, 80)  # type: ignore[arg-type]
    assert device_memory(array, 85) == DeviceMemory("gpu", 180, 85)  # type: ignore[arg-type]
    # Those of another process are as many, and have the same.
    array.others += [FakeArray(None, 1), FakeArray(None, 1)]
    assert device_memory(array, 85) == DeviceMemory("gpu", 360, 170)  # type: ignore[arg-type]
    nothing: dict[str, int] = {}
    for stats in (None, nothing):
        text = "^GPU X does not report its memory: choose num_blocks$"
        with pytest.raises(ConfigError, match=text):
            device_memory(FakeArray(stats), 20)  # type: ignore[arg-type]


class FakeGroup:
    """Three processes, of which the others give some numbers."""

    def __init__(self, *others: list[int]) -> None:
        self._others = others

    def share(self, numbers: Sequence[int]) -> list[list[int]]:
        first, last = self._others
        return [first, list(numbers), last]


def test_processes_have_the_least_memory_of_all() -> None:
    group: Any = FakeGroup([90, 5], [100, 7])
    assert least_memory(DeviceMemory("gpu", 95, 6), group) == DeviceMemory("gpu", 90, 7)


def test_processes_have_the_sizes_of_process_0(config: ModelConfig) -> None:
    first, mine = (
        choose_sizes(config, 4, DeviceMemory("cpu", 2**28, 0), host_memory=memory)
        for memory in (2**20, 2**21)
    )
    assert first != mine
    group: Any = FakeGroup(json.loads(json.dumps(astuple(first))), [])
    assert sizes_of_process_0(mine, group) == first


def test_the_tiny_model_is_as_these_tests_say(config: ModelConfig) -> None:
    assert 2 * config.num_layers * config.num_kv_heads * config.head_dim * 4 == PER_TOKEN
    assert Path("/sys/fs/cgroup/memory.max") == sizes._CGROUP_LIMIT

"""Default sizes of an engine: those that fit the model and the memory of the device."""

from __future__ import annotations

import os
from dataclasses import astuple, dataclass
from numbers import Real
from pathlib import Path
from typing import Final, NamedTuple

import jax

from ...kvcache.tokens import as_count
from ..engine.calls import Group
from ..errors import ConfigError
from ..models import ModelConfig

_CGROUP_LIMIT: Final = Path("/sys/fs/cgroup/memory.max")


class DeviceMemory(NamedTuple):
    """Memory of the device that computes, or of all devices that share the model.

    Attributes:
        platform: JAX's name of the kind of device, such as "cpu".
        num_bytes: memory that JAX may use; of a CPU, that of the machine or of its container.
        used_bytes: what is in use, with the weights; the fullest of several devices counts for
            each.
    """

    platform: str
    num_bytes: int
    used_bytes: int


@dataclass(frozen=True)
class EngineSizes:
    """Sizes of an engine, and the memory that they take; as a string, one line.

    Attributes:
        block_size, num_blocks, token_budget, max_running, max_model_len: see `Engine`.
        used_bytes: memory in use before the blocks are allocated, most of it the weights.
        bytes_per_block: keys and values of a block in all layers.
        memory_bytes: memory of the device, or of all devices that share the model.
        host_blocks: number of blocks of the host tier; 0 for none.
        kv_copies: number of devices that hold the KV of the same heads.
    """

    block_size: int
    num_blocks: int
    token_budget: int
    max_running: int
    max_model_len: int
    used_bytes: int
    bytes_per_block: int
    memory_bytes: int
    host_blocks: int = 0
    kv_copies: int = 1

    def __str__(self) -> str:
        blocks = (self.num_blocks + 1) * self.bytes_per_block * self.kv_copies  # and the padding
        total = self.used_bytes + blocks
        host = ""
        if self.host_blocks:
            num_bytes = (self.host_blocks + 1) * self.bytes_per_block
            host = f"; {self.host_blocks:,} blocks on the host take {_bytes(num_bytes)}"
        return (
            f"{_bytes(self.used_bytes)} of weights and {self.num_blocks:,} blocks of "
            f"{self.block_size} tokens take {_bytes(total)} of {_bytes(self.memory_bytes)} "
            f"({total / self.memory_bytes:.0%}); {self.max_running} requests at a time, of up to "
            f"{self.max_model_len:,} tokens, {self.token_budget:,} tokens per step{host}"
        )


def device_memory(weights: jax.Array, weight_bytes: int) -> DeviceMemory:
    """Return the memory of the devices that hold an array; those of other processes have the same.

    Args:
        weights: any of the parameters.
        weight_bytes: size of all of them, on all devices of this process.

    Raises:
        ConfigError: if the device does not tell.
    """
    everywhere, here = weights.devices(), jax.process_index()
    devices = [device for device in everywhere if device.process_index == here]
    weight_bytes = weight_bytes * len(everywhere) // len(devices)
    if devices[0].platform == "cpu":
        return DeviceMemory("cpu", machine_memory(), weight_bytes)
    stats = [device.memory_stats() or {} for device in devices]
    if any("bytes_limit" not in each for each in stats):
        kind = devices[0].device_kind
        raise ConfigError(f"{kind} does not report its memory: choose num_blocks")
    limit = min(each["bytes_limit"] for each in stats) * len(everywhere)
    used = max(each.get("bytes_in_use", 0) for each in stats) * len(everywhere)
    return DeviceMemory(devices[0].platform, limit, max(weight_bytes, used))


def least_memory(memory: DeviceMemory, group: Group) -> DeviceMemory:
    """Return the memory that all processes of a group have; each gives its own."""
    limits, used = zip(*group.share([memory.num_bytes, memory.used_bytes]), strict=True)
    return memory._replace(num_bytes=min(limits), used_bytes=max(used))


def sizes_of_process_0(sizes: EngineSizes, group: Group) -> EngineSizes:
    """Return the sizes of process 0; each process gives its own.

    A default may depend on the machine, such as that of the host tier.
    """
    return EngineSizes(*group.share(astuple(sizes))[0])


def machine_memory() -> int:
    """Return the memory of the machine, or the limit of its container, in bytes."""
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        return min(physical, int(_CGROUP_LIMIT.read_text()))
    except (OSError, ValueError):  # no such file, or "max"
        return physical


def choose_sizes(
    config: ModelConfig,
    itemsize: int,
    memory: DeviceMemory,
    *,
    block_size: int = 16,
    num_blocks: int | None = None,
    token_budget: int | None = None,
    max_running: int | None = None,
    max_model_len: int | None = None,
    memory_fraction: float | None = None,
    host_memory: int | None = None,
    has_storage: bool = False,
    kv_copies: int = 1,
) -> EngineSizes:
    """Return the given sizes, and defaults for the others.

    A default number of blocks is as large as the memory allows, but no larger than all requests can
    use at once.

    Args:
        config: configuration of the model.
        itemsize: bytes per element of the KV.
        memory: memory of the device.
        block_size, num_blocks, token_budget, max_running, max_model_len: sizes, see `Engine`.
        memory_fraction: part of the memory that weights and blocks may take together; default: 0.9,
            or 0.3 on a CPU, whose memory others need as well. It does not limit `num_blocks` if
            that is given.
        host_memory: bytes of the host tier; default: none, or with storage as many blocks as the
            device has, in at most a tenth of the machine's memory.
        has_storage: whether there is storage, which needs a host tier.
        kv_copies: number of devices that hold the KV of the same heads.

    Raises:
        CountError: for a size that is no integer of at least 1.
        ConfigError: for a fraction that is none, if there is no room for a block, or for a
            max_model_len that all blocks cannot hold.
    """
    is_cpu = memory.platform == "cpu"
    fraction = (0.3 if is_cpu else 0.9) if memory_fraction is None else memory_fraction
    if not isinstance(fraction, Real) or not 0 < fraction <= 1:
        raise ConfigError(f"memory_fraction must be above 0 and at most 1, got {fraction!r}")
    block_size = as_count("block_size", block_size, 1)
    if num_blocks is not None:
        num_blocks = as_count("num_blocks", num_blocks, 1)
    default = 256 if is_cpu else 1024
    token_budget = as_count("token_budget", default if token_budget is None else token_budget, 1)
    default = min(16 if is_cpu else 128, token_budget)
    max_running = as_count("max_running", default if max_running is None else max_running, 1)
    if max_model_len is not None:
        max_model_len = as_count("max_model_len", max_model_len, 1)
    bytes_per_block = config.kv_elements_per_token * block_size * itemsize
    if num_blocks is None:
        on_devices = bytes_per_block * kv_copies
        room = (int(fraction * memory.num_bytes) - memory.used_bytes) // on_devices - 1
        if room < 1:  # a block more is the padding
            raise ConfigError(
                f"the model takes {_bytes(memory.used_bytes)}, and a fraction of {fraction} of "
                f"{_bytes(memory.num_bytes)} has no room for blocks of {_bytes(on_devices)}"
            )
        longest = min(max_model_len or config.max_positions, room * block_size)
        num_blocks = min(room, max_running * -(-longest // block_size))
    if host_memory is None and has_storage:
        host_memory = min((num_blocks + 1) * bytes_per_block, machine_memory() // 10)
    host_blocks = 0
    if host_memory is not None:
        host_blocks = host_memory // bytes_per_block - 1  # a block more is the padding
        if host_blocks < 1:
            raise ConfigError(
                f"host_memory of {host_memory:,} bytes has no room for blocks of "
                f"{_bytes(bytes_per_block)}: 2 need {2 * bytes_per_block:,} bytes, one of them as "
                "padding"
            )
    capacity = num_blocks * block_size
    if max_model_len is not None and max_model_len > capacity:
        raise ConfigError(
            f"max_model_len must be at most the {capacity:,} tokens of {num_blocks:,} blocks, got "
            f"{max_model_len:,}"
        )
    return EngineSizes(
        block_size=block_size,
        num_blocks=num_blocks,
        token_budget=token_budget,
        max_running=max_running,
        max_model_len=max_model_len or min(config.max_positions, capacity),
        used_bytes=memory.used_bytes,
        bytes_per_block=bytes_per_block,
        memory_bytes=memory.num_bytes,
        host_blocks=host_blocks,
        kv_copies=kv_copies,
    )


def _bytes(num_bytes: int) -> str:
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.3g} {unit}"
    return f"{num_bytes / 2**10:.3g} KiB"

"""Tensor parallelism: how the weights and the KV of a model lie on the devices of a mesh.

Attention is cut by heads, and each matrix by the axis that needs the least communication. If there
are more devices than KV heads, several devices hold the same KV head, and share its query heads::

    8 devices, 4 KV heads: a mesh of 4 heads x 2 copies

    q_proj, gate_proj, up_proj   [out, in]         rows       by heads and copies
    k_proj, v_proj               [out, in]         rows       by heads
    o_proj, down_proj            [out, in]         columns    by heads and copies   all-reduce
    embedding                    [vocab, hidden]   rows       by heads and copies   all-reduce
    lm_head                      [vocab, hidden]   rows       by heads and copies   all-gather
    KV pools                     [blocks, kv_heads, block_size, head_dim]   by heads
    all else                     whole on each device

XLA adds the communication. The kernels are called under `jax.shard_map`, because it cannot cut
them.

Source: Shoeybi et al., Megatron-LM, arXiv 1909.08053, section 3; the copies of KV heads are those
of vLLM.
"""

from __future__ import annotations

from typing import Any, Final, TypeAlias, TypeVar

import jax
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from ...kvcache.tokens import as_count
from ..errors import ConfigError
from .config import ModelConfig

P: Final[Any] = PartitionSpec  # has no types
_ALL_AXES: Final = ("heads", "copies")

KV_HEADS: Final = P(None, "heads")
"""Of KV pools, and of new keys and values, ``[tokens, kv_heads, head_dim]``."""
SECOND_AXIS: Final = P(None, _ALL_AXES)
"""Of queries, ``[tokens, q_heads, head_dim]``, of logits, and of matrices cut by columns."""
_FIRST_AXIS: Final = P(_ALL_AXES)
WHOLE: Final = P()

ModelMesh: TypeAlias = Mesh | AbstractMesh
"""Devices of a compiled program; an abstract mesh to compile without them."""

T = TypeVar("T")


class TensorParallelError(ConfigError):
    """A model or a machine does not fit a number of devices.

    Attributes:
        name: what does not fit, such as "num_heads".
        number: how many of it there are.
        num_devices: number of devices of the mesh.
    """

    def __init__(self, name: str, number: int, num_devices: int, needed: str) -> None:
        super().__init__(f"a mesh of {num_devices} devices needs {needed}, got {name} {number}")
        self.name = name
        self.number = number
        self.num_devices = num_devices


def tensor_parallel_mesh(num_devices: int) -> Mesh:
    """Return a mesh of the first devices, with the axis "tp".

    Raises:
        CountError: if it is not a positive integer.
        TensorParallelError: if this process, or all that ``jax.distributed`` connects, has fewer.
    """
    devices, num_devices = jax.devices(), as_count("num_devices", num_devices, minimum=1)
    if num_devices > len(devices):
        needed = "as many in this process" if jax.process_count() == 1 else "as many in all"
        raise TensorParallelError("devices", len(devices), num_devices, needed)
    return Mesh(np.array(devices[:num_devices]), ("tp",), axis_types=(AxisType.Auto,))


def model_mesh(config: ModelConfig, mesh: Mesh) -> Mesh:
    """Return the devices of a mesh as a mesh of heads and copies.

    Args:
        config: configuration of the model.
        mesh: a mesh with one axis, or with others of size 1; or a result of this function.

    Raises:
        ConfigError: for a mesh with several axes.
        TensorParallelError: if the query heads or the feed-forward layer cannot be cut into equal
            parts, or if the KV heads can be neither cut nor copied equally often.
    """
    if mesh.axis_names != _ALL_AXES and sum(size > 1 for size in mesh.axis_sizes) > 1:
        sizes = ", ".join(f"{name} {size}" for name, size in mesh.shape.items())
        raise ConfigError(f"mesh must have one axis, of devices that share a model, got {sizes}")
    parts = split_devices(config, mesh.size)
    types = (AxisType.Auto, AxisType.Auto)
    return Mesh(mesh.devices.reshape(parts), _ALL_AXES, axis_types=types)


def split_devices(config: ModelConfig, num_devices: int) -> tuple[int, int]:
    """Return among how many devices KV heads are cut, and how many devices hold each.

    Raises:
        TensorParallelError: see `model_mesh`.
    """
    kv_heads = config.num_kv_heads
    for name in ("num_heads", "intermediate_size"):
        if (number := getattr(config, name)) % num_devices:
            raise TensorParallelError(name, number, num_devices, f"a multiple of {num_devices}")
    if kv_heads % num_devices and num_devices % kv_heads:
        needed = f"a multiple or a divisor of {num_devices}"
        raise TensorParallelError("num_kv_heads", kv_heads, num_devices, needed)
    heads = min(kv_heads, num_devices)
    return heads, num_devices // heads


def pool_sharding(mesh: Mesh | None) -> NamedSharding | None:
    """Return how the KV pools of a model lie on its mesh; None on one device."""
    return None if mesh is None else NamedSharding(mesh, KV_HEADS)


def whole(mesh: Mesh | None) -> NamedSharding | None:
    """Return how arrays lie that each device has; None on one device."""
    return None if mesh is None else NamedSharding(mesh, WHOLE)


def tensor_sharding(config: ModelConfig, mesh: ModelMesh | None, name: str) -> NamedSharding | None:
    """Return how a tensor of a checkpoint lies on the mesh of its model; None on one device.

    A vocabulary that is not a multiple of the devices is not cut: each has the whole matrix.
    """
    if mesh is None:
        return None
    *_, module, kind = name.split(".")
    if module in ("k_proj", "v_proj"):
        spec = P("heads")
    elif module in ("q_proj", "gate_proj", "up_proj"):
        spec = _FIRST_AXIS
    elif module in ("o_proj", "down_proj"):
        spec = SECOND_AXIS if kind == "weight" else WHOLE
    elif module in ("embed_tokens", "lm_head"):
        spec = WHOLE if config.vocab_size % mesh.size else _FIRST_AXIS
    else:
        spec = WHOLE
    return NamedSharding(mesh, spec)


def on_all(mesh: ModelMesh | None, arrays: T) -> T:
    """Let each device have these arrays as a whole, in a compiled program."""
    return arrays if mesh is None else _constrain(arrays, NamedSharding(mesh, WHOLE))


def by_second_axis(mesh: ModelMesh | None, array: T) -> T:
    """Cut arrays over all devices by their second axis, in a compiled program."""
    return array if mesh is None else _constrain(array, NamedSharding(mesh, SECOND_AXIS))


def _constrain(arrays: T, sharding: NamedSharding) -> T:
    constrain: Any = lax.with_sharding_constraint  # has no types, either
    result: T = constrain(arrays, sharding)
    return result

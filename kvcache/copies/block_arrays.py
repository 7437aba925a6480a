"""Device arrays that hold the blocks: a key pool and a value pool per layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array, Float

from ..errors import PoolDTypeError, PoolShapeError
from ..tokens import as_count

_DTYPES = ("bfloat16", "float16", "float32")


def _check_dtype(dtype: jnp.dtype) -> None:
    if jnp.dtype(dtype).name not in _DTYPES:
        raise PoolDTypeError(jnp.dtype(dtype).name)


def put_parts(arrays: Any, sharding: NamedSharding) -> Any:
    """Put arrays of the host on the devices of several processes, which all have the same ones.

    Each process puts what its own devices need. `jax.device_put` would first compare the arrays of
    all processes, by a collective.
    """

    def put(array: Any) -> jax.Array:
        values = np.asarray(array)
        made: jax.Array = jax.make_array_from_callback(
            values.shape, sharding, lambda index: values[index]
        )
        return made

    return jax.tree.map(put, arrays)


def put_of(sharding: NamedSharding | None) -> Callable[..., Any]:
    """Return what puts arrays on devices: `put_parts` if some are of other processes."""
    is_here = sharding is None or sharding.is_fully_addressable
    return jax.device_put if is_here else put_parts


@dataclass
class BlockArrays:
    """Key and value pools, an array per layer. Each step donates them and replaces them.

    ::

        keys[layer]  [num_blocks + 1, kv_heads, block_size, head_dim]
                      0: padding sink, 1 .. num_blocks: the ids of the block pool

    One thread owns the arrays: the thread that dispatches the model also dispatches every copy.

    Quantised pools are not supported: a block of int8 or float8 is useless without its scales, and
    pool copies, the host tier, storage and the hand-off do not carry scales. The kernels accept
    such pools from a caller who keeps the scales.

    Raises:
        PoolDTypeError: for a dtype other than bfloat16, float16 or float32.
        PoolShapeError: unless there are as many key pools as value pools, at least one, all of one
            shape and dtype.
    """

    keys: tuple[Float[Array, "blocks kv_heads block_size head_dim"], ...]
    values: tuple[Float[Array, "blocks kv_heads block_size head_dim"], ...]

    def __post_init__(self) -> None:
        pools = (*self.keys, *self.values)
        for pool in pools:
            _check_dtype(pool.dtype)
        kinds = {f"{pool.dtype.name}{list(pool.shape)}": pool.ndim for pool in pools}
        if len(self.keys) != len(self.values) or list(kinds.values()) != [4]:
            raise PoolShapeError(len(self.keys), len(self.values), list(kinds))

    @classmethod
    def zeros(
        cls,
        num_layers: int,
        num_blocks: int,
        kv_heads: int,
        block_size: int,
        head_dim: int,
        dtype: jnp.dtype,
        sharding: NamedSharding | None = None,
    ) -> BlockArrays:
        """Allocate pools for num_blocks usable blocks and the padding sink.

        Args:
            num_layers, num_blocks, kv_heads, block_size, head_dim, dtype: see the diagram above.
            sharding: how each pool lies on several devices, cut by ``kv_heads``; None for JAX's
                default device.

        Raises:
            CountError: if a size is less than 1; nothing is allocated.
            PoolDTypeError: for a dtype other than bfloat16, float16 or float32; nothing is
                allocated.
        """
        _check_dtype(dtype)
        sizes = {
            "num_layers": num_layers,
            "num_blocks": num_blocks,
            "kv_heads": kv_heads,
            "block_size": block_size,
            "head_dim": head_dim,
        }
        for name, value in sizes.items():
            as_count(name, value, minimum=1)
        shape = (num_blocks + 1, kv_heads, block_size, head_dim)

        def pools() -> tuple[jax.Array, ...]:
            return tuple(jnp.zeros(shape, dtype, device=sharding) for _ in range(num_layers))

        return cls(pools(), pools())

"""The device arrays that hold the blocks: the only part of `kvcache` that needs JAX."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from .tokens import as_count


@dataclass
class BlockArrays:
    """Key and value pools, an array per layer; donated to each step and replaced by its result.

    ::

        keys[layer]  [num_blocks + 1, kv_heads, block_size, head_dim]
                      0: padding sink, 1 .. num_blocks: the ids of the block pool

    One thread owns them: who dispatches the model also dispatches every copy.
    """

    keys: tuple[Float[Array, "blocks kv_heads block_size head_dim"], ...]
    values: tuple[Float[Array, "blocks kv_heads block_size head_dim"], ...]

    @classmethod
    def zeros(
        cls,
        num_layers: int,
        num_blocks: int,
        kv_heads: int,
        block_size: int,
        head_dim: int,
        dtype: jnp.dtype,
    ) -> BlockArrays:
        """Allocate pools for num_blocks usable blocks and the padding sink.

        Raises:
            CountError: if a size is less than 1; nothing is allocated then.
        """
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
            return tuple(jnp.zeros(shape, dtype) for _ in range(num_layers))

        return cls(pools(), pools())

"""The Mosaic GPU backend of `kv_write`: TMA through a pipeline in shared memory.

Each program takes every n-th group of tokens. One copy loads the keys of a group and one its
values; one copy per token stores it, with the heads of the block as a strided dimension::

    k_new [tokens, kv_heads, head_dim]  ->  ring[stage, token of the group, kv_heads, head_dim]
                                        ->  pool[block, 0 .. kv_heads, offset, head_dim]

No byte passes through registers. The pipeline is that of `block_copy`: three loads in flight.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..mosaic_compat import Interpret, pl, plgpu, run, when
from .config import MAX_GROUP, PROGRAMS_PER_CORE, STAGE_BYTES, STAGES


def group_tokens(num_tokens: int, token_bytes: int, num_programs: int) -> int:
    """Tokens per load: few enough to fit a pipeline stage and to leave no program idle."""
    for size in (MAX_GROUP, MAX_GROUP // 2, MAX_GROUP // 4):
        divides = num_tokens % size == 0 and num_tokens // size >= num_programs
        if divides and size * token_bytes <= STAGE_BYTES:
            return size
    return 1


@partial(jax.jit, static_argnames=("num_cores", "interpret"))
def write(
    k_new: jax.Array,
    v_new: jax.Array,
    slots: jax.Array,
    k_blocks: jax.Array,
    v_blocks: jax.Array,
    *,
    num_cores: int,
    interpret: Interpret = None,
) -> tuple[jax.Array, ...]:
    """`kv_write` without its checks, for new keys and values in the dtype of the pools."""
    num_blocks, kv_heads, block_size, head_dim = k_blocks.shape
    num_tokens, dtype = k_new.shape[0], k_blocks.dtype
    token_bytes = 2 * kv_heads * head_dim * dtype.itemsize
    group = group_tokens(num_tokens, token_bytes, PROGRAMS_PER_CORE * num_cores)
    num_groups = num_tokens // group
    num_programs = min(PROGRAMS_PER_CORE * num_cores, num_groups)

    def body(
        k_new: Any, v_new: Any, slots: Any, k_blocks: Any, v_blocks: Any, *scratch: Any
    ) -> None:
        k_ring, v_ring, full = scratch
        program = lax.axis_index("program")
        num_steps = lax.div(num_groups - program + (num_programs - 1), jnp.int32(num_programs))

        def first_token(step: jax.Array) -> jax.Array:
            return (program + step * num_programs) * group

        def load(step: jax.Array, _: None = None) -> None:
            stage = lax.rem(step, jnp.int32(STAGES))
            tokens = pl.ds(first_token(step), group)
            plgpu.copy_gmem_to_smem(k_new.at[tokens], k_ring.at[stage], full.at[stage])
            plgpu.copy_gmem_to_smem(v_new.at[tokens], v_ring.at[stage], full.at[stage])

        def store(step: jax.Array, stage: jax.Array, token: int) -> None:
            slot = slots[first_token(step) + token]
            block, offset = lax.div(slot, jnp.int32(block_size)), lax.rem(slot, block_size)

            @when((slot >= 0) & (slot < num_blocks * block_size))
            def store_token() -> None:
                for ring, blocks in ((k_ring, k_blocks), (v_ring, v_blocks)):
                    plgpu.copy_smem_to_gmem(ring.at[stage, token], blocks.at[block, :, offset])

        def advance(step: jax.Array, _: None) -> None:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # frees the previous stage

            @when(step + (STAGES - 1) < num_steps)
            def load_ahead() -> None:
                load(step + (STAGES - 1))

            stage = lax.rem(step, jnp.int32(STAGES))
            plgpu.barrier_wait(full.at[stage])
            for token in range(group):
                store(step, stage, token)

        lax.fori_loop(0, jnp.minimum(num_steps, STAGES - 1), load, None)
        lax.fori_loop(0, num_steps, advance, None)
        plgpu.wait_smem_to_gmem(0)

    ring = plgpu.SMEM((STAGES, group, kv_heads, head_dim), dtype)
    return run(
        body,
        (k_new, v_new, slots),
        (k_blocks, v_blocks),
        name="kv_write",
        grid={"program": num_programs},
        scratch=(ring, ring, plgpu.Barrier(num_arrivals=2, num_barriers=STAGES)),
        interpret=interpret,
    )

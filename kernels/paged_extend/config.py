"""What the Mosaic kernel of `paged_extend` serves, and how a launch of it is cut."""

from dataclasses import dataclass

import jax

from ..mosaic_limits import attention_obstacle
from .work_list import ALIGNMENT

ROWS = 64
"""Matrix rows of a warpgroup, the height of WGMMA."""
WARPGROUPS = 2
"""That multiply; one more copies."""
TILE_ROWS = WARPGROUPS * ROWS
"""Matrix rows of a tile: tokens times the query heads that share a KV head."""


@dataclass(frozen=True)
class ExtendConfig:
    """How a launch is cut."""

    programs: int
    """Thread blocks; each works through its share of the tiles."""
    block_kv: int
    """KV tokens of a step, a multiple of 64; a multiple or a divisor of the block size."""
    stages: int
    """Slots of the rings of K and V, at least 2."""
    ping_pong: bool = True
    """Whether the warpgroups take turns on the tensor cores."""


def choose_config(head_dim: int, num_cores: int) -> ExtendConfig:
    """The cut of a launch, by its static shape: what fills shared memory and the registers.

    head_dim   block_kv  stages   bytes of shared memory (Q, K, V, output)
          64        128       4   16 + 64 + 64 + 16 KiB
         128        128       2   32 + 64 + 64 + 32 KiB
         256         64       2   64 + 64 + 64 + 16 KiB, the output in four parts

    The numbers of quantised pools, as they come, take 16 or 32 KiB besides; with a head_dim of 128
    the output then is in two parts.

    No register spills (ptxas 13.5, JAX 0.10.2 and 0.12.0.1), also with a head_dim of 256, where the
    output takes 128 registers of a thread.
    """
    if head_dim <= 64:
        return ExtendConfig(num_cores, block_kv=128, stages=4)
    if head_dim <= 128:
        return ExtendConfig(num_cores, block_kv=128, stages=2)
    return ExtendConfig(num_cores, block_kv=64, stages=2)


def tile_tokens_of(group: int) -> int:
    """Tokens of a tile for a group of query heads; 0 if the group is too large for one."""
    return TILE_ROWS // group // ALIGNMENT * ALIGNMENT


def obstacle(q: jax.Array, k_blocks: jax.Array, batch: int) -> str | None:
    """Why the kernel cannot serve the arguments; None if it can."""
    if (shared := attention_obstacle(q, k_blocks)) is not None:
        return shared
    tokens, q_heads, kv_heads = q.shape[0], q.shape[1], k_blocks.shape[1]
    most = TILE_ROWS // ALIGNMENT
    if q_heads // kv_heads > most:
        return f"mosaic needs at most {most} query heads per KV head, got {q_heads // kv_heads}"
    if tokens == 0 or batch == 0:
        return f"mosaic needs at least one token and one row, got {tokens} and {batch}"
    return None

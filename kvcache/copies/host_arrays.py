"""Memory of the host tier: a row of bytes per block, which storage stores as it is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
from jaxtyping import Int32, Shaped, UInt8

from ..tokens import as_count
from .block_arrays import BlockArrays

_PAGE_BYTES: Final = 4096


class HostArrays:
    """The blocks of the host tier; each block is contiguous bytes.

    ::

        memory[id]   one block: [2, num_layers, kv_heads, block_size, head_dim], K then V
               0: source of padding, 1 .. num_blocks: the ids of the host tier

    Rows of bytes fit any dtype of the pools, and NumPy copies bytes without the GIL. It holds the
    GIL to copy dtypes that are not its own, such as bfloat16.

    The memory is pageable. JAX cannot fill a part of a pinned array in place, so a pinned tier
    would be one JAX array per block. Blocks in flight from the device pass through pinned memory
    where JAX supports it.

    Attributes:
        num_blocks: number of usable blocks.
        num_layers: number of layers, each with K and V.
        block_shape: kv_heads, block_size and head_dim of one layer's K or V.
        dtype: dtype of the pools.
        bytes_per_block: bytes of a block in all layers, K and V.
        memory: uint8 ``[num_blocks + 1, bytes_per_block]``. It starts at a page, because the system
            copies files faster to aligned addresses.
    """

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        kv_heads: int,
        block_size: int,
        head_dim: int,
        dtype: npt.DTypeLike,
    ) -> None:
        """Allocate memory for num_blocks blocks and the padding row.

        Raises:
            CountError: if a size is less than 1; nothing is allocated.
            MemoryError: if there is not enough memory.
        """
        self.num_layers = as_count("num_layers", num_layers, minimum=1)
        self.num_blocks = as_count("num_blocks", num_blocks, minimum=1)
        self.block_shape = (
            as_count("kv_heads", kv_heads, minimum=1),
            as_count("block_size", block_size, minimum=1),
            as_count("head_dim", head_dim, minimum=1),
        )
        self.dtype = np.dtype(dtype)
        bytes_per_part = math.prod(self.block_shape) * self.dtype.itemsize
        self.bytes_per_block = 2 * self.num_layers * bytes_per_part
        self.memory: npt.NDArray[np.uint8] = _zeros_from_page(
            (self.num_blocks + 1) * self.bytes_per_block
        ).reshape(self.num_blocks + 1, -1)
        self._parts: npt.NDArray[np.uint8] = self.memory.reshape(
            self.num_blocks + 1, 2 * self.num_layers, bytes_per_part
        )

    @classmethod
    def like(cls, arrays: BlockArrays, num_blocks: int) -> HostArrays:
        """Allocate num_blocks blocks of the shape and dtype of arrays.

        Raises:
            CountError: if num_blocks is less than 1.
            MemoryError: if there is not enough memory.
        """
        _, kv_heads, block_size, head_dim = arrays.keys[0].shape
        dtype = arrays.keys[0].dtype
        return cls(len(arrays.keys), num_blocks, kv_heads, block_size, head_dim, dtype)

    def blocks(self, ids: Int32[np.ndarray, " n"]) -> list[UInt8[np.ndarray, " bytes_per_block"]]:
        """Return a view of the bytes of each block, the payload of its value in storage.

        Raises:
            IndexError: for the id of an unusable block.
        """
        self.check_ids(ids)
        return [self.memory[block_id] for block_id in ids.tolist()]

    def read(
        self, ids: Int32[np.ndarray, " n"]
    ) -> tuple[Shaped[np.ndarray, "n kv_heads block_size head_dim"], ...]:
        """Return copies of blocks, an array per pool: each layer's K, then each layer's V.

        The arrays are new. On CPU, `jax.device_put` does not copy aligned NumPy memory, so its
        argument must not change afterwards.

        Args:
            ids: ids of blocks; 0 is the padding row.
        """
        parts = range(2 * self.num_layers)
        return tuple(
            self._parts[ids, part].view(self.dtype).reshape(-1, *self.block_shape) for part in parts
        )

    def write(
        self,
        ids: Int32[np.ndarray, " n"],
        pools: Sequence[Shaped[np.ndarray, "m kv_heads block_size head_dim"]],
    ) -> None:
        """Copy blocks in.

        Args:
            ids: ids of blocks, distinct.
            pools: arrays as `read` returns them, with at least n blocks; more blocks are padding.
        """
        for part, pool in enumerate(pools):
            new = pool[: len(ids)].view(np.uint8)
            self._parts[ids, part] = new.reshape(len(ids), -1)

    def check_ids(self, ids: npt.NDArray[np.integer]) -> None:
        """Reject ids of unusable blocks.

        Raises:
            IndexError: for the id of an unusable block.
        """
        check_block_ids("host", ids, self.num_blocks)


def _zeros_from_page(num_bytes: int) -> npt.NDArray[np.uint8]:
    """Return zeros that start at a page; NumPy's large arrays start 16 bytes after one."""
    whole = np.zeros(num_bytes + _PAGE_BYTES, np.uint8)
    first = -whole.ctypes.data % _PAGE_BYTES
    return whole[first : first + num_bytes]


def check_block_ids(tier: str, ids: npt.NDArray[np.integer], num_blocks: int) -> None:
    """Reject ids outside 1 to num_blocks.

    Raises:
        IndexError: for the first such id.
    """
    bad = np.flatnonzero((ids < 1) | (ids > num_blocks))
    if len(bad):
        raise IndexError(f"{tier} block {ids[bad[0]]} is not in 1 to {num_blocks}")

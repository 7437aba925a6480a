"""The memory of the host tier: reads and writes of any dtype, and bytes for storage."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from radixkv.kvcache import BlockArrays, CountError, HostArrays
from radixkv.kvcache.storage.interface import views

SIZES: dict[str, Any] = {
    "num_layers": 2,
    "num_blocks": 3,
    "kv_heads": 4,
    "block_size": 5,
    "head_dim": 6,
}
POOLS = 4
DTYPES = [np.float32, np.float16, np.int8, jnp.bfloat16, jnp.float8_e4m3fn]


def random_pools(dtype, num_blocks: int) -> list[np.ndarray]:
    random = np.random.default_rng(0)
    shape = num_blocks, 4, 5, 6 * np.dtype(dtype).itemsize
    return [random.integers(0, 256, shape, np.uint8).view(dtype) for _ in range(POOLS)]


def as_bytes(array: np.ndarray) -> bytes:
    return np.ascontiguousarray(array).tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
class TestAnyDtype:
    def test_written_blocks_come_back(self, dtype):
        host = HostArrays(**SIZES, dtype=dtype)
        new = random_pools(dtype, 2)
        host.write(np.array([3, 1], np.int32), new)
        read = host.read(np.array([1, 3, 1], np.int32))
        assert len(read) == POOLS
        for got, wrote in zip(read, new, strict=True):
            assert got.shape == (3, 4, 5, 6)
            assert got.dtype == dtype
            assert as_bytes(got) == as_bytes(wrote[[1, 0, 1]])
        assert not host.memory[[0, 2]].any()

    def test_a_block_is_its_pools_one_after_the_other(self, dtype):
        host = HostArrays(**SIZES, dtype=dtype)
        new = random_pools(dtype, 1)
        host.write(np.array([2], np.int32), new)
        (block,) = host.blocks(np.array([2], np.int32))
        assert len(block) == host.bytes_per_block == POOLS * 4 * 5 * 6 * np.dtype(dtype).itemsize
        assert block.tobytes() == b"".join(as_bytes(pool) for pool in new)


def test_a_block_is_a_value_that_storage_reads_and_writes_in_place():
    host = HostArrays(**SIZES, dtype=jnp.bfloat16)
    (view,) = views(host.blocks(np.array([1], np.int32)), writable=True)
    view[:] = bytes(range(256))[:1] * len(view[:-1]) + b"\x07"
    assert host.memory[1, -1] == 7
    assert not host.memory[[0, 2, 3]].any()


@pytest.mark.parametrize("num_blocks", [1, 300])
def test_blocks_are_aligned_to_pages(num_blocks):
    """The memory starts at a page, so blocks of whole pages do too."""
    host = HostArrays(1, num_blocks, 1, 1, 2048, np.uint8)
    assert {host.memory[block].ctypes.data % 4096 for block in range(num_blocks + 1)} == {0}


def test_padding_is_not_written():
    host = HostArrays(**SIZES, dtype=np.float32)
    pool = np.zeros((4, 4, 5, 6), np.float32)
    pool[0], pool[1:] = 1, 2
    host.write(np.array([2], np.int32), [pool] * POOLS)
    assert not host.memory[[0, 1, 3]].any()
    assert all((pool == 1).all() for pool in host.read(np.array([2], np.int32)))


def test_read_blocks_do_not_change_later():
    host = HostArrays(**SIZES, dtype=np.float32)
    read = host.read(np.array([1], np.int32))
    host.memory[:] = 255
    assert not any(pool.any() for pool in read)


def test_like_copies_the_shape_of_the_pools():
    arrays = BlockArrays.zeros(**SIZES, dtype=jnp.dtype(jnp.bfloat16))
    host = HostArrays.like(arrays, 7)
    assert (host.num_blocks, host.num_layers, host.block_shape) == (7, 2, (4, 5, 6))
    assert host.dtype == jnp.bfloat16
    assert host.memory.shape == (8, host.bytes_per_block)


@pytest.mark.parametrize("name", list(SIZES))
def test_every_size_is_at_least_one(name):
    with pytest.raises(CountError, match=f"^{name} must be at least 1, got 0$"):
        HostArrays(**{**SIZES, name: 0}, dtype=np.float32)


@pytest.mark.parametrize("block_id", [-1, 0, 4])
def test_unusable_blocks_are_refused(block_id):
    with pytest.raises(IndexError, match=f"^host block {block_id} is not in 1 to 3$"):
        HostArrays(**SIZES, dtype=np.float32).blocks(np.array([1, block_id, 9], np.int32))

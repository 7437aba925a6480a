"""Shapes and dtypes of the block arrays."""

from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import pytest

from radixkv.kvcache import BlockArrays, CountError, PoolDTypeError, PoolShapeError

SIZES: dict[str, Any] = {
    "num_layers": 2,
    "num_blocks": 3,
    "kv_heads": 4,
    "block_size": 5,
    "head_dim": 6,
}


def test_one_pool_per_layer_with_a_sink():
    arrays = BlockArrays.zeros(**SIZES, dtype=jnp.dtype(jnp.bfloat16))
    assert len(arrays.keys) == len(arrays.values) == 2
    for pool in (*arrays.keys, *arrays.values):
        assert pool.shape == (4, 4, 5, 6)
        assert pool.dtype == jnp.bfloat16
        assert not pool.any()


@pytest.mark.parametrize("name", list(SIZES))
def test_every_size_is_at_least_one(name):
    with pytest.raises(CountError, match=f"^{name} must be at least 1, got 0$"):
        BlockArrays.zeros(**{**SIZES, name: 0}, dtype=jnp.dtype(jnp.float32))


REFUSED = (
    "dtype must be bfloat16, float16 or float32, got {}: "
    "copies of blocks carry no scales, which quantised pools need"
)


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn", "float8_e5m2"])
def test_quantised_pools_are_refused(dtype):
    with pytest.raises(PoolDTypeError) as refusal:
        BlockArrays.zeros(**SIZES, dtype=jnp.dtype(dtype))
    assert str(refusal.value) == REFUSED.format(dtype) and refusal.value.dtype == dtype


def test_quantised_pools_from_a_caller_are_refused():
    pool, fine = (jnp.zeros((4, 4, 5, 6), each) for each in ("float8_e4m3fn", "float32"))
    with pytest.raises(PoolDTypeError) as refusal:
        BlockArrays((fine,), (pool,))
    assert str(refusal.value) == REFUSED.format("float8_e4m3fn")


def make(keys, values):
    """Make BlockArrays without jaxtyping's checks, which are active in these tests."""
    arrays: Any = SimpleNamespace(keys=keys, values=values)
    BlockArrays.__post_init__(arrays)


@pytest.mark.parametrize(
    ("keys", "values", "got"),
    [
        ([], [], "0 and 0, none"),
        ([(4, 4, 5, 6)], [], "1 and 0, float32[4, 4, 5, 6]"),
        ([(4, 4, 5, 6)], [(4, 4, 5, 7)], "1 and 1, float32[4, 4, 5, 6] and float32[4, 4, 5, 7]"),
        ([(4, 4, 30)], [(4, 4, 30)], "1 and 1, float32[4, 4, 30]"),
    ],
)
def test_pools_that_do_not_match_are_refused(keys, values, got):
    with pytest.raises(PoolShapeError) as refusal:
        make(tuple(map(jnp.zeros, keys)), tuple(map(jnp.zeros, values)))
    assert str(refusal.value) == (
        "there must be one pool of keys and one of values per layer, all alike, "
        f"[blocks, kv_heads, block_size, head_dim]; got {got}"
    )


def test_pools_of_two_dtypes_are_refused():
    pools = jnp.zeros((2, 1, 1, 1), jnp.float32), jnp.zeros((2, 1, 1, 1), jnp.bfloat16)
    with pytest.raises(PoolShapeError, match=r"float32\[2, 1, 1, 1\] and bfloat16\[2, 1, 1, 1\]"):
        make(pools[:1], pools[1:])

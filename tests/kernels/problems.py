"""Random problems for the attention kernels; memory that a kernel must not use holds NaN."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

TOLERANCE = {"float32": 1e-5, "bfloat16": 5e-3, "float16": 5e-3}


@dataclass(frozen=True)
class Heads:
    """Shape of the attention heads."""

    kv_heads: int = 2
    group: int = 2
    head_dim: int = 16

    @property
    def q_heads(self) -> int:
        return self.kv_heads * self.group


@dataclass(frozen=True)
class Cache:
    """Pools and block tables. Memory that no row has written is NaN, including the sink block.

    In an int8 pool, which has no NaN, it is -128, and blocks that no row uses have a scale of NaN.
    """

    k_blocks: jax.Array
    v_blocks: jax.Array
    block_tables: jax.Array
    scales: dict[str, jax.Array]
    """Keyword arguments with the scales of quantised pools."""

    @property
    def for_oracle(self) -> tuple[np.ndarray, ...]:
        pools = [
            np.asarray(x.astype(jnp.float32), np.float64) for x in (self.k_blocks, self.v_blocks)
        ]
        factors = [np.asarray(x, np.float64)[:, :, None, None] for x in self.scales.values()]
        if factors:
            pools = [pool * factor for pool, factor in zip(pools, factors, strict=True)]
        return (*pools, np.asarray(self.block_tables))


CODES = {"int8": 127.0, "float8_e4m3fn": 448.0}


def quantise(pool: np.ndarray, dtype: str) -> tuple[jax.Array, jax.Array]:
    """Quantise a pool; the scales map the largest number of each (block, head) to the limit."""
    unused = np.isnan(pool).all((2, 3))
    largest = np.abs(np.nan_to_num(pool)).max((2, 3))
    scales = np.where(unused, 1.0, largest / CODES[dtype]).astype(np.float32)
    stored = pool / scales[:, :, None, None]
    if dtype == "int8":
        stored = np.where(np.isnan(stored), -128, np.round(stored))
    return jnp.asarray(stored).astype(dtype), jnp.asarray(np.where(unused, np.nan, scales))


def make_cache(
    rng: np.random.Generator,
    lengths: list[int],
    *,
    block_size: int,
    width: int,
    num_blocks: int,
    heads: Heads,
    dtype: str = "float32",
) -> Cache:
    """Rows of the given lengths in shuffled blocks; unused table entries name arbitrary blocks."""
    shape = (num_blocks + 1, heads.kv_heads, block_size, heads.head_dim)
    k, v = np.full(shape, np.nan, np.float32), np.full(shape, np.nan, np.float32)
    tables = rng.integers(0, num_blocks + 1, (len(lengths), width)).astype(np.int32)
    free = list(rng.permutation(num_blocks) + 1)
    for row, length in enumerate(lengths):
        used = -(-length // block_size)
        tables[row, :used] = [free.pop() for _ in range(used)]
        for position in range(length):
            place = tables[row, position // block_size], slice(None), position % block_size
            k[place] = rng.standard_normal((heads.kv_heads, heads.head_dim))
            v[place] = rng.standard_normal((heads.kv_heads, heads.head_dim))
    if dtype in CODES:
        v[::3] *= 8  # so that the scales of a row's blocks are far apart
        (k_blocks, k_scales), (v_blocks, v_scales) = quantise(k, dtype), quantise(v, dtype)
        scales = {"k_scales": k_scales, "v_scales": v_scales}
        return Cache(k_blocks, v_blocks, jnp.asarray(tables), scales)
    return Cache(jnp.asarray(k, dtype), jnp.asarray(v, dtype), jnp.asarray(tables), {})


def make_queries(
    rng: np.random.Generator, num_tokens: int, heads: Heads, dtype: str = "float32"
) -> jax.Array:
    shape = (num_tokens, heads.q_heads, heads.head_dim)
    return jnp.asarray(rng.standard_normal(shape), dtype)


def int32(values) -> jax.Array:
    return jnp.asarray(values, jnp.int32)


def assert_close(actual: jax.Array, expected: np.ndarray, dtype: str) -> None:
    """Relative Frobenius error below the tolerance of `dtype`; infinities must agree exactly."""
    got = np.asarray(actual.astype(jnp.float32), np.float64)
    assert got.shape == expected.shape
    finite = np.isfinite(expected)
    assert np.array_equal(np.isfinite(got), finite), "NaN or inf in the wrong places"
    assert np.array_equal(got[~finite], expected[~finite])
    error = np.linalg.norm(got[finite] - expected[finite])
    assert error <= TOLERANCE[dtype] * np.linalg.norm(expected[finite]), f"error {error}"

"""Trace-time checks of kernel arguments: shapes, dtypes and options, not values of arrays."""

import math
from collections.abc import Sequence
from numbers import Real

import jax
import jax.numpy as jnp

FLOAT_DTYPES = ("bfloat16", "float16", "float32")
QUANTISED_DTYPES = ("int8", "float8_e4m3fn")


class KernelArgumentError(ValueError):
    """A kernel argument has a wrong shape, dtype or value; the message names the argument.

    It is raised while tracing, before anything runs and before any buffer is donated.
    """


def check_shape(name: str, array: jax.Array, expected: Sequence[int | None], axes: str) -> None:
    """Reject `array` unless its shape is `expected` (None: any size); `axes` names the axes."""
    shape = tuple(array.shape)
    fits = len(shape) == len(expected) and all(
        want is None or want == size for want, size in zip(expected, shape, strict=True)
    )
    if not fits:
        wanted = ", ".join("any" if want is None else str(want) for want in expected)
        raise KernelArgumentError(f"{name} must be [{axes}] = [{wanted}], got {list(shape)}")


def check_dtype(name: str, array: jax.Array, dtypes: Sequence[str]) -> None:
    """Reject an array whose dtype is not one of `dtypes`."""
    if array.dtype.name not in dtypes:
        wanted = " or ".join(filter(None, (", ".join(dtypes[:-1]), dtypes[-1])))
        raise KernelArgumentError(f"{name} must have dtype {wanted}, got {array.dtype.name}")


def check_float(name: str, array: jax.Array) -> None:
    """Reject an array whose dtype is not one of `FLOAT_DTYPES`."""
    check_dtype(name, array, FLOAT_DTYPES)


def check_int32(name: str, array: jax.Array, expected: Sequence[int | None], axes: str) -> None:
    """Reject an array of ids, lengths or counts that is not int32 of the expected shape."""
    if array.dtype != jnp.int32:
        raise KernelArgumentError(f"{name} must have dtype int32, got {array.dtype.name}")
    check_shape(name, array, expected, axes)


def check_pool(name: str, pool: jax.Array) -> None:
    """Reject an array that cannot be a pool of blocks."""
    check_shape(name, pool, (None,) * 4, "num_blocks + 1, kv_heads, block_size, head_dim")
    check_dtype(name, pool, FLOAT_DTYPES + QUANTISED_DTYPES)
    if 0 in pool.shape:
        raise KernelArgumentError(f"{name} must have no empty axis, got {list(pool.shape)}")


def check_pools(k_blocks: jax.Array, v_blocks: jax.Array) -> None:
    """Reject a pair of pools that differ in shape or dtype."""
    check_pool("k_blocks", k_blocks)
    check_pool("v_blocks", v_blocks)
    if k_blocks.shape != v_blocks.shape or k_blocks.dtype != v_blocks.dtype:
        raise KernelArgumentError(
            "k_blocks and v_blocks must have the same shape and dtype, got "
            f"{k_blocks.dtype.name}{list(k_blocks.shape)} and "
            f"{v_blocks.dtype.name}{list(v_blocks.shape)}"
        )


def is_quantised(pool: jax.Array) -> bool:
    """Whether a pool holds 1-byte numbers, which need scales."""
    return pool.dtype.name in QUANTISED_DTYPES


def check_scales(
    k_blocks: jax.Array, k_scales: jax.Array | None, v_scales: jax.Array | None
) -> None:
    """Reject quantised pools without a scale per (block, head), and other pools with scales."""
    for name, scales in (("k_scales", k_scales), ("v_scales", v_scales)):
        if not is_quantised(k_blocks):
            if scales is not None:
                raise KernelArgumentError(
                    f"{name} must be None for pools of {k_blocks.dtype.name}, got an array"
                )
        elif scales is None:
            raise KernelArgumentError(
                f"{name} must be an array for pools of {k_blocks.dtype.name}, got None"
            )
        else:
            check_shape(name, scales, k_blocks.shape[:2], "num_blocks + 1, kv_heads")
            check_dtype(name, scales, ("float32",))


def check_queries(q: jax.Array, k_blocks: jax.Array, axis: str) -> None:
    """Reject queries whose heads do not fit the pool."""
    _, kv_heads, _, head_dim = k_blocks.shape
    check_shape("q", q, (None, None, head_dim), f"{axis}, q_heads, head_dim")
    check_float("q", q)
    if q.shape[1] == 0 or q.shape[1] % kv_heads:
        raise KernelArgumentError(
            f"q must have a positive multiple of kv_heads={kv_heads} query heads, got {q.shape[1]}"
        )


def check_block_tables(block_tables: jax.Array) -> None:
    """Reject block tables that are not int32 `[batch, width]` or have no column."""
    check_int32("block_tables", block_tables, (None, None), "batch, width")
    if block_tables.shape[1] == 0:
        raise KernelArgumentError(
            f"block_tables must have a width of at least 1, got {list(block_tables.shape)}"
        )


def check_positive(name: str, value: float | None) -> None:
    """Reject an option that is not a finite positive Python number (None: option not used)."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, Real):
        raise KernelArgumentError(
            f"{name} must be a Python number, got {type(value).__name__}: it is compiled in"
        )
    if not (math.isfinite(value) and value > 0):
        raise KernelArgumentError(f"{name} must be finite and > 0, got {value}")


def check_window(window: int | None) -> None:
    """Reject a sliding window that is not a positive Python int (None: no window)."""
    if window is None:
        return
    if isinstance(window, bool) or not isinstance(window, int):
        raise KernelArgumentError(
            f"window must be a Python int, got {type(window).__name__}: it is compiled in"
        )
    if window < 1:
        raise KernelArgumentError(f"window must be >= 1 position, got {window}")
    if window >= 2**31:
        raise KernelArgumentError(f"window must be < 2**31 positions, got {window}")


def check_sinks(sinks: jax.Array | None, num_q_heads: int) -> None:
    """Reject attention sinks that are not one float per query head (None: no sinks)."""
    if sinks is not None:
        check_shape("sinks", sinks, (num_q_heads,), "q_heads")
        check_float("sinks", sinks)

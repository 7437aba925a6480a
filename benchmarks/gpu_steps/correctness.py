"""Compare each kernel with the oracle of the tests; a run on a new machine starts with this."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from radixkv.kernels import (
    copy_blocks,
    gather_blocks,
    kv_write,
    latent_decode,
    paged_decode,
    paged_extend,
    scatter_blocks,
)

from .problems import Record

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.kernels import oracle
from tests.kernels.problems import TOLERANCE, Heads, int32, make_cache, make_queries

sys.path.pop(0)  # the checkout's `kernels` would shadow other packages of that name

OPTIONS = {"soft_cap": 5.0, "window": 90}
HEADS = Heads(2, 4, 128)
# heads, block size, dtype of queries, dtype of pools, whether to use all options
CASES = (
    (HEADS, 16, "bfloat16", "bfloat16", False),
    (HEADS, 64, "bfloat16", "bfloat16", False),
    (HEADS, 128, "bfloat16", "bfloat16", False),
    (HEADS, 32, "bfloat16", "bfloat16", True),
    (Heads(2, 7, 64), 16, "float16", "float16", True),
    (Heads(2, 4, 80), 16, "bfloat16", "bfloat16", True),
    (Heads(2, 3, 96), 64, "bfloat16", "bfloat16", False),
    (Heads(1, 64, 64), 16, "bfloat16", "bfloat16", True),
    (Heads(2, 4, 112), 32, "float16", "float16", True),
    (Heads(1, 2, 192), 64, "bfloat16", "bfloat16", False),
    (Heads(1, 2, 256), 64, "bfloat16", "bfloat16", True),
    (HEADS, 64, "bfloat16", "int8", True),
    (Heads(2, 4, 64), 16, "bfloat16", "float8_e4m3fn", False),
)


def _compare(kernel: str, case: str, got: Any, expected: np.ndarray, dtype: str) -> Record:
    """Relative error of the finite numbers; inf if NaN or inf are in other places than expected."""
    numbers = np.asarray(jnp.asarray(got, jnp.float32), np.float64)
    finite = np.isfinite(expected)
    error = float("inf")
    if np.array_equal(np.isfinite(numbers), finite):
        difference = np.linalg.norm(numbers[finite] - expected[finite])
        error = float(difference / np.linalg.norm(expected[finite]))
    bound = TOLERANCE[dtype]
    return {"check": kernel, "case": case, "error": error, "bound": bound, "ok": error <= bound}


def _attention(kernel: str, dry: bool) -> Iterator[Record]:
    for heads, block_size, dtype, pool_dtype, everything in CASES[:1] if dry else CASES:
        rng = np.random.default_rng(0)
        lengths = [0, 1, block_size - 1, block_size, block_size + 1, 700]
        lengths += [] if dry else [3000]
        width = -(-max(lengths) // block_size) + 3
        num_blocks = sum(-(-length // block_size) for length in lengths) + 5
        cache = make_cache(
            rng,
            lengths,
            block_size=block_size,
            width=width,
            num_blocks=num_blocks,
            heads=heads,
            dtype=pool_dtype,
        )
        options: dict[str, Any] = {"sm_scale": heads.head_dim**-0.5}
        if everything:
            sinks = rng.standard_normal(heads.q_heads).astype(np.float32)
            options |= OPTIONS | {"sinks": jnp.asarray(sinks)}
        call = _decode if kernel == "paged_decode" else _extend
        got, expected = call(rng, cache, lengths, heads, dtype, options)
        case = f"blocks of {block_size}, {heads}, {dtype}, {pool_dtype}, options: {everything}"
        for part, one, other in zip(("output", "lse"), got, expected, strict=True):
            yield _compare(kernel, f"{case}: {part}", one, other, dtype)


def _float64(q: jax.Array) -> np.ndarray:
    return np.asarray(q.astype(jnp.float32), np.float64)


def _decode(
    rng: np.random.Generator,
    cache: Any,
    lengths: list[int],
    heads: Heads,
    dtype: str,
    options: dict[str, Any],
) -> tuple[Any, Any]:
    q = make_queries(rng, len(lengths), heads, dtype)
    pools = cache.k_blocks, cache.v_blocks, cache.block_tables
    got = paged_decode(q, *pools, int32(lengths), return_lse=True, **options, **cache.scales)
    return got, oracle.decode(_float64(q), *cache.for_oracle, lengths, **options)


def _extend(
    rng: np.random.Generator,
    cache: Any,
    lengths: list[int],
    heads: Heads,
    dtype: str,
    options: dict[str, Any],
) -> tuple[Any, Any]:
    new = [min(length, 1 + 37 * i) for i, length in enumerate(lengths)]
    starts = [int(start) for start in np.cumsum([0, *new[:-1]])]
    q = make_queries(rng, sum(new), heads, dtype)
    rows = lengths, new, starts
    got = paged_extend(
        q,
        cache.k_blocks,
        cache.v_blocks,
        cache.block_tables,
        *(int32(each) for each in rows),
        return_lse=True,
        **options,
        **cache.scales,
    )
    return got, oracle.extend(_float64(q), *cache.for_oracle, *rows, **options)


def _latents(dry: bool) -> Iterator[Record]:
    """Compare with the portable code in float32."""
    q_heads, latent_dim, value_dim = (4, 24, 16) if dry else (128, 576, 512)
    rng = np.random.default_rng(0)
    lengths = [0, 1, 63, 64, 65, 700]
    tables = int32(1 + rng.permutation(len(lengths) * 11).reshape(len(lengths), 11))
    options = {"sm_scale": latent_dim**-0.5, "value_dim": value_dim}
    q, pool = (
        jnp.asarray(rng.standard_normal(shape), jnp.bfloat16)
        for shape in ((len(lengths), q_heads, latent_dim), (70, 1, 64, latent_dim))
    )
    got = latent_decode(q, pool, tables, int32(lengths), **options)
    wide = q.astype(jnp.float32), pool.astype(jnp.float32)
    expected = latent_decode(*wide, tables, int32(lengths), **options, backend="xla")
    case = f"blocks of 64, {q_heads} heads of {latent_dim}"
    yield _compare("latent_decode", case, got, np.asarray(expected, np.float64), "bfloat16")


def _equal(kernel: str, case: str, got: Any, expected: np.ndarray) -> Record:
    same = np.array_equal(np.asarray(got).view(np.uint16), expected.view(np.uint16))
    return {"check": kernel, "case": case, "error": 0.0 if same else 1.0, "bound": 0.0, "ok": same}


def _moves() -> Iterator[Record]:
    """Compare the block copies bit by bit, including blocks that must not change."""
    rng = np.random.default_rng(0)
    for block_size in (16, 64):
        shape = (200, 4, block_size, 128)
        pools = [np.asarray(jnp.asarray(rng.standard_normal(shape), "bfloat16")) for _ in range(3)]
        ids = rng.permutation(200).astype(np.int32)
        sources, targets, count = ids[:64], ids[64:128], 60
        on_device = tuple(jnp.asarray(pool) for pool in pools)
        gathered = gather_blocks(on_device, int32(sources), jnp.int32(count))
        copied = copy_blocks(on_device, int32(sources), int32(targets), jnp.int32(count))
        written = scatter_blocks(on_device, gathered, int32(targets), jnp.int32(count))
        for index, pool in enumerate(pools):
            case = f"blocks of {block_size}, pool {index}"
            staging = pool[sources].copy()
            staging[count:] = 0
            yield _equal("gather_blocks", case, gathered[index], staging)
            expected = pool.copy()
            expected[targets[:count]] = pool[sources[:count]]
            yield _equal("copy_blocks", case, copied[index], expected)
            yield _equal("scatter_blocks", case, written[index], expected)


def _writes() -> Iterator[Record]:
    rng = np.random.default_rng(0)
    for block_size in (16, 128):
        bits = lambda shape: np.asarray(jnp.asarray(rng.standard_normal(shape), "bfloat16"))  # noqa: E731
        k, v = (bits((20, 4, block_size, 128)) for _ in "kv")
        new_k, new_v = (bits((300, 4, 128)) for _ in "kv")
        slots = rng.permutation(20 * block_size)[:300].astype(np.int32)
        slots[::7] = -1
        got = kv_write(*(jnp.asarray(each) for each in (new_k, new_v, slots, k, v)))
        live = slots >= 0
        for name, pool, new, result in zip("kv", (k, v), (new_k, new_v), got, strict=True):
            expected = pool.copy()
            expected[slots[live] // block_size, :, slots[live] % block_size] = new[live]
            yield _equal("kv_write", f"blocks of {block_size}, {name}", result, expected)


def check(kernel: str, dry: bool) -> Iterator[Record]:
    """Yield the records of one kernel's cases."""
    if kernel == "moves":
        return _moves()
    if kernel == "latent_decode":
        return _latents(dry)
    if kernel == "kv_write":
        return _writes()
    return _attention(kernel, dry)

"""Measure the ceilings of the machine, and the kernels of this library in both backends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from radixkv.kernels import (
    copy_blocks,
    gather_blocks,
    kv_write,
    paged_decode,
    paged_extend,
    scatter_blocks,
)

from .problems import HEADLINE, Record, Row, Sizes, point
from .timing import kernel_seconds, time_in_place, time_jax

DTYPE = "bfloat16"


def normal(seed: int, shape: tuple[int, ...]) -> jax.Array:
    """Random numbers, because tensor cores draw less power and run faster on zeros."""
    return jax.random.normal(jax.random.key(seed), shape, DTYPE)


def ceilings(sizes: Sizes) -> Iterator[Record]:
    """Measure the bytes per second of a copy and the FLOP/s of a matrix product."""
    numbers = jnp.zeros(sizes.copy_bytes // 4, jnp.int32)
    seconds = time_in_place(lambda x: x + 1, [()], numbers, sizes)
    yield {"ceiling": "copy", "rate": 2 * sizes.copy_bytes / seconds, "unit": "B/s"}
    size = sizes.matrix
    a, *others = (normal(seed, (size, size)) for seed in range(1 + min(4, sizes.calls)))
    seconds = time_jax(jnp.matmul, [(b,) for b in others], (a,), sizes)
    yield {"ceiling": "matrix product", "rate": 2 * size**3 / seconds, "unit": "FLOP/s"}


def make_pools(sizes: Sizes, block_size: int) -> tuple[jax.Array, jax.Array]:
    """K and V pools of `pool_tokens` tokens and the padding sink."""
    shape = (sizes.pool_tokens // block_size + 1, sizes.kv_heads, block_size, sizes.head_dim)
    return normal(1, shape), normal(2, shape)


def make_tables(
    sizes: Sizes, block_size: int, lengths: list[int], most: int, seed: int = 0
) -> list[jax.Array]:
    """Block tables of several calls, with different blocks as long as the pool suffices."""
    width = max(-(-length // block_size) for length in lengths)
    shuffled = np.random.default_rng(seed).permutation(sizes.pool_tokens // block_size) + 1
    need = len(lengths) * width
    assert need <= len(shuffled), f"{need} blocks wanted, {len(shuffled)} in the pool"
    calls = max(2, min(most, len(shuffled) // need))
    return [
        jnp.asarray(np.roll(shuffled, -call * need)[:need].reshape(-1, width), jnp.int32)
        for call in range(calls)
    ]


def _decode_call(sizes: Sizes, backend: Any) -> Callable[..., jax.Array]:
    def attend(q: Any, k: Any, v: Any, lengths: Any, table: Any) -> jax.Array:
        scale = sizes.head_dim**-0.5
        return paged_decode(q, k, v, table, lengths, sm_scale=scale, backend=backend)

    return attend


def kernel_times(sizes: Sizes, backend: Any) -> Iterator[Record]:
    """Measure the kernels of `paged_decode` alone, without launch overhead."""
    pools = make_pools(sizes, HEADLINE)
    for batch, length in sizes.decode:
        q = normal(3, (batch, sizes.q_heads, sizes.head_dim))
        table = make_tables(sizes, HEADLINE, [length] * batch, 2)[0]
        lengths = jnp.full(batch, length, jnp.int32)
        seconds = kernel_seconds(_decode_call(sizes, backend), q, *pools, lengths, table)
        yield {"kernels_of": f"decode {point(batch, length)}", "seconds": seconds}


def decode(sizes: Sizes, backend: Any) -> Iterator[Record]:
    """Measure `paged_decode` at every point and, with Mosaic, for every block size."""
    for block_size in sizes.block_sizes if backend != "xla" else (HEADLINE,):
        pools = make_pools(sizes, block_size)
        for batch, length in sizes.decode:
            q = normal(3, (batch, sizes.q_heads, sizes.head_dim))
            tables = make_tables(sizes, block_size, [length] * batch, sizes.calls)
            lengths = jnp.full(batch, length, jnp.int32)

            shared = (q, *pools, lengths)
            attend = _decode_call(sizes, backend)
            seconds = time_jax(attend, [(table,) for table in tables], shared, sizes)
            yield {
                "operation": "decode",
                "point": point(batch, length),
                "block_size": block_size,
                "seconds": seconds,
                "bytes": sizes.kv_bytes(batch * length),
            }


def extend_arguments(
    sizes: Sizes, block_size: int, rows: tuple[Row, ...]
) -> tuple[jax.Array, list[jax.Array], tuple[jax.Array, ...]]:
    """Queries, block tables of two calls, and (kv_lengths, q_lengths, q_starts)."""
    new = np.array([row.new for row in rows])
    starts = np.cumsum([0, *(-(-new // 8) * 8)])
    total = [row.new + row.cached for row in rows]
    q = normal(3, (int(starts[-1]), sizes.q_heads, sizes.head_dim))
    numbers = tuple(jnp.asarray(each, jnp.int32) for each in (total, new, starts[:-1]))
    return q, make_tables(sizes, block_size, total, 2), numbers


def extend(sizes: Sizes, backend: Any) -> Iterator[Record]:
    """Measure `paged_extend` at every point and, with Mosaic, for every block size."""
    for block_size in sizes.block_sizes if backend != "xla" else (HEADLINE,):
        pools = make_pools(sizes, block_size)
        for name, rows in sizes.extend.items():
            q, tables, numbers = extend_arguments(sizes, block_size, rows)

            def attend(q: Any, k: Any, v: Any, *numbers_and_table: Any) -> jax.Array:
                *numbers, table = numbers_and_table
                scale = sizes.head_dim**-0.5
                return paged_extend(q, k, v, table, *numbers, sm_scale=scale, backend=backend)

            shared = (q, *pools, *numbers)
            seconds = time_jax(attend, [(table,) for table in tables], shared, sizes)
            yield {
                "operation": "extend",
                "point": name,
                "block_size": block_size,
                "seconds": seconds,
                "flops": sizes.attention_flops(rows),
            }


def moves(sizes: Sizes, backend: Any) -> Iterator[Record]:
    """Measure block copies over several pools and `kv_write`; bytes count reads and writes."""
    for block_size in (HEADLINE, 16):
        yield from _block_moves(sizes, block_size, backend)
    yield _kv_write(sizes, backend)


def _block_moves(sizes: Sizes, block_size: int, backend: Any) -> Iterator[Record]:
    num_blocks = 4 * max(sizes.moved_blocks)
    shape = (num_blocks + 1, sizes.kv_heads, block_size, sizes.head_dim)
    for count in sizes.moved_blocks:
        ids = np.random.default_rng(count).permutation(num_blocks).astype(np.int32) + 1
        four = [jnp.asarray(ids[i * count : (i + 1) * count]) for i in range(4)]
        number = jnp.int32(count)
        pools = tuple(normal(seed, shape) for seed in range(sizes.moved_pools))
        moved = count * int(np.prod(shape[1:])) * 2 * sizes.moved_pools
        found = {
            "gather": time_jax(
                lambda p, n, i: gather_blocks(p, i, n, backend=backend),
                [(each,) for each in four[:2]],
                (pools, number),
                sizes,
            )
        }
        staging = gather_blocks(pools, four[0], number, backend="xla")
        found["scatter"] = time_in_place(
            lambda p, s, i, n: scatter_blocks(p, s, i, n, backend=backend),
            [(staging, each, number) for each in four],
            pools,
            sizes,
        )
        del staging
        pools = tuple(normal(seed, shape) for seed in range(sizes.moved_pools))
        found["copy"] = time_in_place(
            lambda p, a, b, n: copy_blocks(p, a, b, n, backend=backend),
            [(four[0], four[1], number), (four[2], four[3], number)],
            pools,
            sizes,
        )
        for operation, seconds in found.items():
            yield {
                "operation": operation,
                "point": f"{count} blocks",
                "block_size": block_size,
                "seconds": seconds,
                "bytes": 2 * moved,
            }


def _kv_write(sizes: Sizes, backend: Any) -> Record:
    pools = make_pools(sizes, HEADLINE)
    shape = (sizes.written_tokens, sizes.kv_heads, sizes.head_dim)
    slots = np.random.default_rng(0).permutation(sizes.pool_tokens) + HEADLINE
    calls = [
        (normal(2 * i, shape), normal(2 * i + 1, shape), jnp.asarray(part, jnp.int32))
        for i, part in enumerate(np.split(slots[: 4 * sizes.written_tokens], 4))
    ]
    seconds = time_in_place(
        lambda pools, k, v, slots: kv_write(k, v, slots, *pools, backend=backend),
        calls,
        pools,
        sizes,
    )
    return {
        "operation": "kv_write",
        "point": f"{sizes.written_tokens} tokens",
        "block_size": HEADLINE,
        "seconds": seconds,
        "bytes": 2 * sizes.kv_bytes(sizes.written_tokens),
    }

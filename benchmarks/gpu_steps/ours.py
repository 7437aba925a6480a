"""The ceilings of the machine, and the kernels of this library in both backends."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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

from .problems import HEADLINE, Kind, Record, Row, Sizes, point
from .timing import Timing, kernel_seconds, measure

DTYPE = "bfloat16"


def normal(seed: int, shape: tuple[int, ...]) -> jax.Array:
    """Random numbers, because tensor cores draw less power and run faster on zeros."""
    return jax.random.normal(jax.random.key(seed), shape, DTYPE)


def ceilings(sizes: Sizes) -> Iterator[Record]:
    """Measure the bytes per second of a copy and the FLOP/s of a matrix product."""
    size = sizes.matrix

    def numbers() -> Any:
        return jnp.zeros(sizes.copy_bytes // 4, jnp.int32), [()]

    def matrices() -> Any:
        a, *others = (normal(seed, (size, size)) for seed in range(1 + min(4, sizes.calls)))
        return (a,), [(b,) for b in others]

    copy = Timing({"ceiling": "copy", "unit": "B/s"}, lambda x: x + 1, numbers, is_in_place=True)
    product = Timing({"ceiling": "matrix product", "unit": "FLOP/s"}, jnp.matmul, matrices)
    works = 2 * sizes.copy_bytes, 2 * size**3
    for work, record in zip(works, measure([copy, product], sizes), strict=True):
        yield record | {"rate": work / record["seconds"]}


def make_pools(
    sizes: Sizes, block_size: int, kind: Kind | None = None
) -> tuple[jax.Array, jax.Array]:
    """K and V pools of `pool_tokens` tokens and the padding sink."""
    head_dim = sizes.head_dim if kind is None else kind.head_dim
    shape = (sizes.pool_tokens // block_size + 1, sizes.kv_heads, block_size, head_dim)
    pools = normal(1, shape), normal(2, shape)
    if kind is None or kind.dtype == DTYPE:
        return pools
    return (30 * pools[0]).astype(kind.dtype), (30 * pools[1]).astype(kind.dtype)


def make_scales(sizes: Sizes, pool: jax.Array) -> dict[str, jax.Array]:
    """Arguments that a quantised pool needs."""
    if pool.dtype == DTYPE:
        return {}
    scales = jnp.full((pool.shape[0], sizes.kv_heads), 1 / 30, jnp.float32)
    return {"k_scales": scales, "v_scales": scales}


def make_tables(
    sizes: Sizes, block_size: int, lengths: Sequence[int], most: int, seed: int = 0
) -> list[jax.Array]:
    """Block tables of several calls, with different blocks as long as the pool suffices."""
    counts = [-(-length // block_size) for length in lengths]
    ends, need = np.cumsum(counts), sum(counts)
    shuffled = np.random.default_rng(seed).permutation(sizes.pool_tokens // block_size) + 1
    assert need <= len(shuffled), f"{need} blocks wanted, {len(shuffled)} in the pool"
    tables = np.zeros((max(2, min(most, len(shuffled) // need)), len(counts), max(counts)))
    for call, table in enumerate(tables):
        parts = np.split(np.roll(shuffled, -call * need)[:need], ends[:-1])
        for row, ids in zip(table, parts, strict=True):
            row[: len(ids)] = ids
    return [jnp.asarray(table, jnp.int32) for table in tables]


def _attend_one(head_dim: int, backend: Any) -> Callable[..., jax.Array]:
    def attend(
        q: Any, k: Any, v: Any, lengths: Any, scales: dict[str, Any], table: Any
    ) -> jax.Array:
        scale = head_dim**-0.5
        return paged_decode(q, k, v, table, lengths, sm_scale=scale, backend=backend, **scales)

    return attend


def kernel_times(sizes: Sizes, backend: Any) -> Iterator[Record]:
    """Measure the kernels of `paged_decode` alone, without launch overhead."""
    pools = make_pools(sizes, HEADLINE)
    for batch, length in sizes.decode:
        q = normal(3, (batch, sizes.q_heads, sizes.head_dim))
        table = make_tables(sizes, HEADLINE, [length] * batch, 2)[0]
        lengths = jnp.full(batch, length, jnp.int32)
        attend = _attend_one(sizes.head_dim, backend)
        seconds = kernel_seconds(attend, q, *pools, lengths, {}, table)
        yield {"kernels_of": f"decode {point(batch, length)}", "seconds": seconds}


def decode(sizes: Sizes, backend: Any) -> Iterator[Timing]:
    """`paged_decode` at every point and, with Mosaic, for every block size and kind of pool."""
    rectangles = {point(*each): [each[1]] * each[0] for each in sizes.decode}
    for block_size in sizes.block_sizes if backend != "xla" else (HEADLINE,):
        for name, lengths in rectangles.items():
            yield _decode(sizes, backend, block_size, name, lengths)
    for name, mixed in sizes.mixed.items():
        yield _decode(sizes, backend, HEADLINE, name, mixed)
    if backend == "xla":
        return
    name, rows = next(iter(rectangles.items()))
    for kind in sizes.decode_kinds:
        yield _decode(sizes, backend, HEADLINE, f"{name}, {kind.dtype} {kind.head_dim}", rows, kind)


def _decode(
    sizes: Sizes,
    backend: Any,
    block_size: int,
    name: str,
    lengths: Sequence[int],
    kind: Kind | None = None,
) -> Timing:
    head_dim = sizes.head_dim if kind is None else kind.head_dim
    # Few rows are split into many parts, which take seconds to compile for each call.
    most = sizes.calls if len(lengths) >= 8 else min(4, sizes.calls)

    def make() -> Any:
        q = normal(3, (len(lengths), sizes.q_heads, head_dim))
        pools = make_pools(sizes, block_size, kind)
        shared = (q, *pools, jnp.asarray(lengths, jnp.int32), make_scales(sizes, pools[0]))
        return shared, [(table,) for table in make_tables(sizes, block_size, lengths, most)]

    record = {
        "operation": "decode",
        "point": name,
        "block_size": block_size,
        "bytes": sizes.kv_bytes(sum(lengths), kind),
    }
    return Timing(record, _attend_one(head_dim, backend), make)


def extend(sizes: Sizes, backend: Any) -> Iterator[Timing]:
    """`paged_extend` at every point and, with Mosaic, for every block size."""
    for block_size in sizes.block_sizes if backend != "xla" else (HEADLINE,):
        for name, rows in sizes.extend.items():
            yield _extend(sizes, backend, block_size, name, rows)


def _extend(
    sizes: Sizes, backend: Any, block_size: int, name: str, rows: tuple[Row, ...]
) -> Timing:
    new = np.array([row.new for row in rows])
    starts = np.cumsum([0, *(-(-new // 8) * 8)])
    total = [row.new + row.cached for row in rows]

    def make() -> Any:
        q = normal(3, (int(starts[-1]), sizes.q_heads, sizes.head_dim))
        numbers = (jnp.asarray(each, jnp.int32) for each in (total, new, starts[:-1]))
        shared = (q, *make_pools(sizes, block_size), *numbers)
        return shared, [(table,) for table in make_tables(sizes, block_size, total, 2)]

    def attend(q: Any, k: Any, v: Any, *numbers_and_table: Any) -> jax.Array:
        *numbers, table = numbers_and_table
        scale = sizes.head_dim**-0.5
        return paged_extend(q, k, v, table, *numbers, sm_scale=scale, backend=backend)

    record = {
        "operation": "extend",
        "point": name,
        "block_size": block_size,
        "flops": sizes.attention_flops(rows),
    }
    return Timing(record, attend, make)


def moves(sizes: Sizes, backend: Any) -> Iterator[Timing]:
    """Block copies over several pools, and `kv_write`; bytes count reads and writes."""
    for block_size in (HEADLINE, 16):
        for count in sizes.moved_blocks:
            yield from _block_moves(sizes, block_size, count, backend)
    yield _kv_write(sizes, backend)


def _block_moves(sizes: Sizes, block_size: int, count: int, backend: Any) -> Iterator[Timing]:
    num_blocks = 4 * max(sizes.moved_blocks)
    shape = (num_blocks + 1, sizes.kv_heads, block_size, sizes.head_dim)
    ids = np.random.default_rng(count).permutation(num_blocks).astype(np.int32) + 1
    parts = [ids[i * count : (i + 1) * count] for i in range(4)]

    def make_pools_and_number() -> Any:
        return tuple(normal(seed, shape) for seed in range(sizes.moved_pools)), jnp.int32(count)

    def to_gather() -> Any:
        return make_pools_and_number(), [(jnp.asarray(each),) for each in parts[:2]]

    def to_scatter() -> Any:
        pools, number = make_pools_and_number()
        staging = gather_blocks(pools, jnp.asarray(parts[0]), number, backend="xla")
        return pools, [(staging, jnp.asarray(each), number) for each in parts]

    def to_copy() -> Any:
        pools, number = make_pools_and_number()
        first, second, third, fourth = map(jnp.asarray, parts)
        return pools, [(first, second, number), (third, fourth, number)]

    about = {
        "point": f"{count} blocks",
        "block_size": block_size,
        "bytes": 2 * count * int(np.prod(shape[1:])) * 2 * sizes.moved_pools,
    }
    yield Timing(
        {"operation": "gather"} | about,
        lambda p, n, i: gather_blocks(p, i, n, backend=backend),
        to_gather,
    )
    yield Timing(
        {"operation": "scatter"} | about,
        lambda p, s, i, n: scatter_blocks(p, s, i, n, backend=backend),
        to_scatter,
        is_in_place=True,
    )
    yield Timing(
        {"operation": "copy"} | about,
        lambda p, a, b, n: copy_blocks(p, a, b, n, backend=backend),
        to_copy,
        is_in_place=True,
    )


def _kv_write(sizes: Sizes, backend: Any) -> Timing:
    shape = (sizes.written_tokens, sizes.kv_heads, sizes.head_dim)
    slots = np.random.default_rng(0).permutation(sizes.pool_tokens) + HEADLINE

    def make() -> Any:
        calls = [
            (normal(2 * i, shape), normal(2 * i + 1, shape), jnp.asarray(part, jnp.int32))
            for i, part in enumerate(np.split(slots[: 4 * sizes.written_tokens], 4))
        ]
        return make_pools(sizes, HEADLINE), calls

    record = {
        "operation": "kv_write",
        "point": f"{sizes.written_tokens} tokens",
        "block_size": HEADLINE,
        "bytes": 2 * sizes.kv_bytes(sizes.written_tokens),
    }
    return Timing(
        record,
        lambda pools, k, v, slots: kv_write(k, v, slots, *pools, backend=backend),
        make,
        is_in_place=True,
    )

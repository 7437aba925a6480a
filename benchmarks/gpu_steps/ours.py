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
    latent_decode,
    paged_decode,
    paged_extend,
    scatter_blocks,
)

from .problems import HEADLINE, Kind, Record, Row, Sizes, point
from .timing import Timing, kernel_seconds, measure

DTYPE = "bfloat16"
Attend = Callable[..., jax.Array]


def normal(seed: int, shape: tuple[int, ...]) -> jax.Array:
    """Random numbers, because tensor cores draw less power and run faster on zeros."""
    return jax.random.normal(jax.random.key(seed), shape, DTYPE)


def ceilings(sizes: Sizes, start_clock: Callable[[], object]) -> Iterator[Record]:
    """Measure the bytes per second of a copy and the FLOP/s of a matrix product."""
    size = sizes.matrix

    def numbers() -> Any:
        return jnp.zeros(sizes.copy_bytes // 4, jnp.int32), [()]

    def matrices() -> Any:
        a, *others = (normal(seed, (size, size)) for seed in range(1 + min(4, sizes.calls)))
        return (a,), [(b,) for b in others]

    copy = Timing({"ceiling": "copy", "unit": "B/s"}, lambda x: x + 1, numbers, is_in_place=True)
    product = Timing({"ceiling": "matrix product", "unit": "FLOP/s"}, jnp.matmul, matrices)
    works = {"copy": 2 * sizes.copy_bytes, "matrix product": 2 * size**3}
    for record in measure([copy, product], sizes, start_clock):
        if "seconds" in record:
            record["rate"] = works[record["ceiling"]] / record["seconds"]
        yield record


def launch(sizes: Sizes, problem: str, backend: Any) -> Iterator[Record]:
    """Launch a kernel at least twice, for a profiler; the problems are those of `tools.COUNTED`."""
    name, lengths = point(*sizes.decode[0]), [sizes.decode[0][1]] * sizes.decode[0][0]
    quantised = next(kind for kind in sizes.kinds if kind.dtype == "int8")
    timings: dict[str, Callable[[], Timing]] = {
        "decode": lambda: decode_timing(sizes, backend, HEADLINE, name, lengths),
        "decode int8": lambda: decode_timing(sizes, backend, HEADLINE, name, lengths, quantised),
        "extend": lambda: extend_timing(
            sizes, backend, HEADLINE, *next(iter(sizes.extend.items()))
        ),
        "copy": lambda: list(_block_moves(sizes, HEADLINE, sizes.moved_blocks[0], backend))[-1],
    }
    timing = timings[problem]()
    jax.block_until_ready(timing.compile()(*timing.make()))
    yield timing.record


def make_pools(
    sizes: Sizes, block_size: int, kind: Kind | None = None
) -> tuple[jax.Array, jax.Array]:
    """K and V pools of `pool_tokens` tokens and the padding sink."""
    kind = kind or sizes.kind
    shape = (sizes.pool_tokens // block_size + 1, sizes.kv_heads, block_size, kind.head_dim)
    pools = normal(1, shape), normal(2, shape)
    if kind.dtype == DTYPE:
        return pools
    return (30 * pools[0]).astype(kind.dtype), (30 * pools[1]).astype(kind.dtype)


def make_scales(sizes: Sizes, pool: jax.Array) -> tuple[jax.Array, jax.Array] | None:
    """Dequantisation scales of K and V that a quantised pool needs."""
    if pool.dtype == DTYPE:
        return None
    scales = jnp.full((pool.shape[0], sizes.kv_heads), 1 / 30, jnp.float32)
    return scales, scales


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


def _public_decode(sm_scale: float, backend: Any) -> Attend:
    def attend(q: Any, k: Any, v: Any, tables: Any, lengths: Any, scales: Any) -> jax.Array:
        out = paged_decode(
            q, k, v, tables, lengths, sm_scale=sm_scale, backend=backend, **_named(scales)
        )
        assert isinstance(out, jax.Array)
        return out

    return attend


def _public_extend(sm_scale: float, backend: Any) -> Attend:
    def attend(q: Any, k: Any, v: Any, tables: Any, *rows_and_scales: Any) -> jax.Array:
        *rows, scales = rows_and_scales
        out = paged_extend(
            q, k, v, tables, *rows, sm_scale=sm_scale, backend=backend, **_named(scales)
        )
        assert isinstance(out, jax.Array)
        return out

    return attend


def _named(scales: Any) -> dict[str, Any]:
    return {} if scales is None else {"k_scales": scales[0], "v_scales": scales[1]}


def kernel_times(sizes: Sizes, backend: Any) -> Iterator[Record]:
    """Measure the kernels of `paged_decode` alone, without launch overhead."""
    for batch, length in sizes.decode:
        name, lengths = point(batch, length), [length] * batch
        timing = decode_timing(sizes, backend, HEADLINE, name, lengths)
        shared, calls = timing.make()
        seconds = kernel_seconds(timing.function, *shared, *calls[0])
        yield {"kernels_of": f"decode {name}", "seconds": seconds}


def decode(sizes: Sizes, backend: Any) -> Iterator[Timing]:
    """`paged_decode` at every point and, with Mosaic, for every block size and kind of pool."""
    rectangles = {point(*each): [each[1]] * each[0] for each in sizes.decode}
    for block_size in sizes.block_sizes if backend != "xla" else (HEADLINE,):
        for name, lengths in rectangles.items():
            yield decode_timing(sizes, backend, block_size, name, lengths)
    for name, mixed in sizes.mixed.items():
        yield decode_timing(sizes, backend, HEADLINE, name, mixed)
    if backend == "xla":
        return
    name, rows = next(iter(rectangles.items()))
    for kind in sizes.kinds:
        label = f"{name}, {kind.dtype} {kind.head_dim} x {kind.group}"
        yield decode_timing(sizes, backend, HEADLINE, label, rows, kind)
    yield _latent_decode(sizes, backend, name, rows)


def _latent_decode(sizes: Sizes, backend: Any, name: str, rows: list[int]) -> Timing:
    q_heads, latent_dim, value_dim = sizes.latent

    def make() -> Any:
        q = normal(3, (len(rows), q_heads, latent_dim))
        pool = normal(1, (sizes.pool_tokens // HEADLINE + 1, 1, HEADLINE, latent_dim))
        tables = make_tables(sizes, HEADLINE, rows, sizes.calls)
        return (q, pool, jnp.asarray(rows, jnp.int32)), [(table,) for table in tables]

    def attend(q: Any, pool: Any, lengths: Any, table: Any) -> jax.Array:
        scale = latent_dim**-0.5
        return latent_decode(
            q, pool, table, lengths, sm_scale=scale, value_dim=value_dim, backend=backend
        )

    record = {
        "operation": "latent_decode",
        "point": f"{name}, {q_heads} heads",
        "block_size": HEADLINE,
        "bytes": 2 * latent_dim * sum(rows),
    }
    return Timing(record, attend, make)


def decode_timing(
    sizes: Sizes,
    backend: Any,
    block_size: int,
    name: str,
    lengths: Sequence[int],
    kind: Kind | None = None,
    attend: Attend | None = None,
) -> Timing:
    """A timing of `paged_decode`, or of `attend` with its arguments and the scales last."""
    heads = kind or sizes.kind
    # Few rows are split into many parts, which take seconds to compile for each call.
    most = sizes.calls if len(lengths) >= 8 else min(4, sizes.calls)
    function = attend or _public_decode(heads.head_dim**-0.5, backend)

    def make() -> Any:
        q = normal(3, (len(lengths), sizes.kv_heads * heads.group, heads.head_dim))
        k, v = make_pools(sizes, block_size, kind)
        shared = (q, k, v, jnp.asarray(lengths, jnp.int32), make_scales(sizes, k))
        return shared, [(table,) for table in make_tables(sizes, block_size, lengths, most)]

    def call(q: Any, k: Any, v: Any, lengths: Any, scales: Any, table: Any) -> jax.Array:
        return function(q, k, v, table, lengths, scales)

    record = {
        "operation": "decode",
        "point": name,
        "block_size": block_size,
        "bytes": sizes.kv_bytes(sum(lengths), kind),
    }
    return Timing(record, call, make)


def extend(sizes: Sizes, backend: Any) -> Iterator[Timing]:
    """`paged_extend` at every point and, with Mosaic, for every block size."""
    for block_size in sizes.block_sizes if backend != "xla" else (HEADLINE,):
        for name, rows in sizes.extend.items():
            yield extend_timing(sizes, backend, block_size, name, rows)


def extend_timing(
    sizes: Sizes,
    backend: Any,
    block_size: int,
    name: str,
    rows: tuple[Row, ...],
    kind: Kind | None = None,
    attend: Attend | None = None,
) -> Timing:
    """A timing of `paged_extend`, or of `attend` with its arguments and the scales last."""
    heads = kind or sizes.kind
    new = np.array([row.new for row in rows])
    starts = np.cumsum([0, *(-(-new // 8) * 8)])
    total = [row.new + row.cached for row in rows]
    function = attend or _public_extend(heads.head_dim**-0.5, backend)

    def make() -> Any:
        q = normal(3, (int(starts[-1]), sizes.kv_heads * heads.group, heads.head_dim))
        k, v = make_pools(sizes, block_size, kind)
        arrays = tuple(jnp.asarray(each, jnp.int32) for each in (total, new, starts[:-1]))
        shared = (q, k, v, arrays, make_scales(sizes, k))
        return shared, [(table,) for table in make_tables(sizes, block_size, total, 2)]

    def call(q: Any, k: Any, v: Any, arrays: Any, scales: Any, table: Any) -> jax.Array:
        return function(q, k, v, table, *arrays, scales)

    record = {
        "operation": "extend",
        "point": name,
        "block_size": block_size,
        "flops": sizes.attention_flops(rows, kind),
    }
    return Timing(record, call, make)


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

"""The work list of the Mosaic `paged_decode`: every tile once, in shares of the same size."""

from functools import cache
from types import ModuleType
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.kernels.paged_decode import work_list
from radixkv.kernels.paged_decode.config import SMALLEST_SHARE

from .problems import int32

TILE, CAPACITY = 64, 2048


@cache
def built(module: ModuleType, kv_heads: int, programs: int, window: int | None) -> Any:
    """Return the program that builds a work list and its split pairs, as the kernel's does."""

    def build(lengths: Any) -> Any:
        work = module.build_work_list(
            lengths, kv_heads=kv_heads, programs=programs, tile_tokens=TILE, window=window,
            capacity=CAPACITY,
        )  # fmt: skip
        return work, work.split_pairs()

    return jax.jit(build)


def check_split_pairs(split_pairs: Any, parts: dict[int, list[tuple[int, int, int]]]) -> None:
    """Each pair of several parts is there once, and no two parts have one index."""
    pairs, indices = split_pairs
    assert sorted(pairs[pairs < len(parts)]) == [p for p in sorted(parts) if len(parts[p]) > 1]
    assert not indices[pairs == len(parts)].any() and pairs.max() <= len(parts)
    used: list[int] = []
    for pair, (index, number) in zip(pairs.tolist(), indices.tolist(), strict=True):
        programs = [part - pair for part, _, _ in parts.get(pair, [])]
        assert [index + i for i in range(number)] == [programs[0] + p for p in programs]
        used.extend(range(index, index + number))
    assert len(set(used)) == len(used) and max(used, default=0) < 2 * len(pairs)


def check_work_list(
    lengths: list[int],
    kv_heads: int,
    programs: int,
    window: int | None = None,
    module: ModuleType = work_list,
) -> list[int]:
    """Walk through the shares as the kernel does; return the number of tiles of each."""
    program = built(module, kv_heads, programs, window)
    work, split_pairs = jax.tree.map(np.asarray, program(int32(lengths)))
    seen = [length if length <= CAPACITY else 0 for length in lengths]
    first = [max(0, n - window) // TILE if window else 0 for n in seen]
    tiles = [-(-n // TILE) - begin for n, begin in zip(seen, first, strict=True)]
    shares, sizes = work.shares.tolist(), []
    parts: dict[int, list[tuple[int, int, int]]] = {}
    for program, (pair, tile, left) in enumerate(shares):
        sizes.append(left)
        while left > 0:
            read = min(tiles[pair // kv_heads] - tile, left)
            parts.setdefault(pair, []).append((pair + program, tile, read))
            pair, tile, left = pair + 1, 0, left - max(read, 1)
        assert left == 0
    assert sorted(parts) == list(range(len(lengths) * kv_heads))
    for pair, made in parts.items():
        ids, begins, read = zip(*made, strict=True)
        index, number = work.parts[pair].tolist()
        assert list(ids) == list(range(index, index + number))
        assert list(begins) == np.cumsum([0, *read[:-1]]).tolist()
        assert sum(read) == tiles[pair // kv_heads]
    check_split_pairs(split_pairs, parts)
    total = kv_heads * sum(max(n, 1) for n in tiles)
    assert sum(sizes) == total
    working = [size for size in sizes if size]
    assert max(working) - min(working) <= 1
    assert len(working) == min(programs, max(1, total // SMALLEST_SHARE))
    return sizes


EDGES = st.builds(
    lambda edge, distance: max(0, edge + distance),
    st.sampled_from([0, TILE, 2 * TILE, 5 * TILE, CAPACITY]),
    st.integers(-1, 1),
)


# Few shapes, because each is compiled.
@pytest.mark.parametrize(
    ("kv_heads", "programs", "window"), [(1, 1, None), (2, 5, 1), (3, 40, 3 * TILE + 1)]
)
@given(lengths=st.lists(EDGES, min_size=7, max_size=7))
def test_every_tile_is_in_one_share(lengths, kv_heads, programs, window):
    check_work_list(lengths, kv_heads, programs, window)


def test_a_share_ends_where_a_row_does():
    """Or one tile before, or after it."""
    for more in (-1, 0, 1):
        rows = [(8 + more) * TILE, (8 - more) * TILE, 16 * TILE]
        assert check_work_list(rows, 1, 4) == [8, 8, 8, 8]


def test_a_long_row_among_short_ones():
    assert check_work_list([CAPACITY, *[TILE] * 16], 2, 12) == [8] * 12


def test_rows_without_tiles_are_divided_too():
    assert check_work_list([0] * 7 + [CAPACITY + 1], 3, 8) == [3] * 8

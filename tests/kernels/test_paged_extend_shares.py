"""The shares of the Mosaic `paged_extend`: every KV step once, and none has too many."""

from functools import cache, partial
from itertools import chain
from types import ModuleType, SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.kernels.paged_extend import shares
from radixkv.kernels.paged_extend.config import SMALLEST_SHARE, TOLERANCE
from radixkv.kernels.paged_extend.kernel_params import KernelParams, WorkTile
from radixkv.kernels.paged_extend.work_list import WorkItem

from ..profiles import scaled
from .planted import planted
from .problems import int32

TILES = 24


@cache
def _jitted(module: ModuleType, programs: int) -> Any:
    return jax.jit(partial(module.build_shares, programs=programs))


@cache
def _pieces(module: ModuleType, programs: int) -> Any:
    """The pieces of a thread block, of all numbers at once."""
    return jax.jit(lambda share, index, program: share.piece(index, program, programs))


def check_shares(steps: list[int], programs: int, module: ModuleType = shares) -> list[int]:
    """Walk through the shares as the kernel does; return the number of steps of each."""
    steps = sorted(steps, reverse=True)
    padded = int32(steps + [0] * (TILES - len(steps)))
    made = jax.tree.map(np.asarray, _jitted(module, programs)(padded))
    sizes: list[int] = []
    whole_tiles: list[int] = []
    parts: dict[int, list[tuple[int, int, int]]] = {}
    for program, fields in enumerate(made.shares):
        share = module.Share(*fields)
        size, numbers = 0, np.arange(TILES, dtype=np.int32)
        pieces = _pieces(module, programs)(share, numbers, program)
        for piece in np.stack(pieces, axis=1)[: share.num_pieces].tolist():
            tile, begin, end, part = piece
            end = min(end, steps[tile])
            assert 0 <= begin < end
            size += end - begin
            if (begin, end) == (0, steps[tile]):
                whole_tiles.append(tile)
            else:
                parts.setdefault(tile, []).append((begin, end, part))
        sizes.append(size)
    assert sorted(whole_tiles + list(parts)) == list(range(len(steps)))  # each once
    split, merged = made.split.tolist(), made.parts.tolist()
    used: list[int] = []
    for tile, pieces in parts.items():
        begins, ends, indices = zip(*pieces, strict=True)  # in the order of the thread blocks
        assert (0, *ends) == (*begins, steps[tile])
        index, number = merged[split.index(tile)]
        assert list(indices) == list(range(index, index + number)) and number > 1
        used.extend(indices)
    assert sorted(tile for tile in split if tile != TILES) == sorted(parts)
    assert all(merged[p] == [0, 0] for p in range(programs) if split[p] == TILES)
    assert len(set(used)) == len(used) and max(used, default=0) < 2 * programs
    fair = max(-(-sum(steps) // programs), SMALLEST_SHARE)
    assert sum(sizes) == sum(steps) and max(sizes) <= fair + fair // TOLERANCE
    return sizes


STEPS = st.one_of(
    st.lists(st.integers(1, 9), max_size=TILES),
    st.lists(st.sampled_from([1, 2, 31, 32, 33, 300]), max_size=TILES),
    st.builds(lambda number, steps: [steps] * number, st.integers(0, TILES), st.integers(1, 70)),
)


@pytest.mark.parametrize("programs", [1, 2, 5, 40])  # each is compiled
@given(steps=STEPS)
def test_every_step_is_in_one_share(steps, programs):
    check_shares(steps, programs)


def num_whole(steps: list[int], programs: int) -> list[int]:
    """Whole tiles that each thread block has, besides its pieces of the line."""
    padded = int32(steps + [0] * (TILES - len(steps)))
    return shares.Share(*_jitted(shares, programs)(padded).shares.T).num_whole.tolist()


HEAD_GROUPS = 2


@cache
def _work_tiles(programs: int) -> Any:
    """The work tiles of all thread blocks, of all numbers at once."""
    params: Any = SimpleNamespace(
        head_groups=HEAD_GROUPS, config=SimpleNamespace(programs=programs)
    )

    def of_all(made: Any, items: Any) -> WorkTile:
        refs: Any = SimpleNamespace(shares=made, items=items)
        of_number = jax.vmap(partial(KernelParams.work_tile, params, refs))
        numbers = jnp.arange(TILES, dtype=jnp.int32)
        of_program = jax.vmap(lambda _: of_number(numbers), axis_name="program")
        return of_program(jnp.arange(programs))

    return jax.jit(of_all)


@scaled(40)
@given(steps=st.lists(st.integers(0, 12), min_size=1, max_size=TILES // HEAD_GROUPS))
def test_a_thread_block_knows_which_work_tiles_are_whole(steps):
    """And which steps each has; a tile that sees nothing has none, and is whole."""
    size, programs = TILES // HEAD_GROUPS, 3
    number = np.zeros(size, np.int32)
    number[: len(steps)] = sorted(steps, reverse=True)
    begin = np.arange(size, dtype=np.int32) % 3
    fields = {field: np.zeros(size, np.int32) for field in WorkItem._fields} | {
        "row": np.arange(size, dtype=np.int32),
        "step_begin": begin,
        "full_begin": begin + number // 3,
        "full_end": begin + number // 3 * 2,
        "step_end": begin + number,
    }
    counted = np.where(np.arange(size) < len(steps), np.maximum(number, 1), 0)
    padded = int32(np.repeat(counted, HEAD_GROUPS))
    made = jax.tree.map(np.asarray, _jitted(shares, programs)(padded))
    items = np.stack([fields[field] for field in WorkItem._fields], axis=1)
    work = jax.tree.map(np.asarray, _work_tiles(programs)(made.shares, items))
    leaves = np.stack(jax.tree.leaves(work), axis=-1).tolist()
    found: dict[tuple[int, int], list[tuple[bool, WorkItem]]] = {}
    for numbers, share in zip(leaves, made.shares, strict=True):
        for leaf in numbers[: shares.Share(*share).num_pieces]:
            item_index, head_group, *item, whole, _ = leaf
            assert WorkItem(*item).row == item_index
            found.setdefault((item_index, head_group), []).append((whole, WorkItem(*item)))
    assert sorted(found) == [(i, h) for i in range(len(steps)) for h in range(HEAD_GROUPS)]
    for (item_index, _), pieces in found.items():
        assert [whole for whole, _ in pieces] == [len(pieces) == 1] * len(pieces)
        of_tile = {name: values[item_index] for name, values in fields.items()}
        for kind in ("step", "full"):  # each step once, in the order of the thread blocks
            first, last = f"{kind}_begin", f"{kind}_end"
            ranges = [range(getattr(item, first), getattr(item, last)) for _, item in pieces]
            assert [*chain(*ranges)] == [*range(of_tile[first], of_tile[last])]


EXAMPLE = [20, 3, 3, 3, 3, 2, 2]


def test_the_example_of_the_docstring():
    assert check_shares(EXAMPLE, 4) == [9, 9, 9, 9]
    assert num_whole(EXAMPLE, 4) == [1, 1, 2, 2]


def test_what_would_delay_a_thread_block_is_divided():
    assert check_shares([32] * 18, 16) == [36] * 16
    assert num_whole([32] * 18, 16) == [1] * 16
    assert check_shares([1000, *[8] * 15], 16) == [70] * 16


def test_a_last_wave_that_is_full_or_nearly_so_is_not_divided():
    """To divide it would save less than a 16th."""
    assert num_whole([32] * 24, 8) == [3] * 8
    assert num_whole([32] * 23, 8) == [3] * 7 + [2]
    assert num_whole([32] * 22, 8) == [2] * 8


def test_zigzag():
    waves = [[int(shares.zigzag(jnp.int32(w), p, 4)) for p in range(4)] for w in range(3)]
    assert waves == [[0, 1, 2, 3], [7, 6, 5, 4], [8, 9, 10, 11]]


def test_few_steps_are_divided_among_few_thread_blocks():
    assert check_shares([5], 5) == [2, 2, 1, 0, 0]
    assert check_shares([], 5) == [0] * 5


def check_examples(module: ModuleType) -> None:
    for steps in (EXAMPLE, [32] * 18, [70, *[9] * 20], [100, *[40] * 5], [1, 1], [5, 5]):
        for programs in (4, 16):
            check_shares(steps, programs, module)


BUGS = {
    "an index among the parts twice": ("        2 * rank,\n", "        rank,\n"),
    "a step too few": ("end - starts[last]", "end - starts[last] - 1"),
    "a tile that is passed": ("ends <= begin", "ends < begin"),
    "a whole tile in the line": ("tile += jnp.where(passes,", "tile += jnp.where(passes & False,"),
    "a part too few": ("last_rank - first_rank + 1]", "last_rank - first_rank]"),
    "too much in a wave": ("loads.max(axis=1) <= most", "loads.min(axis=1) <= most"),
    "idle thread blocks have ranks": ("jnp.cumsum(working, dtype=jnp.int32) - working", "program"),
}


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bug_is_caught(bug):
    module = planted(shares, dict([BUGS[bug]]))
    with pytest.raises((AssertionError, IndexError, ValueError)):
        check_examples(module)


def test_examples():
    check_examples(shares)

"""The properties of a work list: each token in one tile, and the KV of each tile."""

from functools import cache, partial
from types import ModuleType
from typing import Any

import jax
import numpy as np

from radixkv.kernels.paged_extend import work_list
from radixkv.kernels.paged_extend.config import ALIGNMENT

from .problems import int32

TOKENS = 64
MAX_KV = 40
BLOCK_KV = 8

Placed = tuple[int, int, int]
"""KV tokens, queries and first query of a row."""


@cache
def _jitted(module: ModuleType, tile_tokens: int, window: int | None) -> Any:
    return jax.jit(
        partial(
            module.build_work_list,
            num_tokens=TOKENS,
            padded_tokens=TOKENS,
            tile_tokens=tile_tokens,
            block_kv=BLOCK_KV,
            window=window,
            max_kv_length=MAX_KV,
        )
    )


def build(
    kv_lengths: Any,
    q_lengths: Any,
    q_starts: Any,
    *,
    tile_tokens: int = 16,
    window: int | None = None,
    module: ModuleType = work_list,
) -> Any:
    """The work list of rows, in NumPy."""
    rows = int32(kv_lengths), int32(q_lengths), int32(q_starts)
    return jax.tree.map(np.asarray, _jitted(module, tile_tokens, window)(*rows))


def visible(position: int, window: int | None) -> range:
    """Positions that a query sees."""
    first = 0 if window is None else max(0, position - window + 1)
    return range(first, position + 1)


def check_rows(
    placed: list[Placed],
    tile_tokens: int,
    window: int | None,
    module: ModuleType = work_list,
) -> None:
    """Build the work list of rows that do not overlap, and check all that it promises."""
    kv_lengths, q_lengths, q_starts = zip(*placed, strict=True)
    cut: dict[str, Any] = {"tile_tokens": tile_tokens, "window": window, "module": module}
    work = build(kv_lengths, q_lengths, q_starts, **cut)
    count = int(work.num_items[0])
    assert count <= work_list.max_items(TOKENS, len(placed), tile_tokens) == len(work.items)
    items = [work_list.WorkItem(*(int(x) for x in item)) for item in work.items[:count]]

    owner = np.full(TOKENS, -1)
    for number, item in enumerate(items):
        assert item.first_token % ALIGNMENT == 0 and 0 <= item.first_token <= TOKENS - tile_tokens
        assert 0 <= item.valid_begin < item.valid_end <= tile_tokens
        kv, n, start = placed[item.row]
        assert item.kv_end == kv and item.fits == (kv <= MAX_KV)
        valid = range(item.first_token + item.valid_begin, item.first_token + item.valid_end)
        assert start <= valid[0] and valid[-1] < start + n
        assert (owner[valid] == -1).all()
        owner[valid] = number
        positions = [kv - n + token - start for token in valid]
        assert positions[0] == item.position + item.valid_begin
        seen = {p for position in positions for p in visible(position, window)}
        if not item.fits:
            seen = set()
        steps = range(item.step_begin, item.step_end)
        assert sorted({p // BLOCK_KV for p in seen}) == list(steps)
        assert item.step_begin <= item.full_begin <= item.full_end <= item.step_end
        for step in range(item.full_begin, item.full_end):
            for position in positions:
                assert set(range(step * BLOCK_KV, (step + 1) * BLOCK_KV)) <= {
                    *visible(position, window)
                }
        if seen:
            assert min(seen) == item.kv_begin
    expected = np.full(TOKENS, False)
    for _, n, start in placed:
        expected[start : start + n] = True
    assert np.array_equal(owner >= 0, expected)
    assert np.array_equal(work.item_of_token, owner)
    costs = [item.step_end - item.step_begin for item in items]
    assert costs == sorted(costs, reverse=True)

"""`paged_extend` against the float64 oracle; the jnp backend, on every shape."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.kernels import KernelArgumentError, paged_extend

from ..profiles import scaled
from . import oracle
from .problems import Heads, assert_close, int32, make_cache, make_queries

SM_SCALE = 0.3


def rows_of_every_length(block_size):
    """KV lengths and queries of rows, by class: whole and continued rows, and rows without any.

    A tile is of 64 queries, a chunk of 256 tokens: the long row has several of both.
    """
    edges = [3 * block_size + d for d in (-1, 0, 1)]
    whole = [(n, n) for n in (1, *edges, 63, 64, 65)]
    continued = [(n, max(1, n - 2)) for n in edges] + [(300, 129), (9 * block_size, 1), (5, 1)]
    kv_lengths, q_lengths = zip(*whole, (0, 0), *continued, (7, 0), strict=True)
    return list(kv_lengths), list(q_lengths)


def check(
    *,
    dtype="float32",
    pool_dtype=None,
    heads=Heads(),  # noqa: B008
    block_size=4,
    width=None,
    attend=paged_extend,
    **options,
):
    """Compare output and lse with the oracle, on NaN-poisoned pools, on one ragged batch.

    Rows lie in any order, with padding tokens between them; the last one ends at the last token,
    and those without queries start anywhere.
    """
    kv_lengths, q_lengths = rows_of_every_length(block_size)
    rng = np.random.default_rng(0)
    blocks = [-(-length // block_size) for length in kv_lengths]
    cache = make_cache(
        rng,
        kv_lengths,
        block_size=block_size,
        width=width or max(blocks),
        num_blocks=sum(blocks) + 3,
        heads=heads,
        dtype=pool_dtype or dtype,
    )
    q_starts, num_tokens = np.zeros(len(q_lengths), int), 0
    for row in rng.permutation(len(q_lengths)):
        q_starts[row] = num_tokens + row % 3
        num_tokens = q_starts[row] + q_lengths[row]
    q_starts[np.equal(q_lengths, 0)] = -1, 10**6
    q = make_queries(rng, num_tokens, heads, dtype)
    attend = jax.jit(partial(attend, sm_scale=SM_SCALE, return_lse=True, **options))
    rows = int32(kv_lengths), int32(q_lengths), int32(q_starts)
    pools = cache.k_blocks, cache.v_blocks, cache.block_tables
    out, lse = attend(q, *pools, *rows, **cache.scales)
    expected = oracle.extend(
        q.astype(jnp.float32), *cache.for_oracle, kv_lengths, q_lengths, q_starts,
        sm_scale=SM_SCALE, **options,
    )  # fmt: skip
    assert out.dtype == q.dtype and lse.dtype == jnp.float32
    assert_close(out, expected[0], dtype)
    assert_close(lse, expected[1], dtype)
    padding = np.isneginf(expected[1]).all(1)
    assert padding.any() and not out[padding].any()  # exactly 0, sinks or not


# Each option and dtype occurs at least twice.
CASES: dict[str, dict[str, Any]] = {
    "blocks of 1, a window of 1": dict(block_size=1, heads=Heads(3, 1, 8), window=1),
    "a group of 7, soft cap, a wide window": dict(
        heads=Heads(2, 7, 8), soft_cap=0.7, window=2**31 - 1
    ),
    "bfloat16, blocks of 16, sinks": dict(
        block_size=16, dtype="bfloat16", sinks=jnp.array([-120.0, 0.0, 3.0, 120.0])
    ),
    "float16, a wide table, a window of a tile": dict(dtype="float16", width=500, window=64),
    "every option": dict(
        heads=Heads(1, 4, 16), soft_cap=2.0, window=40, sinks=jnp.array([-2.0, 0.0, 3.0, 1.0])
    ),
    "int8 pools": dict(block_size=16, pool_dtype="int8"),
    "float8 pools, every option": dict(
        dtype="bfloat16", pool_dtype="float8_e4m3fn", soft_cap=2.0, window=40,
        sinks=jnp.array([-2.0, 0.0, 3.0, 1.0]),
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_rows_of_every_length(case):
    check(**CASES[case])


@pytest.mark.parametrize(("batch", "tokens"), [(0, 3), (2, 0)])
def test_no_rows_or_no_tokens(batch, tokens):
    pool, rows = jnp.zeros((3, 2, 4, 8)), jnp.zeros(batch, jnp.int32)
    tables = jnp.zeros((batch, 5), jnp.int32)
    q = jnp.ones((tokens, 4, 8))
    out = paged_extend(q, pool, pool, tables, rows, rows, rows, sm_scale=1.0)
    assert out.shape == (tokens, 4, 8) and not out.any()


any_rows = given(
    rows=st.lists(
        st.tuples(st.integers(0, 20), st.integers(0, 20), st.integers(0, 3)),
        min_size=3,
        max_size=3,
    ).filter(lambda rows: sum(min(row[:2]) + row[2] for row in rows) <= 48),
    window=st.sampled_from([None, 5]),
    seed=st.integers(0, 2**31),
)


class TestOneProgram:
    """Three rows in 48 tokens, with a window or without: all shapes are the same."""

    tokens, width, block_size, heads = 48, 5, 4, Heads(kv_heads=2, group=2, head_dim=8)

    def make(self, kv_lengths, seed=0):
        """Queries, the pools' arguments, and the pools for the oracle."""
        rng = np.random.default_rng(seed)
        cache = make_cache(
            rng,
            kv_lengths,
            block_size=self.block_size,
            width=self.width,
            num_blocks=3 * self.width,
            heads=self.heads,
        )
        pools = cache.k_blocks, cache.v_blocks, cache.block_tables
        return make_queries(rng, self.tokens, self.heads), pools, cache.for_oracle

    def attend(self, q, pools, *rows, window=None):
        attend = partial(paged_extend, sm_scale=SM_SCALE, window=window, return_lse=True)
        return attend(q, *pools, *map(int32, rows))

    @pytest.mark.slow
    @scaled(40)
    @any_rows
    def test_any_rows(self, rows, window, seed):
        self.check_any_rows(rows, window, seed)

    def check_any_rows(self, rows, window, seed):
        """Rows of (KV length, queries, padding tokens before it)."""
        kv_lengths = [kv for kv, _, _ in rows]
        q_lengths = [min(kv, n) for kv, n, _ in rows]
        ends = np.cumsum([n + row[2] for n, row in zip(q_lengths, rows, strict=True)])
        q_starts = list(ends - q_lengths)
        q, pools, for_oracle = self.make(kv_lengths, seed)
        out, lse = self.attend(q, pools, kv_lengths, q_lengths, q_starts, window=window)
        expected = oracle.extend(
            q, *for_oracle, kv_lengths, q_lengths, q_starts, sm_scale=SM_SCALE, window=window
        )
        assert_close(out, expected[0], "float32")
        assert_close(lse, expected[1], "float32")

    def test_all_rows_inactive(self):
        q, pools, _ = self.make([0, 5, 20])
        out, lse = self.attend(q, pools, [0, 5, 20], [0] * 3, [-1, 99, 0])
        assert not out.any() and jnp.isneginf(lse).all()

    @pytest.mark.parametrize("window", [None, 2, width * block_size, 2**31 - 1])
    def test_more_queries_than_kv(self, window):
        """A row whose first positions are negative: those tokens see nothing."""
        q, pools, for_oracle = self.make([3, 0, 0])
        rows = [3, 0, 0], [9, 0, 0], [0] * 3
        out, lse = self.attend(q, pools, *rows, window=window)
        expected = oracle.extend(q, *for_oracle, *rows, sm_scale=SM_SCALE, window=window)
        assert not out[:6].any() and jnp.isneginf(lse[:6]).all()
        assert_close(out, expected[0], "float32")
        assert_close(lse, expected[1], "float32")

    @pytest.mark.parametrize("window", [None, 5])
    def test_chunked_extend_equals_one_extend(self, window):
        q, pools, _ = self.make([20, 0, 0])
        whole, _ = self.attend(q, pools, [20, 0, 0], [20, 0, 0], [0] * 3, window=window)
        done = 0
        for chunk in (7, 1, 8, 4):
            done += chunk
            moved = jnp.roll(q, chunk - done, axis=0)
            out, _ = self.attend(moved, pools, [done, 0, 0], [chunk, 0, 0], [0] * 3, window=window)
            expected = np.asarray(whole[done - chunk : done], np.float64)
            assert_close(out[:chunk], expected, "float32")
        assert done == 20

    def test_blocks_before_the_window_may_be_recycled(self):
        """A single token sees positions from 4 on, a tile from 8 on."""
        pool = jnp.ones((16, 2, 4, 8)).at[1].set(jnp.nan)
        tables = int32([[1, 2, 3, 0, 0], [1, 1, 2, 3, 0], [1] * 5])
        q = jnp.ones((48, 4, 8))
        rows = [9, 14, 0], [1, 2, 0], [0, 1, 0]
        out, _ = self.attend(q, (pool, pool, tables), *rows, window=5)
        assert jnp.all(out[:3] == 1.0)

    def test_row_longer_than_its_table_is_nan(self):
        pool = jnp.ones((16, 2, 4, 8))
        tables = int32([[1] * 5, [2] * 5, [1] * 5])
        q = jnp.ones((48, 4, 8))
        rows = [21, 20, 21], [1, 2, 3], [0, 1, 3]
        out, lse = self.attend(q, (pool, pool, tables), *rows)
        for bad in (slice(0, 1), slice(3, 6)):
            assert jnp.isnan(out[bad]).all() and jnp.isnan(lse[bad]).all()
        assert jnp.all(out[1:3] == 1.0)


class TestPagedExtendRefusals:
    CASES = (
        ({"q": jnp.zeros((6, 4, 9))}, "q must be [tokens, q_heads, head_dim] = [any, any, 8], got [6, 4, 9]"),  # noqa: E501
        ({"q": jnp.zeros((6, 3, 8))}, "q must have a positive multiple of kv_heads=2 query heads, got 3"),  # noqa: E501
        ({"v_blocks": jnp.zeros((8, 2, 4, 8))}, "k_blocks and v_blocks must have the same shape and dtype, got float32[7, 2, 4, 8] and float32[8, 2, 4, 8]"),  # noqa: E501
        ({"block_tables": jnp.zeros((3, 0), jnp.int32)}, "block_tables must have a width of at least 1, got [3, 0]"),  # noqa: E501
        ({"kv_lengths": int32([1])}, "kv_lengths must be [batch of block_tables] = [3], got [1]"),
        ({"q_lengths": jnp.zeros((3, 1), jnp.int32)}, "q_lengths must be [batch of block_tables] = [3], got [3, 1]"),  # noqa: E501
        ({"q_starts": jnp.zeros(3, jnp.uint32)}, "q_starts must have dtype int32, got uint32"),
        ({"k_scales": jnp.ones((7, 2))}, "k_scales must be None for pools of float32, got an array"),  # noqa: E501
        ({"v_scales": jnp.ones((7, 2))}, "v_scales must be None for pools of float32, got an array"),  # noqa: E501
        ({"sm_scale": -1.0}, "sm_scale must be finite and > 0, got -1.0"),
        ({"soft_cap": 0}, "soft_cap must be finite and > 0, got 0"),
        ({"window": -3}, "window must be >= 1 position, got -3"),
        ({"sinks": jnp.zeros((4, 1))}, "sinks must be [q_heads] = [4], got [4, 1]"),
    )  # fmt: skip

    @pytest.mark.usefixtures("no_shape_hook")
    @pytest.mark.parametrize(("changes", "message"), CASES)
    def test_message(self, changes, message):
        pool = jnp.zeros((7, 2, 4, 8))
        arguments = {
            "q": jnp.zeros((6, 4, 8)),
            "k_blocks": pool,
            "v_blocks": pool,
            "block_tables": jnp.zeros((3, 5), jnp.int32),
            "kv_lengths": int32([1, 2, 3]),
            "q_lengths": int32([1, 1, 1]),
            "q_starts": int32([0, 1, 2]),
            "sm_scale": 1.0,
        }
        with pytest.raises(KernelArgumentError) as refusal:
            paged_extend(**(arguments | changes))
        assert message in str(refusal.value)

    def test_quantised_pools_need_scales(self):
        pool, row = jnp.zeros((7, 2, 4, 8), "int8"), int32([1])
        rows = int32([[1]]), row, row, row
        with pytest.raises(KernelArgumentError) as refusal:
            paged_extend(jnp.zeros((1, 4, 8)), pool, pool, *rows, sm_scale=1.0)
        assert str(refusal.value) == "k_scales must be an array for pools of int8, got None"

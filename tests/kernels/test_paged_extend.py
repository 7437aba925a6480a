"""`paged_extend` against the float64 oracle. A backend reruns all this by subclassing."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixkv.kernels import KernelArgumentError, paged_decode, paged_extend

from . import oracle
from .problems import CODES, Cache, Heads, assert_close, int32, make_cache, make_queries

SM_SCALE = 0.3


def starts_of(q_lengths, gap=0):
    """Rows one after the other, `gap` padding tokens before each."""
    return [sum(q_lengths[:i]) + gap * (i + 1) for i in range(len(q_lengths))]


class TestPagedExtend:
    attend = staticmethod(paged_extend)

    def make(self, kv_lengths, *, block_size=4, heads=None, dtype="float32", width=None) -> Cache:
        blocks = [-(-length // block_size) for length in kv_lengths]
        return make_cache(
            np.random.default_rng(0),
            kv_lengths,
            block_size=block_size,
            width=width or max(1, *blocks),
            num_blocks=sum(blocks) + 3,
            heads=heads or Heads(),
            dtype=dtype,
        )

    def check(
        self, kv_lengths, q_lengths, *, q_starts=None, padding=5, dtype="float32", pool_dtype=None,
        heads=None, block_size=4, width=None, **options,
    ):  # fmt: skip
        """Compare output and lse with the oracle, on NaN-poisoned pools; return the output."""
        pools = {"block_size": block_size, "dtype": pool_dtype or dtype, "width": width}
        cache = self.make(kv_lengths, heads=heads, **pools)
        q_starts = q_starts or starts_of(q_lengths)
        num_tokens = max(s + n for s, n in zip(q_starts, q_lengths, strict=True)) + padding
        q = make_queries(np.random.default_rng(1), num_tokens, heads or Heads(), dtype)
        attend = jax.jit(partial(self.attend, sm_scale=SM_SCALE, return_lse=True, **options))
        out, lse = attend(
            q,
            cache.k_blocks,
            cache.v_blocks,
            cache.block_tables,
            int32(kv_lengths),
            int32(q_lengths),
            int32(q_starts),
            **cache.scales,
        )
        expected = oracle.extend(
            q.astype(jnp.float32), *cache.for_oracle, kv_lengths, q_lengths, q_starts,
            sm_scale=SM_SCALE, **options,
        )  # fmt: skip
        assert out.dtype == q.dtype and lse.dtype == jnp.float32
        assert_close(out, expected[0], dtype)
        assert_close(lse, expected[1], dtype)
        return out

    @pytest.mark.parametrize("block_size", [1, 4, 16])
    def test_ragged_rows_around_block_edges(self, block_size):
        edges = [3 * block_size + d for d in (-1, 0, 1)]
        kv_lengths = [0, 1, *edges, *edges, 9 * block_size]
        q_lengths = [0, 1, *(max(1, n - 2) for n in edges), *edges, 1]
        self.check(kv_lengths, q_lengths, block_size=block_size)

    def test_rows_of_several_tiles_and_chunks(self):
        self.check([600, 63, 64, 65, 300], [130, 63, 64, 65, 129], block_size=16)

    def test_prefill_decode_and_inactive_rows_together(self):
        self.check([40, 17, 0, 5, 70], [40, 1, 0, 1, 66])

    def test_rows_in_any_order_with_gaps(self):
        self.check([9, 12, 7], [5, 1, 7], q_starts=[20, 9, 1])

    def test_last_row_ends_at_the_last_token(self):
        self.check([9, 70], [9, 66], padding=0)

    def test_more_queries_than_kv(self):
        """A row whose first positions are negative: those tokens see nothing."""
        cache = self.make([3])
        q = make_queries(np.random.default_rng(1), 8, Heads())
        pools = (cache.k_blocks, cache.v_blocks, cache.block_tables)
        out, lse = self.attend(
            q, *pools, int32([3]), int32([5]), int32([0]), sm_scale=SM_SCALE, return_lse=True
        )
        expected, _ = oracle.extend(q[2:], *cache.for_oracle, [3], [3], [0], sm_scale=SM_SCALE)
        assert not out[:2].any() and jnp.isneginf(lse[:2]).all()
        assert_close(out[2:], expected, "float32")

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
    def test_half_precision(self, dtype):
        self.check([0, 1, 33, 100], [0, 1, 20, 70], block_size=16, dtype=dtype)

    @pytest.mark.parametrize(("kv_heads", "group"), [(3, 1), (1, 4), (2, 7)])
    def test_grouped_query_heads(self, kv_heads, group):
        self.check([5, 0, 17], [3, 0, 17], heads=Heads(kv_heads, group, head_dim=8))

    @pytest.mark.parametrize("window", [1, 4, 64, 10_000])
    def test_window(self, window):
        self.check([0, 1, 65, 400], [0, 1, 65, 90], window=window)

    def test_soft_cap(self):
        self.check([1, 33, 90], [1, 20, 70], soft_cap=0.7)

    def test_sinks(self):
        self.check([0, 1, 33], [0, 1, 20], sinks=jnp.array([-2.0, 0.0, 3.0, 50.0]))

    def test_all_options_together(self):
        sinks = jnp.array([-2.0, 0.0, 3.0, 1.0])
        self.check([0, 1, 33, 300], [0, 1, 20, 80], soft_cap=2.0, window=40, sinks=sinks)

    @pytest.mark.parametrize("pool_dtype", list(CODES))
    def test_quantised_pools(self, pool_dtype):
        """Tiles of several chunks, single tokens, and tokens of no row."""
        self.check([0, 1, 33, 300], [0, 1, 20, 80], block_size=16, pool_dtype=pool_dtype)

    @pytest.mark.parametrize("pool_dtype", list(CODES))
    def test_quantised_pools_with_all_options(self, pool_dtype):
        options = {"soft_cap": 2.0, "window": 40, "sinks": jnp.array([-2.0, 0.0, 3.0, 1.0])}
        self.check(
            [0, 9, 33, 90], [0, 1, 20, 70], dtype="bfloat16", pool_dtype=pool_dtype, **options
        )

    def test_wide_table(self):
        self.check([7, 12], [7, 1], width=500)

    def test_padding_tokens_are_exactly_zero(self):
        q_lengths = [3, 1, 4]
        q_starts = starts_of(q_lengths, gap=2)
        out = self.check([5, 6, 4], q_lengths, q_starts=q_starts, sinks=jnp.zeros(4))
        rows = [s + i for s, n in zip(q_starts, q_lengths, strict=True) for i in range(n)]
        assert not np.delete(np.asarray(out), rows, axis=0).any()

    def test_all_rows_inactive(self):
        assert not self.check([0, 5], [0, 0], q_starts=[-1, 99]).any()

    @pytest.mark.parametrize(("batch", "tokens"), [(0, 3), (2, 0)])
    def test_no_rows_or_no_tokens(self, batch, tokens):
        pool, rows = jnp.zeros((3, 2, 4, 8)), jnp.zeros(batch, jnp.int32)
        tables = jnp.zeros((batch, 5), jnp.int32)
        out = self.attend(
            jnp.ones((tokens, 4, 8)), pool, pool, tables, rows, rows, rows, sm_scale=1.0
        )
        assert out.shape == (tokens, 4, 8) and not out.any()

    def test_rows_of_one_query_equal_decode(self):
        lengths = [1, 33, 600, 4]
        cache = self.make(lengths)
        q = make_queries(np.random.default_rng(1), 4, Heads())
        pools = (cache.k_blocks, cache.v_blocks, cache.block_tables)
        ones, starts = int32([1] * 4), int32(range(4))
        extended = self.attend(q, *pools, int32(lengths), ones, starts, sm_scale=SM_SCALE)
        decoded = paged_decode(q, *pools, int32(lengths), sm_scale=SM_SCALE)
        assert_close(extended, np.asarray(decoded, np.float64), "float32")

    @pytest.mark.parametrize("window", [None, 20])
    def test_chunked_extend_equals_one_extend(self, window):
        length, chunks = 150, [70, 1, 64, 15]
        cache = self.make([length])
        q = make_queries(np.random.default_rng(1), length, Heads())
        attend = partial(self.attend, sm_scale=SM_SCALE, window=window)
        pools = (cache.k_blocks, cache.v_blocks, cache.block_tables)
        whole = attend(q, *pools, int32([length]), int32([length]), int32([0]))
        parts, done = [], 0
        for chunk in chunks:
            queries = jnp.pad(q[done : done + chunk], ((0, 70 - chunk), (0, 0), (0, 0)))
            done += chunk
            out = attend(queries, *pools, int32([done]), int32([chunk]), int32([0]))
            parts.append(out[:chunk])
        assert done == length
        assert_close(jnp.concatenate(parts), np.asarray(whole, np.float64), "float32")

    @pytest.mark.parametrize("q_length", [1, 2])
    def test_blocks_before_the_window_may_be_recycled(self, q_length):
        pool = jnp.ones((4, 1, 4, 8)).at[1].set(jnp.nan)
        rows = (int32([9]), int32([q_length]), int32([0]))
        out = self.attend(
            jnp.ones((2, 1, 8)), pool, pool, int32([[1, 2, 3]]), *rows, sm_scale=1.0, window=4
        )
        assert jnp.all(out[:q_length] == 1.0)

    @pytest.mark.parametrize("q_length", [1, 2])
    def test_row_longer_than_its_table_is_nan(self, q_length):
        pool = jnp.ones((3, 1, 4, 8))
        rows = (int32([5, 4]), int32([q_length] * 2), int32([0, q_length]))
        out = self.attend(
            jnp.ones((2 * q_length, 1, 8)), pool, pool, int32([[1], [2]]), *rows, sm_scale=1.0
        )
        assert jnp.isnan(out[:q_length]).all()
        assert jnp.all(out[q_length:] == 1.0)


class TestPagedExtendProperty:
    attend = staticmethod(paged_extend)
    tokens, width, block_size, heads = 48, 5, 4, Heads(kv_heads=2, group=2, head_dim=8)

    @settings(deadline=None, max_examples=40)
    @given(
        rows=st.lists(
            st.tuples(st.integers(0, 20), st.integers(0, 20), st.integers(0, 3)),
            min_size=3,
            max_size=3,
        ).filter(lambda rows: sum(min(row[:2]) + row[2] for row in rows) <= 48),
        window=st.sampled_from([None, 5]),
        seed=st.integers(0, 2**31),
    )
    def test_any_rows(self, rows, window, seed):
        """Rows of (KV length, queries, padding tokens before it)."""
        kv_lengths = [kv for kv, _, _ in rows]
        q_lengths = [min(kv, n) for kv, n, _ in rows]
        ends = np.cumsum([n + row[2] for n, row in zip(q_lengths, rows, strict=True)])
        q_starts = list(ends - q_lengths)
        rng = np.random.default_rng(seed)
        cache = make_cache(
            rng,
            kv_lengths,
            block_size=self.block_size,
            width=self.width,
            num_blocks=3 * self.width,
            heads=self.heads,
        )
        q = make_queries(rng, self.tokens, self.heads)
        out, lse = self.attend(
            q,
            cache.k_blocks,
            cache.v_blocks,
            cache.block_tables,
            int32(kv_lengths),
            int32(q_lengths),
            int32(q_starts),
            sm_scale=SM_SCALE,
            window=window,
            return_lse=True,
        )
        expected = oracle.extend(
            q, *cache.for_oracle, kv_lengths, q_lengths, q_starts, sm_scale=SM_SCALE, window=window
        )
        assert_close(out, expected[0], "float32")
        assert_close(lse, expected[1], "float32")


class TestPagedExtendRefusals:
    attend = staticmethod(paged_extend)

    CASES = (
        ({"q": jnp.zeros((6, 4, 9))}, "q must be [tokens, q_heads, head_dim] = [any, any, 8], got [6, 4, 9]"),  # noqa: E501
        ({"q": jnp.zeros((6, 3, 8))}, "q must have a positive multiple of kv_heads=2 query heads, got 3"),  # noqa: E501
        ({"v_blocks": jnp.zeros((8, 2, 4, 8))}, "k_blocks and v_blocks must have one shape and dtype, got float32[7, 2, 4, 8] and float32[8, 2, 4, 8]"),  # noqa: E501
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
            self.attend(**(arguments | changes))
        assert message in str(refusal.value)

    def test_quantised_pools_need_scales(self):
        pool, row = jnp.zeros((7, 2, 4, 8), "int8"), int32([1])
        rows = int32([[1]]), row, row, row
        with pytest.raises(KernelArgumentError) as refusal:
            self.attend(jnp.zeros((1, 4, 8)), pool, pool, *rows, sm_scale=1.0)
        assert str(refusal.value) == "k_scales must be an array for pools of int8, got None"

"""`paged_decode` against the float64 oracle; the jnp backend, on every shape."""

from functools import partial
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixkv.kernels import KernelArgumentError, paged_decode

from . import oracle
from .decode_checks import SM_SCALE, DecodeChecks
from .problems import Heads, assert_close, int32, make_cache, make_queries


class TestPagedDecode(DecodeChecks):
    attend = staticmethod(paged_decode)

    @pytest.mark.parametrize("block_size", [1, 4, 16])
    def test_ragged_lengths_around_block_edges(self, block_size):
        edges = [5 * block_size + d for d in (-1, 0, 1)]
        self.check([0, 1, *edges, 37 * block_size], block_size=block_size)

    def test_lengths_around_chunk_edges(self):
        self.check([511, 512, 513, 1024, 1300, 2], block_size=16)

    def test_long_row_beside_short_ones(self):
        self.check([3, 3000, 0, 9], block_size=16)

    def test_more_rows_than_work_items_in_a_step(self):
        self.check([(7 * i) % 23 for i in range(70)])

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
    def test_half_precision(self, dtype):
        self.check([0, 1, 33, 600], block_size=16, dtype=dtype)

    @pytest.mark.parametrize("pool_dtype", ["int8", "float8_e4m3fn"])
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_quantised_pools(self, pool_dtype, dtype):
        self.check([0, 1, 33, 600], block_size=16, dtype=dtype, pool_dtype=pool_dtype)

    @pytest.mark.parametrize(("kv_heads", "group"), [(3, 1), (1, 4), (2, 7)])
    def test_grouped_query_heads(self, kv_heads, group):
        self.check([5, 0, 17], heads=Heads(kv_heads, group, head_dim=8))

    @pytest.mark.parametrize("window", [1, 4, 600, 10_000])
    def test_window(self, window):
        self.check([0, 1, 4, 65, 1300], block_size=4, window=window)

    def test_soft_cap(self):
        self.check([0, 1, 33, 600], soft_cap=0.7)

    def test_sinks(self):
        self.check([0, 1, 33], sinks=jnp.array([-2.0, 0.0, 3.0, 50.0]))

    def test_all_options_together(self):
        sinks = jnp.array([-2.0, 0.0, 3.0, 1.0])
        self.check([0, 1, 33, 700], block_size=16, soft_cap=2.0, window=40, sinks=sinks)

    def test_wide_table(self):
        self.check([0, 7, 12], width=500)

    def test_inactive_rows_are_exactly_zero(self):
        out = self.check([0, 5, 0], sinks=jnp.zeros(4))
        assert not out[0].any() and not out[2].any()

    def test_all_rows_inactive(self):
        assert not self.check([0, 0, 0]).any()

    def test_no_rows(self):
        pool = jnp.zeros((3, 2, 4, 8))
        out, lse = self.attend(
            jnp.zeros((0, 4, 8)),
            pool,
            pool,
            jnp.zeros((0, 5), jnp.int32),
            int32([]),
            sm_scale=1.0,
            return_lse=True,
        )
        assert out.shape == (0, 4, 8) and lse.shape == (0, 4)

    def test_large_logits_do_not_overflow(self):
        pool = jnp.full((3, 1, 4, 8), 100.0).at[1, 0, 2].set(200.0)
        q = jnp.full((1, 1, 8), 100.0)
        out, lse = self.attend(
            q, pool, pool, int32([[1]]), int32([4]), sm_scale=1.0, return_lse=True
        )
        assert jnp.all(out == 200.0) and lse == 160_000.0

    def test_a_row_of_nans_does_not_reach_another(self):
        pool = jnp.ones((3, 1, 4, 8)).at[1].set(jnp.nan)
        q = jnp.ones((3, 1, 8)).at[2].set(jnp.nan)
        out = self.attend(q, pool, pool, int32([[1], [2], [2]]), int32([2, 3, 3]), sm_scale=1.0)
        assert jnp.isnan(out[0]).all() and jnp.isnan(out[2]).all()
        assert jnp.all(out[1] == 1.0)

    def test_blocks_before_the_window_may_be_recycled(self):
        pool = jnp.ones((4, 1, 4, 8)).at[1].set(jnp.nan)
        out = self.attend(
            jnp.ones((1, 1, 8)), pool, pool, int32([[1, 2, 3]]), int32([9]), sm_scale=1.0, window=5
        )
        assert jnp.all(out == 1.0)

    def test_row_longer_than_its_table_is_nan(self):
        pool = jnp.ones((3, 1, 4, 8))
        out, lse = self.attend(
            jnp.ones((2, 1, 8)),
            pool,
            pool,
            int32([[1], [2]]),
            int32([5, 4]),
            sm_scale=1.0,
            return_lse=True,
        )
        assert jnp.isnan(out[0]).all() and jnp.isnan(lse[0]).all()
        assert jnp.all(out[1] == 1.0)

    def test_id_outside_the_pool_spoils_only_its_row(self):
        pool = jnp.ones((3, 1, 4, 8)).at[0].set(5.0).at[2].set(7.0)
        tables = int32([[99], [1], [-99]])
        out = self.attend(jnp.ones((3, 1, 8)), pool, pool, tables, int32([4, 4, 4]), sm_scale=1.0)
        assert out[:, 0, 0].tolist() == [7.0, 1.0, 5.0]


class TestPagedDecodeProperty:
    attend = staticmethod(paged_decode)
    batch, width, block_size, heads = 4, 6, 4, Heads(kv_heads=2, group=2, head_dim=8)

    @settings(deadline=None, max_examples=40)
    @given(
        lengths=st.lists(st.integers(0, 24), min_size=4, max_size=4),
        window=st.sampled_from([None, 5]),
        seed=st.integers(0, 2**31),
    )
    def test_any_lengths(self, lengths, window, seed):
        rng = np.random.default_rng(seed)
        cache = make_cache(
            rng,
            lengths,
            block_size=self.block_size,
            width=self.width,
            num_blocks=self.batch * self.width,
            heads=self.heads,
        )
        q = make_queries(rng, self.batch, self.heads)
        out, lse = self.attend(
            q,
            cache.k_blocks,
            cache.v_blocks,
            cache.block_tables,
            int32(lengths),
            sm_scale=SM_SCALE,
            window=window,
            return_lse=True,
        )
        expected = oracle.decode(q, *cache.for_oracle, lengths, sm_scale=SM_SCALE, window=window)
        assert_close(out, expected[0], "float32")
        assert_close(lse, expected[1], "float32")


class TestPagedDecodeRefusals:
    attend = staticmethod(paged_decode)

    INT8: ClassVar = {name: jnp.zeros((7, 2, 4, 8), jnp.int8) for name in ("k_blocks", "v_blocks")}
    POOL = "num_blocks + 1, kv_heads, block_size, head_dim"
    CASES = (
        ({"q": jnp.zeros((3, 4, 9))}, "q must be [batch, q_heads, head_dim] = [any, any, 8], got [3, 4, 9]"),  # noqa: E501
        ({"q": jnp.zeros((3, 5, 8))}, "q must have a positive multiple of kv_heads=2 query heads, got 5"),  # noqa: E501
        ({"q": jnp.zeros((3, 0, 8))}, "q must have a positive multiple of kv_heads=2 query heads, got 0"),  # noqa: E501
        ({"q": jnp.zeros((3, 4, 8), jnp.int32)}, "q must have dtype bfloat16, float16 or float32, got int32"),  # noqa: E501
        ({"k_blocks": jnp.zeros((7, 2, 8))}, f"k_blocks must be [{POOL}] = [any, any, any, any], got [7, 2, 8]"),  # noqa: E501
        ({"v_blocks": jnp.zeros((7, 2, 0, 8))}, "v_blocks must have no empty axis, got [7, 2, 0, 8]"),  # noqa: E501
        ({"v_blocks": jnp.zeros((6, 2, 4, 8))}, "k_blocks and v_blocks must have one shape and dtype, got float32[7, 2, 4, 8] and float32[6, 2, 4, 8]"),  # noqa: E501
        ({"v_blocks": jnp.zeros((7, 2, 4, 8), jnp.bfloat16)}, "got float32[7, 2, 4, 8] and bfloat16[7, 2, 4, 8]"),  # noqa: E501
        ({"block_tables": jnp.zeros((3, 5))}, "block_tables must have dtype int32, got float32"),
        ({"block_tables": int32([1, 2])}, "block_tables must be [batch, width] = [any, any], got [2]"),  # noqa: E501
        ({"block_tables": jnp.zeros((3, 0), jnp.int32)}, "block_tables must have a width of at least 1, got [3, 0]"),  # noqa: E501
        ({"block_tables": jnp.zeros((2, 5), jnp.int32)}, "block_tables must be [batch of q, width] = [3, 5], got [2, 5]"),  # noqa: E501
        ({"lengths": int32([1, 2])}, "lengths must be [batch of q] = [3], got [2]"),
        ({"lengths": jnp.zeros(3)}, "lengths must have dtype int32, got float32"),
        ({"sm_scale": 0.0}, "sm_scale must be finite and > 0, got 0.0"),
        ({"sm_scale": jnp.ones(())}, "sm_scale must be a Python number, got ArrayImpl: it is compiled in"),  # noqa: E501
        ({"soft_cap": float("inf")}, "soft_cap must be finite and > 0, got inf"),
        ({"soft_cap": True}, "soft_cap must be a Python number, got bool: it is compiled in"),
        ({"window": 0}, "window must be >= 1 position, got 0"),
        ({"window": 2.5}, "window must be a Python int, got float: it is compiled in"),
        ({"sinks": jnp.zeros(3)}, "sinks must be [q_heads] = [4], got [3]"),
        ({"v_scales": jnp.zeros((7, 2))}, "v_scales must be None for pools of float32, got an array"),  # noqa: E501
        (INT8, "k_scales must be an array for pools of int8, got None"),
        (INT8 | {"k_scales": jnp.zeros((7, 2))}, "v_scales must be an array for pools of int8, got None"),  # noqa: E501
        (INT8 | {"k_scales": jnp.zeros((7, 4))}, "k_scales must be [num_blocks + 1, kv_heads] = [7, 2], got [7, 4]"),  # noqa: E501
        (INT8 | {"k_scales": jnp.zeros((7, 2), jnp.bfloat16)}, "k_scales must have dtype float32, got bfloat16"),  # noqa: E501
        ({"sinks": int32([1, 2, 3, 4])}, "sinks must have dtype bfloat16, float16 or float32, got int32"),  # noqa: E501
    )  # fmt: skip

    def arguments(self, changes):
        pool = jnp.zeros((7, 2, 4, 8))
        arguments = {
            "q": jnp.zeros((3, 4, 8)),
            "k_blocks": pool,
            "v_blocks": pool,
            "block_tables": jnp.zeros((3, 5), jnp.int32),
            "lengths": int32([1, 2, 3]),
            "sm_scale": 1.0,
        }
        return arguments | changes

    @pytest.mark.usefixtures("no_shape_hook")
    @pytest.mark.parametrize(("changes", "message"), CASES)
    def test_message(self, changes, message):
        with pytest.raises(KernelArgumentError) as refusal:
            self.attend(**self.arguments(changes))
        assert message in str(refusal.value)

    @pytest.mark.usefixtures("no_shape_hook")
    def test_is_a_value_error_and_raised_while_tracing(self):
        with pytest.raises(ValueError, match="lengths must be"):
            jax.eval_shape(
                partial(self.attend, sm_scale=1.0),
                *(self.arguments({"lengths": int32([1])})[n] for n in list(self.arguments({}))[:5]),
            )

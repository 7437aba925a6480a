"""`paged_decode` against the float64 oracle; the jnp backend, on every shape."""

import re
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.kernels import KernelArgumentError, paged_decode
from radixkv.kernels.argument_checks import check_pool

from ..profiles import scaled
from . import oracle
from .decode_checks import SM_SCALE, DecodeChecks
from .problems import Heads, assert_close, int32, make_cache, make_queries


# Around the edges of blocks and of chunks of 512 tokens; longer; and more rows than one step takes.
def rows_of_every_length(block_size):
    edges = [5 * block_size + d for d in (-1, 0, 1)]
    return [0, 1, *edges, 511, 512, 513, 0, 1300, 2, *range(3, 40), 37 * block_size]


# Each option and dtype occurs at least twice.
CASES: dict[str, dict[str, Any]] = {
    "blocks of 1, a window of 1": dict(block_size=1, heads=Heads(3, 1, 8), window=1),
    "a group of 7, soft cap, a wide window": dict(
        heads=Heads(2, 7, 8), soft_cap=0.7, window=2**31 - 1
    ),
    "bfloat16, blocks of 16, sinks": dict(
        block_size=16, dtype="bfloat16", sinks=jnp.array([-120.0, 0.0, 3.0, 120.0])
    ),
    "float16, a wide table, a window of more than a chunk": dict(
        dtype="float16", width=500, window=600
    ),
    "every option": dict(
        heads=Heads(1, 4, 16), soft_cap=2.0, window=40, sinks=jnp.array([-2.0, 0.0, 3.0, 1.0])
    ),
    "int8 pools": dict(block_size=16, pool_dtype="int8"),
    "int8 pools, bfloat16": dict(block_size=16, dtype="bfloat16", pool_dtype="int8", window=4),
    "float8 pools": dict(pool_dtype="float8_e4m3fn"),
    "float8 pools, every option": dict(
        dtype="bfloat16", pool_dtype="float8_e4m3fn", soft_cap=2.0, window=40,
        sinks=jnp.array([-2.0, 0.0, 3.0, 1.0]),
    ),
}  # fmt: skip


class TestPagedDecode(DecodeChecks):
    attend = staticmethod(paged_decode)

    @pytest.mark.slow
    @pytest.mark.parametrize("case", CASES)
    def test_rows_of_every_length(self, case):
        options = CASES[case]
        lengths = rows_of_every_length(options.get("block_size", 4))
        out = self.check(lengths, **options)
        assert not out[0].any() and not out[8].any()  # exactly 0, sinks or not

    def test_no_rows(self):
        pool = jnp.zeros((3, 2, 4, 8))
        tables = jnp.zeros((0, 5), jnp.int32)
        q = jnp.zeros((0, 4, 8))
        out, lse = paged_decode(q, pool, pool, tables, int32([]), sm_scale=1.0, return_lse=True)
        assert out.shape == (0, 4, 8) and lse.shape == (0, 4)


any_lengths = given(
    lengths=st.lists(st.integers(0, 24), min_size=4, max_size=4),
    window=st.sampled_from([None, 5]),
    seed=st.integers(0, 2**31),
)


class TestOneProgram:
    """Four rows of at most 24 tokens, with a window or without: all shapes are the same."""

    batch, width, block_size, heads = 4, 6, 4, Heads(kv_heads=2, group=2, head_dim=8)
    shape = (batch * width + 1, 2, 4, 8)

    def attend(self, q, pools, lengths, window=None):
        attend = partial(paged_decode, sm_scale=SM_SCALE, window=window, return_lse=True)
        return attend(q, *pools, int32(lengths))

    def attend_to(self, pool, tables, lengths, window=None, q=1.0):
        """Every query, and every key and value of a position, is one number."""
        tables = int32([[*row, *[0] * (self.width - len(row))] for row in tables])
        queries = jnp.ones((self.batch, 4, 8)) * jnp.reshape(jnp.asarray(q), (-1, 1, 1))
        return self.attend(queries, (pool, pool, tables), lengths, window)

    @scaled(40)
    @any_lengths
    def test_any_lengths(self, lengths, window, seed):
        self.check_any_lengths(lengths, window, seed)

    def check_any_lengths(self, lengths, window, seed):
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
        pools = cache.k_blocks, cache.v_blocks, cache.block_tables
        out, lse = self.attend(q, pools, lengths, window)
        expected = oracle.decode(q, *cache.for_oracle, lengths, sm_scale=SM_SCALE, window=window)
        assert_close(out, expected[0], "float32")
        assert_close(lse, expected[1], "float32")

    def test_all_rows_inactive(self):
        out, lse = self.attend_to(jnp.full(self.shape, jnp.nan), [[1]] * 4, [0] * 4)
        assert not out.any() and jnp.isneginf(lse).all()

    def test_large_logits_do_not_overflow(self):
        pool = jnp.full(self.shape, 100.0).at[1, :, 2].set(200.0)
        out, lse = self.attend_to(pool, [[1]] * 4, [4] * 4, q=100.0)
        assert jnp.all(out == 200.0)
        assert_close(lse, np.full(lse.shape, 8 * 100 * 200 * SM_SCALE), "float32")

    def test_a_row_of_nans_does_not_reach_another(self):
        pool = jnp.ones(self.shape).at[1].set(jnp.nan)
        q = [1.0, 1.0, jnp.nan, 1.0]
        out, _ = self.attend_to(pool, [[1], [2], [2], [2]], [2, 3, 3, 0], q=q)
        assert jnp.isnan(out[0]).all() and jnp.isnan(out[2]).all()
        assert jnp.all(out[1] == 1.0) and not out[3].any()

    def test_blocks_before_the_window_may_be_recycled(self):
        pool = jnp.ones(self.shape).at[1].set(jnp.nan)
        out, _ = self.attend_to(pool, [[1, 2, 3]] * 4, [9, 10, 11, 12], window=5)
        assert jnp.all(out == 1.0)

    def test_row_longer_than_its_table_is_nan(self):
        out, lse = self.attend_to(jnp.ones(self.shape), [[1] * 6] * 4, [25, 24, 2**31 - 1, 1])
        for bad in (0, 2):
            assert jnp.isnan(out[bad]).all() and jnp.isnan(lse[bad]).all()
        assert jnp.all(out[1] == 1.0) and jnp.all(out[3] == 1.0)

    def test_id_outside_the_pool_spoils_only_its_row(self):
        pool = jnp.ones(self.shape).at[0].set(5.0).at[-1].set(7.0)
        out, _ = self.attend_to(pool, [[99], [1], [-99], [2]], [4] * 4)
        assert out[:, 0, 0].tolist() == [7.0, 1.0, 5.0, 1.0]


class TestPagedDecodeRefusals:
    INT8: ClassVar = {name: jnp.zeros((7, 2, 4, 8), jnp.int8) for name in ("k_blocks", "v_blocks")}
    POOL = "num_blocks + 1, kv_heads, block_size, head_dim"
    CASES = (
        ({"q": jnp.zeros((3, 4, 9))}, "q must be [batch, q_heads, head_dim] = [any, any, 8], got [3, 4, 9]"),  # noqa: E501
        ({"q": jnp.zeros((3, 5, 8))}, "q must have a positive multiple of kv_heads=2 query heads, got 5"),  # noqa: E501
        ({"q": jnp.zeros((3, 0, 8))}, "q must have a positive multiple of kv_heads=2 query heads, got 0"),  # noqa: E501
        ({"q": jnp.zeros((3, 4, 8), jnp.int32)}, "q must have dtype bfloat16, float16 or float32, got int32"),  # noqa: E501
        ({"k_blocks": jnp.zeros((7, 2, 8))}, f"k_blocks must be [{POOL}] = [any, any, any, any], got [7, 2, 8]"),  # noqa: E501
        ({"v_blocks": jnp.zeros((7, 2, 0, 8))}, "v_blocks must have no empty axis, got [7, 2, 0, 8]"),  # noqa: E501
        ({"v_blocks": jnp.zeros((6, 2, 4, 8))}, "k_blocks and v_blocks must have the same shape and dtype, got float32[7, 2, 4, 8] and float32[6, 2, 4, 8]"),  # noqa: E501
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
        ({"window": 2**31}, "window must be < 2**31 positions, got 2147483648"),
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
            paged_decode(**self.arguments(changes))
        assert message in str(refusal.value)

    @pytest.mark.usefixtures("no_shape_hook")
    def test_is_a_value_error_and_raised_while_tracing(self):
        with pytest.raises(ValueError, match="lengths must be"):
            jax.eval_shape(
                partial(paged_decode, sm_scale=1.0),
                *(self.arguments({"lengths": int32([1])})[n] for n in list(self.arguments({}))[:5]),
            )


@pytest.mark.parametrize("axis", range(4))
def test_a_pool_without_elements_is_refused(axis):
    shape = [7, 2, 4, 8]
    shape[axis] = 0
    text = rf"^pool must have no empty axis, got {re.escape(str(shape))}$"
    with pytest.raises(KernelArgumentError, match=text):
        check_pool("pool", jnp.zeros(shape))

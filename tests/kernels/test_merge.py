"""`merge_attention_states`: merged attention over two sets of tokens equals attention over both."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from radixkv.kernels import KernelArgumentError, merge_attention_states, paged_decode

from . import oracle
from .problems import Heads, assert_close, int32, make_cache, make_queries

HEADS = Heads(kv_heads=2, group=2, head_dim=16)


@cache
def two_halves(dtype="float32"):
    """The states of two rows over their first 20 and their last 13 tokens, and the oracle's."""
    rng = np.random.default_rng(0)
    shape = {"block_size": 4, "width": 10, "num_blocks": 20, "heads": HEADS, "dtype": dtype}
    cache = make_cache(rng, [33, 33], **shape)
    q = make_queries(rng, 2, HEADS, dtype)
    states = [
        paged_decode(
            q, cache.k_blocks, cache.v_blocks, tables, lengths, sm_scale=0.3, return_lse=True
        )
        for tables, lengths in (
            (cache.block_tables[:, :5], int32([20, 20])),
            (cache.block_tables[:, 5:], int32([13, 13])),
        )
    ]
    whole = oracle.decode(q.astype(jnp.float32), *cache.for_oracle, [33, 33], sm_scale=0.3)
    return states, whole


class TestMergeAttentionStates:
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_two_halves_are_the_whole(self, dtype):
        (a, b), (out, lse) = two_halves(dtype)
        merged = jax.jit(merge_attention_states)(*a, *b)
        assert merged[0].dtype == dtype and merged[1].dtype == "float32"
        assert_close(merged[0], out, dtype)
        assert_close(merged[1], lse, dtype)

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
    def test_outputs_of_16_bits_are_merged_in_float32_and_rounded_once(self, dtype):
        rng = np.random.default_rng(0)
        outs = [jnp.asarray(rng.normal(size=(64, 8)), dtype) for _ in range(2)]
        lses = [jnp.asarray(rng.normal(size=64), jnp.float32) for _ in range(2)]
        (a, b), (lse_a, lse_b) = outs, lses
        merged, lse = merge_attention_states(a, lse_a, b, lse_b)
        wide = [each.astype(jnp.float32) for each in outs]
        exact, exact_lse = merge_attention_states(wide[0], lse_a, wide[1], lse_b)
        assert np.array_equal(merged, exact.astype(dtype)) and np.array_equal(lse, exact_lse)

    def test_is_symmetric(self):
        (a, b), _ = two_halves()
        for x, y in zip(
            merge_attention_states(*a, *b), merge_attention_states(*b, *a), strict=True
        ):
            assert np.array_equal(x, y)

    @pytest.mark.parametrize("unseen", [0.0, jnp.nan])
    def test_what_saw_no_token_changes_nothing(self, unseen):
        (a, _), _ = two_halves()
        nothing = jnp.full_like(a[0], unseen), jnp.full_like(a[1], -jnp.inf)
        for merged in (merge_attention_states(*a, *nothing), merge_attention_states(*nothing, *a)):
            assert_close(merged[0], np.asarray(a[0], np.float64), "float32")
            assert_close(merged[1], np.asarray(a[1], np.float64), "float32")
        out, lse = merge_attention_states(*nothing, *nothing)
        assert not out.any() and (lse == -jnp.inf).all()

    def test_nan_spoils_only_its_row(self):
        (a, b), _ = two_halves()
        out, lse = merge_attention_states(a[0].at[0].set(jnp.nan), a[1].at[0].set(jnp.nan), *b)
        assert jnp.isnan(out[0]).all() and jnp.isnan(lse[0]).all()
        assert jnp.isfinite(out[1]).all() and jnp.isfinite(lse[1]).all()

    def test_logits_far_apart_do_not_overflow(self):
        out = jnp.ones((2, 4))
        lse = jnp.array([9e4, -9e4])
        merged = merge_attention_states(out, lse, 3 * out, -lse)
        assert merged[0].tolist() == [[1.0] * 4, [3.0] * 4]
        assert merged[1].tolist() == [9e4, 9e4]

    SHAPES = (
        ({"out_a": jnp.zeros(())}, "out_a must be [*rows, head_dim], got []"),
        ({"out_a": jnp.zeros((2, 3), jnp.int32)}, "out_a must have dtype bfloat16, float16 or float32, got int32"),  # noqa: E501
        ({"out_b": jnp.zeros((2, 4))}, "out_b must be [as out_a] = [2, 3], got [2, 4]"),
        ({"out_b": jnp.zeros((2, 3), "bfloat16")}, "out_b must have dtype float32, got bfloat16"),
        ({"lse_a": jnp.zeros(3)}, "lse_a must be [rows of out_a] = [2], got [3]"),
        ({"lse_b": jnp.zeros(2, "bfloat16")}, "lse_b must have dtype float32, got bfloat16"),
    )  # fmt: skip

    @pytest.mark.usefixtures("no_shape_hook")
    @pytest.mark.parametrize(("changes", "message"), SHAPES)
    def test_message(self, changes, message):
        out, lse = jnp.zeros((2, 3)), jnp.zeros(2)
        with pytest.raises(KernelArgumentError) as refusal:
            merge_attention_states(
                **({"out_a": out, "lse_a": lse, "out_b": out, "lse_b": lse} | changes)
            )
        assert message in str(refusal.value)

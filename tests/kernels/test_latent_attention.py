"""`latent_decode` and `latent_extend` against the float64 oracle; the jnp backend."""

from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from radixkv.kernels import KernelArgumentError, latent_decode, latent_extend

from . import oracle
from .problems import Heads, assert_close, int32, make_cache, make_queries

SM_SCALE, VALUE_DIM, BLOCK_SIZE = 0.3, 12, 4
HEADS = Heads(kv_heads=1, group=5, head_dim=16)
POOL = "num_blocks + 1, kv_heads, block_size, head_dim"


class Problem(NamedTuple):
    """Rows of latents in shuffled blocks of a NaN-poisoned pool."""

    latents: jax.Array
    block_tables: jax.Array
    for_oracle: tuple[Any, ...]


def problem(lengths: list[int], dtype: str = "float32") -> Problem:
    width = max(1, *(-(-length // BLOCK_SIZE) for length in lengths))
    made = make_cache(
        np.random.default_rng(0), lengths, block_size=BLOCK_SIZE, width=width,
        num_blocks=len(lengths) * width, heads=HEADS, dtype=dtype,
    )  # fmt: skip
    keys, _, tables = made.for_oracle
    return Problem(made.k_blocks, made.block_tables, (keys, keys, tables))


def queries(num_tokens: int, dtype: str = "float32") -> jax.Array:
    return make_queries(np.random.default_rng(1), num_tokens, HEADS, dtype)


def check(found: tuple[jax.Array, jax.Array], expected: tuple[Any, Any], dtype: str) -> None:
    """Compare output and log-sum-exp; the oracle's output has a column per element of a latent."""
    out, lse = found
    assert out.dtype == dtype and lse.dtype == jnp.float32
    assert_close(out, expected[0][..., :VALUE_DIM], dtype)
    assert_close(lse, expected[1], dtype)


class TestDecode:
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_rows_around_the_edges_of_blocks_and_chunks(self, dtype):
        lengths = [0, 1, 3, 4, 5, 511, 512, 513, 0, 1027]
        made, q = problem(lengths, dtype), queries(len(lengths), dtype)
        attend = partial(latent_decode, sm_scale=SM_SCALE, value_dim=VALUE_DIM, return_lse=True)
        found = attend(q, made.latents, made.block_tables, int32(lengths))
        expected = oracle.decode(
            q.astype(jnp.float32), *made.for_oracle, lengths, sm_scale=SM_SCALE
        )
        check(found, expected, dtype)
        assert not found[0][0].any() and not found[0][8].any()  # exactly 0

    @pytest.mark.parametrize("value_dim", [1, 15, 16])
    def test_values_are_the_first_elements(self, value_dim):
        """From one element to all of them."""
        made, q = problem([9]), queries(1)
        attend = partial(latent_decode, q, made.latents, made.block_tables, int32([9]))
        out = attend(sm_scale=SM_SCALE, value_dim=value_dim)
        expected, _ = oracle.decode(q, *made.for_oracle, [9], sm_scale=SM_SCALE)
        assert out.shape == (1, 5, value_dim)
        assert_close(out, expected[..., :value_dim], "float32")

    def test_row_longer_than_its_table_is_nan_and_no_other(self):
        made = problem([4, 4])
        attend = partial(latent_decode, sm_scale=1.0, value_dim=VALUE_DIM, return_lse=True)
        out, lse = attend(queries(2), made.latents, made.block_tables, int32([5, 4]))
        assert jnp.isnan(out[0]).all() and jnp.isnan(lse[0]).all()
        assert jnp.isfinite(out[1]).all() and jnp.isfinite(lse[1]).all()


class TestExtend:
    def test_rows_around_the_edges_of_tiles_and_chunks(self):
        """Single tokens, tiles of 64 queries, chunks of 256 tokens; rows apart and in any order."""
        rows = [(255, 1), (63, 63), (300, 64), (257, 65), (0, 0), (1, 1), (256, 2)]
        kv_lengths, q_lengths = ([*each] for each in zip(*rows, strict=True))
        starts = [198, 0, 65, 131, 0, 64, 196]
        made, q = problem(kv_lengths), queries(200)
        placed = kv_lengths, q_lengths, starts
        attend = partial(latent_extend, sm_scale=SM_SCALE, value_dim=VALUE_DIM, return_lse=True)
        found = attend(q, made.latents, made.block_tables, *map(int32, placed))
        expected = oracle.extend(q, *made.for_oracle, *placed, sm_scale=SM_SCALE)
        check(found, expected, "float32")
        assert not found[0][129].any()  # of no row


@cache
def arguments(kernel: Any) -> dict[str, Any]:
    rows = {"lengths": int32([1, 2, 3])}
    if kernel is latent_extend:
        rows = {name: int32([1, 1, 1]) for name in ("kv_lengths", "q_lengths", "q_starts")}
    return {
        "q": jnp.zeros((3, 4, 16)),
        "latents": jnp.zeros((7, 1, 4, 16)),
        "block_tables": jnp.zeros((3, 5), jnp.int32),
        "sm_scale": 1.0,
        "value_dim": 12,
    } | rows


SHARED = (
    ({"latents": jnp.zeros((7, 4, 16))}, f"latents must be [{POOL}] = [any, any, any, any], got [7, 4, 16]"),  # noqa: E501
    ({"latents": jnp.zeros((7, 2, 4, 16))}, "latents must have one head, got 2"),
    ({"latents": jnp.zeros((7, 1, 0, 16))}, "latents must have no empty axis, got [7, 1, 0, 16]"),
    ({"latents": jnp.zeros((7, 1, 4, 16), jnp.int8)}, "latents must have dtype bfloat16, float16 or float32, got int8"),  # noqa: E501
    ({"q": jnp.zeros((3, 0, 16))}, "q must have a positive multiple of kv_heads=1 query heads, got 0"),  # noqa: E501
    ({"block_tables": jnp.zeros((3, 0), jnp.int32)}, "block_tables must have a width of at least 1, got [3, 0]"),  # noqa: E501
    ({"value_dim": 0}, "value_dim must be in 1 .. 16, the elements of a latent, got 0"),
    ({"value_dim": 17}, "value_dim must be in 1 .. 16, the elements of a latent, got 17"),
    ({"value_dim": 12.0}, "value_dim must be a Python int, got float: it is compiled in"),
    ({"value_dim": True}, "value_dim must be a Python int, got bool: it is compiled in"),
    ({"sm_scale": 0.0}, "sm_scale must be finite and > 0, got 0.0"),
)  # fmt: skip
CASES = (
    *((kernel, *case) for kernel in (latent_decode, latent_extend) for case in SHARED),
    (latent_decode, {"q": jnp.zeros((3, 4, 8))}, "q must be [batch, q_heads, head_dim] = [any, any, 16], got [3, 4, 8]"),  # noqa: E501
    (latent_decode, {"lengths": int32([1, 2])}, "lengths must be [batch of q] = [3], got [2]"),
    (latent_decode, {"block_tables": jnp.zeros((2, 5), jnp.int32)}, "block_tables must be [batch of q, width] = [3, 5], got [2, 5]"),  # noqa: E501
    (latent_extend, {"q": jnp.zeros((3, 4, 8))}, "q must be [tokens, q_heads, head_dim] = [any, any, 16], got [3, 4, 8]"),  # noqa: E501
    (latent_extend, {"q_starts": int32([1, 2])}, "q_starts must be [batch of block_tables] = [3], got [2]"),  # noqa: E501
)  # fmt: skip


class TestRefusals:
    @pytest.mark.usefixtures("no_shape_hook")
    @pytest.mark.parametrize(("kernel", "changes", "message"), CASES)
    def test_message(self, kernel, changes, message):
        with pytest.raises(KernelArgumentError) as refusal:
            kernel(**arguments(kernel) | changes)
        assert message in str(refusal.value)

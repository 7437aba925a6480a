"""`kv_write`: slots of tokens, skipped tokens, and reuse of donated pools."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from radixkv.kernels import KernelArgumentError, compiler_options, kv_write

from .problems import int32

SHAPE = (5, 2, 4, 8)  # blocks, kv_heads, block_size, head_dim


class TestKvWrite:
    write = staticmethod(kv_write)

    def make(self, slots, dtype="float32", new_dtype=None):
        rng = np.random.default_rng(0)
        new = (len(slots), SHAPE[1], SHAPE[3])
        pools = (jnp.asarray(rng.standard_normal(SHAPE), dtype) for _ in range(2))
        k_new, v_new = (jnp.asarray(rng.standard_normal(new), new_dtype or dtype) for _ in "kv")
        return (k_new, v_new, int32(slots), *pools)

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
    @pytest.mark.parametrize(
        "slots",
        [[0, 4, 19, 7, 6], [-1, 3, -20, -(2**31), 9], [20, 2**31 - 1, 1], [-1, -1], []],
        ids=["written", "negative", "past the pool", "all skipped", "no tokens"],
    )
    def test_tokens_land_in_their_slots_and_nothing_else_changes(self, slots, dtype):
        arguments = self.make(slots, dtype)
        k_new, v_new, _, *pools = arguments
        written = jax.jit(self.write)(*arguments)
        for new, pool, got in zip((k_new, v_new), pools, written, strict=True):
            expected = np.array(pool)
            for token, slot in enumerate(slots):
                if 0 <= slot < SHAPE[0] * SHAPE[2]:
                    expected[slot // SHAPE[2], :, slot % SHAPE[2]] = new[token]
            assert got.dtype == pool.dtype
            assert np.array_equal(np.asarray(got), expected)

    def test_casts_to_the_dtype_of_the_pools(self):
        k_new, v_new, slots, k, v = self.make([5], "bfloat16", new_dtype="float32")
        k, v = self.write(k_new, v_new, slots, k, v)
        assert k.dtype == jnp.bfloat16
        assert np.array_equal(k[1, :, 1], k_new[0].astype(jnp.bfloat16))
        assert np.array_equal(v[1, :, 1], v_new[0].astype(jnp.bfloat16))

    @pytest.mark.parametrize(("dtype", "limit"), [("int8", 127), ("float8_e4m3fn", 448)])
    @pytest.mark.parametrize("new_dtype", ["float32", "bfloat16", "float16"])
    def test_quantised_pools_hold_values_divided_by_their_scale(self, dtype, limit, new_dtype):
        """Neither the scale nor the quotient is rounded to the dtype of the tokens."""
        rng = np.random.default_rng(1)
        k_new, v_new, slots, *_ = self.make([7, -1, 12, 99], new_dtype=new_dtype)
        pools = (jnp.asarray(rng.integers(-9, 9, SHAPE), dtype) for _ in "kv")
        k, v = pools
        k_scales, v_scales = (
            jnp.asarray(rng.uniform(0.005, 0.05, SHAPE[:2]), jnp.float32).at[1].set(0.0005)
            for _ in "kv"
        )
        written = self.write(k_new, v_new, slots, k, v, k_scales=k_scales, v_scales=v_scales)
        for got, pool, new, scales in zip(
            written, (k, v), (k_new, v_new), (k_scales, v_scales), strict=True
        ):
            expected = np.array(pool, np.float64)
            for token, block, offset in ((0, 1, 3), (2, 3, 0)):
                exact = np.asarray(new[token], np.float64) / np.asarray(scales)[block, :, None]
                expected[block, :, offset] = np.clip(exact, -limit, limit)
            stored = np.asarray(got, np.float64)
            assert stored.max() == limit  # some saturate
            # int8 is half a step off, float8 half of its last bit of four.
            slack = 0.501 if dtype == "int8" else np.abs(expected) / 2**4 + 2**-9
            assert (np.abs(stored - expected) <= slack).all()

    def test_donated_pools_are_reused(self):
        *new, k, v = self.make([1, -1, 7])
        addresses = {k.unsafe_buffer_pointer(), v.unsafe_buffer_pointer()}
        written = jax.jit(self.write, donate_argnums=(3, 4))(*new, k, v)
        assert k.is_deleted() and v.is_deleted()
        assert {x.unsafe_buffer_pointer() for x in written} == addresses

    CASES = (
        ("k_new", jnp.zeros((3, 2, 9)), "k_new must be [tokens, kv_heads, head_dim] = [any, 2, 8], got [3, 2, 9]"),  # noqa: E501
        ("v_new", jnp.zeros((2, 2, 8)), "v_new must be [tokens, kv_heads, head_dim] = [3, 2, 8], got [2, 2, 8]"),  # noqa: E501
        ("k_new", jnp.zeros((3, 2, 8), jnp.int8), "k_new must have dtype bfloat16, float16 or float32, got int8"),  # noqa: E501
        ("v_new", jnp.zeros((3, 2, 8), jnp.int8), "v_new must have dtype bfloat16, float16 or float32, got int8"),  # noqa: E501
        ("slots", jnp.zeros(3), "slots must have dtype int32, got float32"),
        ("slots", jnp.zeros(4, jnp.int32), "slots must be [tokens] = [3], got [4]"),
        ("k_blocks", jnp.zeros(SHAPE[1:]), "k_blocks must be [num_blocks + 1, kv_heads, block_size, head_dim] = [any, any, any, any], got [2, 4, 8]"),  # noqa: E501
        ("k_scales", jnp.ones(SHAPE[:2]), "k_scales must be None for pools of float32, got an array"),  # noqa: E501
        ("backend", "cuda", "backend must be 'mosaic', 'xla' or None, got 'cuda'"),
        ("v_blocks", jnp.zeros(SHAPE, jnp.int32), "v_blocks must have dtype bfloat16, float16, float32, int8 or float8_e4m3fn, got int32"),  # noqa: E501
    )  # fmt: skip

    @pytest.mark.usefixtures("no_shape_hook")
    @pytest.mark.parametrize(("name", "value", "message"), CASES)
    def test_message(self, name, value, message):
        names = ("k_new", "v_new", "slots", "k_blocks", "v_blocks")
        arguments = dict(zip(names, self.make([0, 1, 2]), strict=True)) | {name: value}
        with pytest.raises(KernelArgumentError) as refusal:
            self.write(**arguments)
        assert message in str(refusal.value)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_write_needs_no_copy_of_a_pool(dtype):
    pool = jax.ShapeDtypeStruct((1025, *SHAPE[1:]), dtype)
    new = jax.ShapeDtypeStruct((3, SHAPE[1], SHAPE[3]), dtype)
    slots = jax.ShapeDtypeStruct((3,), "int32")
    lowered = jax.jit(kv_write, donate_argnums=(3, 4)).lower(new, new, slots, pool, pool)
    memory = lowered.compile(compiler_options()).memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < pool.size * pool.dtype.itemsize / 16

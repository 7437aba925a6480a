"""Block copy, gather and scatter: active entries, and reuse of a donated pool."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from radixkv.kernels import KernelArgumentError, copy_blocks, gather_blocks, scatter_blocks

from .problems import int32

SHAPE = (9, 2, 4, 8)  # blocks, kv_heads, block_size, head_dim
N = 4
DTYPES = ["float32", "bfloat16", "float16"]
COUNTS = [0, 1, 3, N]
TILE = "n of ids, kv_heads, block_size, head_dim"


def make_pool(dtype="float32", blocks=SHAPE[0]):
    rng = np.random.default_rng(blocks)
    return jnp.asarray(rng.standard_normal((blocks, *SHAPE[1:])), dtype)


class TestCopyBlocks:
    copy = staticmethod(copy_blocks)

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_first_count_pairs_act(self, dtype):
        pool, sources, destinations = make_pool(dtype), [1, 8, 1, 3], [2, 5, 7, 4]
        # One executable serves all counts: `count` is not compiled in.
        copy = jax.jit(self.copy).lower(pool, *[int32(sources)] * 2, int32(0)).compile()
        for count in COUNTS:
            expected = np.array(pool)
            for source, destination in list(zip(sources, destinations, strict=True))[:count]:
                expected[destination] = pool[source]
            got = copy(pool, int32(sources), int32(destinations), int32(count))
            assert np.array_equal(np.asarray(got), expected)

    def test_pairs_outside_the_pool_do_not_act(self):
        pool = make_pool()
        got = self.copy(pool, int32([-1, 1, 9, 2]), int32([3, -1, 4, 9]), int32(N))
        assert np.array_equal(got, pool)

    def test_the_first_and_the_last_block_act(self):
        pool = make_pool()
        got = self.copy(pool, int32([0, 8]), int32([8, 0]), int32(2))
        assert np.array_equal(got, pool.at[jnp.array([8, 0])].set(pool[jnp.array([0, 8])]))

    def test_entries_past_count_may_repeat_a_destination(self):
        pool = make_pool()
        got = self.copy(pool, int32([1, 2, 3, 4]), int32([5, 5, 5, 5]), int32(1))
        assert np.array_equal(got, pool.at[5].set(pool[1]))

    def test_unwritten_memory_is_copied_as_it_is(self):
        pool = make_pool().at[1, :, 2:].set(jnp.nan)
        got = self.copy(pool, int32([1]), int32([2]), int32(1))
        assert np.array_equal(got[2], pool[1], equal_nan=True)

    def test_donated_pool_is_reused(self):
        pool = make_pool()
        address = pool.unsafe_buffer_pointer()
        copy = jax.jit(self.copy, donate_argnums=0)
        got = copy(pool, int32([1, 2]), int32([3, 4]), int32(2))
        assert pool.is_deleted() and got.unsafe_buffer_pointer() == address

    CASES = (
        ({"blocks": jnp.zeros((9, 2, 4))}, "blocks must be [num_blocks + 1, kv_heads, block_size, head_dim] = [any, any, any, any], got [9, 2, 4]"),  # noqa: E501
        ({"sources": jnp.zeros((4, 1), jnp.int32)}, "sources must be [n] = [any], got [4, 1]"),
        ({"destinations": int32([1])}, "destinations must be [n of sources] = [4], got [1]"),
        ({"destinations": jnp.zeros(4)}, "destinations must have dtype int32, got float32"),
        ({"count": int32([4])}, "count must be [] = [], got [1]"),
        ({"count": jnp.float32(4)}, "count must have dtype int32, got float32"),
    )  # fmt: skip

    @pytest.mark.usefixtures("no_shape_hook")
    @pytest.mark.parametrize(("changes", "message"), CASES)
    def test_message(self, changes, message):
        ids = int32(range(N))
        arguments = {"blocks": make_pool(), "sources": ids, "destinations": ids, "count": int32(N)}
        with pytest.raises(KernelArgumentError) as refusal:
            self.copy(**(arguments | changes))
        assert message in str(refusal.value)


class TestGatherBlocks:
    gather = staticmethod(gather_blocks)

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_first_count_ids_act_and_the_rest_are_zero(self, dtype):
        pool, ids = make_pool(dtype).at[7].set(jnp.nan), [8, 1, 1, 7]
        gather = jax.jit(self.gather).lower(pool, int32(ids), int32(0)).compile()
        for count in COUNTS:
            expected = np.zeros((N, *SHAPE[1:]), pool.dtype)
            expected[:count] = np.asarray(pool)[ids[:count]]
            got = gather(pool, int32(ids), int32(count))
            assert got.dtype == pool.dtype
            assert np.array_equal(
                np.asarray(got, np.float32), expected.astype(np.float32), equal_nan=True
            )

    def test_ids_outside_the_pool_give_zeros(self):
        assert not self.gather(make_pool(), int32([-1, 9, 99, -9]), int32(N)).any()

    CASES = (
        ({"blocks": jnp.zeros(SHAPE, jnp.int16)}, "blocks must have dtype bfloat16, float16, float32, int8 or float8_e4m3fn, got int16"),  # noqa: E501
        ({"ids": jnp.zeros((), jnp.int32)}, "ids must be [n] = [any], got []"),
        ({"count": jnp.zeros(2, jnp.int32)}, "count must be [] = [], got [2]"),
    )  # fmt: skip

    @pytest.mark.usefixtures("no_shape_hook")
    @pytest.mark.parametrize(("changes", "message"), CASES)
    def test_message(self, changes, message):
        arguments = {"blocks": make_pool(), "ids": int32(range(N)), "count": int32(N)}
        with pytest.raises(KernelArgumentError) as refusal:
            self.gather(**(arguments | changes))
        assert message in str(refusal.value)


class TestScatterBlocks:
    scatter = staticmethod(scatter_blocks)

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_first_count_entries_act(self, dtype):
        pool, staging, ids = make_pool(dtype), make_pool(dtype, N), [8, 1, 3, 7]
        scatter = jax.jit(self.scatter).lower(pool, staging, int32(ids), int32(0)).compile()
        for count in COUNTS:
            expected = np.array(pool)
            expected[ids[:count]] = np.asarray(staging)[:count]
            got = scatter(pool, staging, int32(ids), int32(count))
            assert np.array_equal(np.asarray(got), expected)

    def test_ids_outside_the_pool_do_not_act(self):
        pool, staging = make_pool(), make_pool(blocks=N)
        got = self.scatter(pool, staging, int32([-1, 9, -9, 2**31 - 1]), int32(N))
        assert np.array_equal(got, pool)

    def test_undoes_gather(self):
        pool, ids = make_pool(), int32([3, 1, 8, 2])
        staging = gather_blocks(pool, ids, int32(N))
        got = self.scatter(jnp.zeros_like(pool), staging, ids, int32(N))
        assert np.array_equal(got[ids], pool[ids])

    def test_donated_pool_is_reused(self):
        pool = make_pool()
        address = pool.unsafe_buffer_pointer()
        scatter = jax.jit(self.scatter, donate_argnums=0)
        got = scatter(pool, make_pool(blocks=N), int32(range(N)), int32(2))
        assert pool.is_deleted() and got.unsafe_buffer_pointer() == address

    CASES = (
        ({"staging": jnp.zeros((N, 2, 4, 9))}, f"staging must be [{TILE}] = [4, 2, 4, 8], got [4, 2, 4, 9]"),  # noqa: E501
        ({"staging": make_pool("bfloat16", N)}, "staging must have the dtype of blocks, float32, got bfloat16"),  # noqa: E501
        ({"ids": jnp.zeros(N, jnp.uint8)}, "ids must have dtype int32, got uint8"),
        ({"count": jnp.zeros(2, jnp.int32)}, "count must be [] = [], got [2]"),
    )  # fmt: skip

    @pytest.mark.usefixtures("no_shape_hook")
    @pytest.mark.parametrize(("changes", "message"), CASES)
    def test_message(self, changes, message):
        arguments = {
            "blocks": make_pool(),
            "staging": make_pool(blocks=N),
            "ids": int32(range(N)),
            "count": int32(N),
        }
        with pytest.raises(KernelArgumentError) as refusal:
            self.scatter(**(arguments | changes))
        assert message in str(refusal.value)


class TestSeveralPools:
    POOLS = make_pool(), make_pool() + 1

    def test_each_pool_is_moved_like_one_alone(self):
        ids, others, count = int32([1, 2]), int32([3, 4]), int32(2)
        copied = copy_blocks(self.POOLS, ids, others, count)
        staging = gather_blocks(self.POOLS, ids, count)
        scattered = scatter_blocks(self.POOLS, staging, others, count)
        assert [type(each) for each in (copied, staging, scattered)] == [tuple] * 3
        for pool, *results in zip(self.POOLS, copied, staging, scattered, strict=True):
            alone = gather_blocks(pool, ids, count)
            expected = pool.at[others].set(alone), alone, pool.at[others].set(alone)
            for got, want in zip(results, expected, strict=True):
                assert np.array_equal(got, want)

    @pytest.mark.usefixtures("no_shape_hook")
    def test_messages(self):
        ids, count = int32([1, 2]), int32(2)
        short = make_pool(blocks=3)
        for call, message in (
            (lambda: gather_blocks((), ids, count), "blocks must be a pool or a tuple of at least one, got ()"),  # noqa: E501
            (lambda: gather_blocks((make_pool(), short), ids, count), "blocks must have the same shape and dtype, got float32[9, 2, 4, 8] and float32[3, 2, 4, 8]"),  # noqa: E501
            (lambda: scatter_blocks(self.POOLS, (short,), ids, count), "staging must have one array per pool, 2, got 1"),  # noqa: E501
        ):  # fmt: skip
            with pytest.raises(KernelArgumentError) as refusal:
                call()
            assert str(refusal.value) == message

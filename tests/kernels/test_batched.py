"""The XLA backend on GPUs, run on a CPU against the oracle and compiled for GPUs without one."""

from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from radixkv.kernels import paged_decode, paged_extend
from radixkv.kernels.batched_attention import BatchSizes
from radixkv.kernels.online_softmax import AttentionOptions
from radixkv.kernels.paged_decode import batched as decode_batched
from radixkv.kernels.paged_decode.config import BATCHED_STEP_BYTES
from radixkv.kernels.paged_extend import batched as extend_batched

from ..profiles import scaled
from . import oracle, test_latent_attention, test_paged_decode, test_paged_extend
from .decode_checks import DecodeChecks
from .launches import launches
from .lowering import A100, OTHER_GPUS, compile_for_other_gpu, on_device, shaped
from .problems import Heads, assert_close, int32, make_cache, make_queries

SMALL = BatchSizes(32, 2**14, 2**16)
"""Sizes for which short rows need several steps."""


def attend(
    kernel, *args, sm_scale, return_lse, soft_cap=None, window=None, sinks=None, k_scales=None,
    v_scales=None, **sizes,
):  # fmt: skip
    """Call a kernel of this backend, whatever the device, as the public function is called."""
    assert return_lse
    options = AttentionOptions(sm_scale, soft_cap, window)
    scales = None if k_scales is None else (k_scales, v_scales)
    return kernel(*args, sinks, options, scales, **sizes)


class TestDecode(DecodeChecks):
    attend = staticmethod(partial(attend, decode_batched.decode, sizes=SMALL))

    @pytest.mark.slow
    @pytest.mark.parametrize(
        "case",
        [
            "blocks of 1, a window of 1",
            "bfloat16, blocks of 16, sinks",
            "int8 pools, bfloat16",
            "float8 pools, every option",
        ],
    )
    def test_rows_of_every_length(self, case):
        options = test_paged_decode.CASES[case]
        lengths = test_paged_decode.rows_of_every_length(options.get("block_size", 4))
        out = self.check(lengths, **options)
        assert not out[0].any() and not out[8].any()  # exactly 0, sinks or not

    @pytest.mark.parametrize("lengths", [[1, 0, 3], [130, 5, 64], [150, 160, 159]])
    def test_a_small_step_a_whole_one_and_several(self, lengths):
        """A step of 8 KiB has 2 chunks of 32 tokens, one of 32 KiB has 8, and these rows 5 each."""
        sizes = BatchSizes(32, 2 * 32 * 88, 8 * 32 * 88)
        kernel = partial(attend, decode_batched.decode, sizes=sizes)
        self.check(lengths, heads=Heads(1, 2, 8), width=40, attend=kernel)

    @pytest.mark.parametrize("num_items", [2, 5, 6])
    def test_chunks_of_a_row_in_several_steps(self, num_items):
        """With more rows than a step has chunks, and with as many."""
        kernel = partial(attend, decode_batched.decode, sizes=BatchSizes(4, *2 * [num_items * 352]))
        lengths = [3, 14, 9, 24, 5, 17]
        self.check(lengths, heads=Heads(1, 2, 8), width=6, attend=kernel)

    def test_rows_of_many_chunks_in_a_step(self):
        """The parts of a tile are added by 16."""
        kernel = partial(attend, decode_batched.decode, sizes=BatchSizes(4, 2**20, 2**20))
        lengths = [4 * chunks for chunks in (15, 16, 17, 31, 32, 33)]
        self.check(lengths, heads=Heads(1, 2, 8), width=33, attend=kernel)

    @pytest.mark.parametrize("window", [2, 5, 6])
    def test_windows_that_begin_anywhere_in_a_chunk(self, window):
        kernel = partial(attend, decode_batched.decode, sizes=BatchSizes(4, 2**20, 2**20))
        self.check([*range(12, 17)], heads=Heads(1, 2, 8), window=window, attend=kernel)

    def test_two_calls_give_the_same_bits(self):
        rng = np.random.default_rng(0)
        pool = jnp.asarray(rng.standard_normal((41, 2, 4, 8)), jnp.bfloat16)
        tables = int32(1 + np.arange(40)[None] % 40)
        q = jnp.asarray(rng.standard_normal((1, 4, 8)), jnp.bfloat16)
        given = q, pool, pool, tables, int32([157]), None, AttentionOptions(0.3, None, None)
        first, second = (decode_batched.decode(*given, sizes=SMALL) for _ in range(2))
        assert all(jnp.array_equal(a, b) for a, b in zip(first, second, strict=True))


# Hypothesis refuses a test that two classes share.


class TestDecodeOnA100(test_paged_decode.TestOneProgram):
    """By the public function, which chooses this backend on such a device."""

    def attend(self, *args, **options):
        with on_device(A100):
            return super().attend(*args, **options)

    @scaled(40)
    @test_paged_decode.any_lengths
    def test_any_lengths(self, lengths, window, seed):
        self.check_any_lengths(lengths, window, seed)


class TestExtendOnA100(test_paged_extend.TestOneProgram):
    def attend(self, *args, **options):
        with on_device(A100):
            return super().attend(*args, **options)

    @pytest.mark.slow
    @scaled(40)
    @test_paged_extend.any_rows
    def test_any_rows(self, rows, window, seed):
        self.check_any_rows(rows, window, seed)


@pytest.mark.parametrize("window", [2, 3, 4, 5])
@pytest.mark.parametrize("tile", [2, 3])
def test_windows_of_tiles_begin_anywhere_in_a_chunk(window, tile):
    """A tile sees its own tokens, too, and so one chunk more than its first token may."""
    kv_lengths, q_lengths = [*range(12, 17)], [tile] * 5
    rng, heads = np.random.default_rng(0), Heads(1, 2, 8)
    cache = make_cache(
        rng, kv_lengths, block_size=2, width=8, num_blocks=50, heads=heads, dtype="float32"
    )
    q = make_queries(rng, 5 * tile, heads, "float32")
    rows = kv_lengths, q_lengths, [*range(0, 5 * tile, tile)]
    pools = cache.k_blocks, cache.v_blocks, cache.block_tables
    sizes, options = BatchSizes(4, 2**20, 2**20), {"sm_scale": 0.3, "window": window}
    kernel = partial(attend, extend_batched.extend, sizes=sizes, tile_rows=tile * 2)
    out, lse = kernel(q, *pools, *map(int32, rows), return_lse=True, **options)
    expected = oracle.extend(q, *cache.for_oracle, *rows, **options)
    assert_close(out, expected[0], "float32")
    assert_close(lse, expected[1], "float32")


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    ["blocks of 1, a window of 1", "bfloat16, blocks of 16, sinks", "float8 pools, every option"],
)
def test_extend_rows_of_every_length(case):
    kernel = partial(attend, extend_batched.extend, sizes=SMALL, tile_rows=32)
    test_paged_extend.check(attend=kernel, **test_paged_extend.CASES[case])


def test_latents():
    with on_device(A100):
        decode = test_latent_attention.TestDecode()
        decode.test_rows_around_the_edges_of_blocks_and_chunks("bfloat16")


@pytest.mark.parametrize(("batch", "tokens"), [(0, 3), (2, 0)])
def test_no_rows_or_no_tokens(batch, tokens):
    with on_device(A100):
        test_paged_extend.test_no_rows_or_no_tokens(batch, tokens)
        test_paged_decode.TestPagedDecode().test_no_rows()


def arguments(dtype: str, pool: str, num_tokens: int | None = None, head_dim: int = 128) -> Any:
    """64 rows of at most 128k tokens; 4 query heads per KV head."""
    rows, blocks = shaped((64,), "int32"), shaped((2049, 8, 16, head_dim), pool)
    q = shaped((num_tokens or 64, 32, head_dim), dtype)
    read = q, blocks, blocks, shaped((64, 8192), "int32"), rows
    return read if num_tokens is None else (*read, rows, rows)


@pytest.mark.sm_90a
@pytest.mark.parametrize("capability", OTHER_GPUS)
def test_launches_of_decode(capability):
    """Up to 256 MiB of KV take no loop, and a few launches in each layer after the first."""

    def layers(q, *read):
        for _ in range(3):
            q = jnp.sin(paged_decode(q, *read, sm_scale=0.1))
        return q

    compiled = compile_for_other_gpu(capability, layers, *arguments("bfloat16", "bfloat16"))
    found = launches(compiled.as_text())
    assert len(found.branches) == 3
    for small, whole, _ in found.branches:
        assert max(small, whole) <= 13
    # What depends on the lengths is computed once: 9 launches. The others are the sines.
    assert found.outside <= 9 + 3
    assert found.loops_outside == 0 and len(found.in_loops) == 3 and max(found.in_loops) <= 17
    assert compiled.memory_analysis().temp_size_in_bytes < BATCHED_STEP_BYTES


@pytest.mark.sm_90a
@pytest.mark.parametrize(
    ("dtype", "pool", "head_dim"),
    [("float32", "float32", 128), ("bfloat16", "int8", 80), ("float16", "float8_e4m3fn", 192)],
)
def test_other_types_are_compiled(dtype, pool, head_dim):
    read = arguments(dtype, pool, head_dim=head_dim)
    scales = (shaped((2049, 8), "float32"),) * 2 if dtype != pool else ()

    def decode(read, scales):
        named = dict(zip(("k_scales", "v_scales"), scales, strict=bool(scales)))
        return paged_decode(*read, sm_scale=0.1, **named)

    compiled = compile_for_other_gpu("8.0", decode, read, scales)
    found = launches(compiled.as_text())
    ((small, whole, _),) = found.branches
    assert found.loops_outside == 0 and found.outside + max(small, whole) <= 24
    assert compiled.memory_analysis().temp_size_in_bytes < BATCHED_STEP_BYTES


@pytest.mark.sm_90a
def test_extend_is_compiled():
    """Two conditionals, one for tiles and one for single tokens, and no loop outside of them."""
    read = arguments("bfloat16", "bfloat16", 512)
    hlo = compile_for_other_gpu("8.0", partial(paged_extend, sm_scale=0.1), *read).as_text()
    found = launches(hlo)
    assert len(found.branches) == 2 and found.loops_outside == 0
    assert all(max(small, whole) <= 14 for small, whole, _ in found.branches)

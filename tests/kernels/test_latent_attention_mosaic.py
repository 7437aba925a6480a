"""The Mosaic kernel of latent attention: simulated, searched for races, compiled for Hopper."""

from collections.abc import Sequence
from functools import cache, partial
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.kernels import KernelArgumentError, latent_decode, latent_extend
from radixkv.kernels.latent_attention import mosaic as latent_mosaic
from radixkv.kernels.latent_attention.config import (
    LATENT_DIM,
    ROWS,
    TILE_TOKENS,
    VALUE_DIM,
    LatentConfig,
    choose_config,
)
from radixkv.kernels.paged_decode.work_list import build_work_list

from . import oracle
from .interpret import PARAMS, SEES_ASYNC_RACES, assert_caught, races_detected
from .lowering import SHARED_MEMORY_BYTES, compile_for_h100, lowered_for_h100, on_h100, shaped
from .planted import planted
from .problems import Cache, Heads, assert_close, int32, make_cache, make_queries

SM_SCALE = 0.05
ONE, TWO, THREE = (LatentConfig(shares) for shares in (1, 2, 3))


def rows_of(lengths: Sequence[int], block_size: int, dtype: str) -> Cache:
    """Rows of these lengths; the pool of keys is the pool of latents."""
    blocks = [-(-length // block_size) for length in lengths]
    return make_cache(
        np.random.default_rng(0), [*lengths], block_size=block_size, width=max(1, *blocks),
        num_blocks=sum(blocks) + 3, heads=Heads(1, 1, LATENT_DIM), dtype=dtype,
    )  # fmt: skip


def assert_equal(found: Any, expected: Any, dtype: str) -> None:
    out, lse = found
    assert out.dtype == dtype and lse.dtype == jnp.float32
    assert_close(out, expected[0][..., :VALUE_DIM], dtype)
    assert_close(lse, expected[1], "float32")


def check_decode(
    module: ModuleType,
    lengths: Sequence[int],
    *,
    heads: int = 3,
    block_size: int = 16,
    dtype: str = "bfloat16",
    config: LatentConfig = ONE,
    interpret: Any = PARAMS,
    compared: bool = True,
) -> None:
    """Simulate the kernel on a NaN-poisoned pool, and compare it with the oracle."""
    made = rows_of(lengths, block_size, dtype)
    q = make_queries(np.random.default_rng(1), len(lengths), Heads(1, heads, LATENT_DIM), dtype)
    arrays = q, made.k_blocks, made.block_tables, int32(lengths)
    found = module.decode(
        *arrays, sm_scale=SM_SCALE, config=config, return_lse=True, interpret=interpret
    )
    jax.block_until_ready(found)
    if compared:
        k, _, tables = made.for_oracle
        queries = q.astype(jnp.float32)
        assert_equal(found, oracle.decode(queries, k, k, tables, lengths, sm_scale=SM_SCALE), dtype)


if SEES_ASYNC_RACES:  # 0.10 simulates 15 times slower: `TestRaces` alone, which compares too

    class TestSimulated:
        """Interpret mode; `mosaic.dot` replaces WGMMA, which it does not support."""

        @pytest.mark.slow
        def test_around_the_edges_of_blocks_and_tiles(self):
            lengths = [0, 1, 17, 63, 64, 65, 129, 0]
            check_decode(latent_mosaic, lengths, config=THREE)

        @pytest.mark.slow
        def test_a_long_row_among_short_ones_for_two_tiles_of_heads(self):
            """Parts of larger blocks, too."""
            lengths, config = [0, 5, 300, 1], LatentConfig(shares=4)
            check_decode(
                latent_mosaic, lengths, heads=65, block_size=128, dtype="float16", config=config
            )

        @pytest.mark.slow
        def test_extend(self):
            """Rows apart and in any order, one that sees nothing, and one longer than its table.

            Each share takes every third token.
            """
            kv_lengths, q_lengths, starts = [66, 0, 5, 97, 1], [3, 0, 1, 2, 2], [5, 0, 8, 0, 3]
            made = rows_of([66, 0, 5, 0, 1], 32, "bfloat16")
            q = make_queries(np.random.default_rng(1), 10, Heads(1, 2, LATENT_DIM), "bfloat16")
            placed = kv_lengths, q_lengths, starts
            out, lse = latent_mosaic.extend(
                q, made.k_blocks, made.block_tables, *map(int32, placed),
                sm_scale=SM_SCALE, config=THREE, return_lse=True, interpret=PARAMS,
            )  # fmt: skip
            assert lse is not None and jnp.isnan(out[:2]).all() and jnp.isnan(lse[:2]).all()
            k, _, tables = made.for_oracle
            queries = q.astype(jnp.float32)
            expected = oracle.extend(
                queries, k, k, tables, kv_lengths, [3, 0, 1, 0, 2], starts, sm_scale=SM_SCALE
            )
            assert_equal((out[2:], lse[2:]), [each[2:] for each in expected], "bfloat16")

        def test_ids_outside_the_pool_and_a_row_longer_than_its_table(self):
            """With logits far below those of 0, which masked tokens have before they are masked."""
            latents = jnp.ones((3, 1, 16, LATENT_DIM), "bfloat16").at[0].set(5).at[2].set(7)
            q = -jnp.ones((3, 1, LATENT_DIM), "bfloat16")
            out, lse = latent_mosaic.decode(
                q, latents, int32([[1], [99], [-99]]), int32([17, 9, 9]),
                sm_scale=SM_SCALE, config=ONE, return_lse=True, interpret=PARAMS,
            )  # fmt: skip
            assert lse is not None and jnp.isnan(out[0]).all() and jnp.isnan(lse[0]).all()
            assert out[1:, 0, 0].tolist() == [7, 5]
            logits = -SM_SCALE * LATENT_DIM * np.array([[7.0], [5.0]])
            assert_close(lse[1:], logits + np.log(9), "float32")


NUM_ROWS, NUM_TOKENS, CAPACITY = 4, 30, 32


@cache
def visible_of_tokens() -> Any:
    """The program that finds the row and the visible length of each token of `extend`."""
    module = planted(latent_mosaic, {})
    vars(module)["attend"] = lambda q, latents, tables, rows, lengths: (rows, lengths)
    arrays = (
        jnp.zeros((NUM_TOKENS, 1, LATENT_DIM)),
        jnp.zeros((3, 1, 16, LATENT_DIM)),
        jnp.zeros((NUM_ROWS, CAPACITY // 16), jnp.int32),
    )
    return jax.jit(partial(module.extend, *arrays))


def some(most: int) -> st.SearchStrategy[list[int]]:
    """A number for each row."""
    return st.lists(st.integers(0, most), min_size=NUM_ROWS, max_size=NUM_ROWS)


@given(
    kv_lengths=some(CAPACITY + 8),
    q_lengths=some(5),
    gaps=some(2),
    order=st.permutations(range(NUM_ROWS)),
)
def test_each_token_of_extend_sees_its_row_up_to_itself(kv_lengths, q_lengths, gaps, order):
    """A row longer than its table is NaN as a whole; padding sees nothing, wherever it is."""
    owner, seen, starts = [-1] * NUM_TOKENS, [0] * NUM_TOKENS, [0] * NUM_ROWS
    start = 0
    for row in order:
        start += gaps[row]
        starts[row], end = start, start + q_lengths[row]
        owner[start:end] = [row] * q_lengths[row]
        before, fits = kv_lengths[row] - q_lengths[row], kv_lengths[row] <= CAPACITY
        for token in range(start, end):
            seen[token] = before + token - start + 1 if fits else 2**31 - 1
        start = end
    rows, lengths = visible_of_tokens()(int32(kv_lengths), int32(q_lengths), int32(starts))
    assert lengths.tolist() == seen
    assert [row for row, own in zip(rows.tolist(), owner, strict=True) if own >= 0] == [
        own for own in owner if own >= 0
    ]


@pytest.mark.parametrize(("num_tokens", "shares"), [(2, 8), (9, 4)])
def test_every_part_has_a_place(num_tokens, shares):
    """Many shares of few long rows, and few of many, have parts of the highest indices."""
    capacity = 64 * TILE_TOKENS
    found: list[int] = []
    module = planted(latent_mosaic, {})

    def record(parts: Any, lses: Any, *_: Any) -> tuple[Any, Any]:
        found.extend((len(parts), len(lses)))
        return jnp.zeros((shares, ROWS, VALUE_DIM), "bfloat16"), None

    vars(module)["merge_parts"] = record
    decode = partial(
        module.decode, sm_scale=SM_SCALE, config=LatentConfig(shares), return_lse=False
    )
    jax.eval_shape(
        decode,
        shaped((num_tokens, 1, LATENT_DIM), "bfloat16"),
        shaped((9, 1, TILE_TOKENS, LATENT_DIM), "bfloat16"),
        shaped((num_tokens, 64), "int32"),
        shaped((num_tokens,), "int32"),
    )
    work = build_work_list(
        int32([capacity] * num_tokens), kv_heads=1, programs=shares, tile_tokens=TILE_TOKENS,
        window=None, capacity=capacity,
    )  # fmt: skip
    _, parts = work.split_pairs()
    assert found and min(found) >= int(parts.sum(axis=1).max())


def merged(parts: Any, lses: Any, pairs: Any, *_: Any) -> tuple[Any, Any]:
    """`merge_parts` by jnp, because the race detector forgets what it found in a first kernel."""
    index = jnp.arange(len(parts)) - pairs[:, :1]
    ours = (index >= 0) & (index < pairs[:, 1:])
    weights = jnp.where(ours[..., None], jnp.exp2(lses), 0)
    total = weights.sum(1)
    out = jnp.einsum("pih,ihd->phd", weights, jnp.nan_to_num(parts)) / total[..., None]
    return out.astype("bfloat16"), jnp.log(total)


class TestRaces:
    """The race detector finds each missing wait and fence that interpret mode can see."""

    def run(self, changes: dict[str, str], params: Any, compared: bool = True) -> None:
        """Two shares of four tiles, which fill every pipeline stage twice.

        The first has a whole row and a part, the second a part and a whole row.
        """
        module = planted(latent_mosaic, changes)
        vars(module)["merge_parts"] = merged
        lengths = [64, 64 * 4 + 1, 64 * 2]
        check_decode(
            module, lengths, block_size=64, config=TWO, interpret=params, compared=compared
        )

    @pytest.mark.slow
    def test_the_kernel_has_none(self):
        with races_detected() as params:
            self.run({}, params)

    BUGS = (
        "        plgpu.barrier_wait(refs.q_full)\n",
        "        plgpu.barrier_wait(refs.weights_empty)\n        return",
        "        plgpu.barrier_wait(refs.weights_empty)  # also: the other half is stored\n",
        "        plgpu.barrier_wait(refs.empty.at[stage])\n",
        "        plgpu.barrier_wait(refs.full.at[stage])\n        pl.when(edge)",
        "        plgpu.barrier_wait(refs.weights_full)\n        factor = mosaic.load(refs.factor, 0, ROW_VECTOR, self.interpret)\n        narrow",  # noqa: E501
        "            plgpu.commit_smem()\n            target = refs.out",
        "                plgpu.commit_smem()\n                target = refs.parts",
        "            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the next queries may overwrite it\n",  # noqa: E501
        "                plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # so may the next columns\n",  # noqa: E501
    )
    if SEES_ASYNC_RACES:  # in 0.10, a warpgroup waits forever for another that failed

        @pytest.mark.slow
        @pytest.mark.parametrize("line", BUGS)
        def test_a_missing_line_is_found(self, line):
            missing = line.splitlines(keepends=True)[0]
            changes = {line: line.removeprefix(missing)}
            assert_caught(lambda params: self.run(changes, params, compared=False))


class Case(NamedTuple):
    """Shapes and dtypes of one call of a public function."""

    function: Any = latent_decode
    heads: int = 128
    block_size: int = 64
    dtype: str = "bfloat16"
    num_tokens: int = 200
    latent_dim: int = LATENT_DIM
    value_dim: int = VALUE_DIM
    batch: int = 200
    latents: str | None = None

    def __str__(self) -> str:
        return f"{self.function.__name__} {self[1:]}"

    def function_and_arguments(self) -> tuple[Any, ...]:
        function = partial(
            self.function, sm_scale=0.1, value_dim=self.value_dim, return_lse=True, backend="mosaic"
        )
        rows = [shaped((self.batch,), "int32")] * (1 if self.function is latent_decode else 3)
        return (
            function,
            shaped((self.num_tokens, self.heads, self.latent_dim), self.dtype),
            shaped((100, 1, self.block_size, self.latent_dim), self.latents or self.dtype),
            shaped((self.batch, 64), "int32"),
            *rows,
        )


class TestForHopper:
    @pytest.mark.slow
    @pytest.mark.parametrize("block_size", [16, 32, 64, 128])
    def test_lowers(self, block_size):
        case = Case(block_size=block_size)
        assert "mosaic_gpu_v2" in lowered_for_h100(*case.function_and_arguments())

    # The block size with the most copies, and few tokens, which are split.
    COMPILED = (
        Case(),
        Case(heads=16, block_size=16, num_tokens=8, batch=8),
        Case(latent_extend, block_size=128, dtype="float16", num_tokens=300),
    )

    @pytest.mark.sm_90a
    @pytest.mark.parametrize("case", COMPILED, ids=str)
    def test_compiles(self, case):
        compiled = compile_for_h100(*case.function_and_arguments())
        assert compiled.spill_bytes == 0
        # All but the operands of products is in float32.
        short = {"bfloat16": "bf16", "float16": "f16"}[case.dtype]
        assert compiled.products() == {f"f32.{short}.{short}"}
        assert compiled.narrow() == set()
        assert compiled.shared_bytes <= SHARED_MEMORY_BYTES
        # WGMMA: 16 columns of latents at a time for the logits, 16 tokens for each half.
        assert compiled.count("wgmma.mma_async") == LATENT_DIM // 16 + 2 * 64 // 16
        # TMA: the queries; two tiles before the loop over work tiles, two in it, and one in the
        # loop over tiles.
        copies = compiled.count("cp.async.bulk.tensor") - compiled.count("cp.async.bulk.commit")
        assert copies == 1 + 5 * max(1, 64 // case.block_size)
        # Two parts per thread block of an H100, and once more as much for the merge.
        assert compiled.temp_bytes <= 2 * (2 * 132 * 64 * 4 * VALUE_DIM)


class TestConfig:
    @pytest.mark.parametrize(
        ("num_tokens", "heads", "shares"),
        [(1, 128, 64), (2, 128, 66), (8192, 128, 66), (1, 16, 64), (3, 64, 132), (9, 129, 44)],
    )
    def test_shares_fill_an_h100(self, num_tokens, heads, shares):
        assert choose_config(num_tokens, heads, 132) == LatentConfig(shares)


class TestUnsupported:
    @pytest.mark.parametrize(
        ("case", "message"),
        [
            (Case(dtype="float32"), "q of bfloat16 or float16, got float32"),
            (Case(latents="float16"), "latents of q's dtype bfloat16, got float16"),
            (
                Case(latent_dim=320, value_dim=256),
                "latents of 576 and values of 512 elements, got 320 and 256",
            ),
            (Case(value_dim=448), "latents of 576 and values of 512 elements, got 576 and 448"),
            (Case(block_size=8), "a block_size of 16, 32, 64 or 128, got 8"),
            (Case(num_tokens=0, batch=0), "at least one token and one row, got 0 and 0"),
            (Case(latent_extend, batch=0), "at least one token and one row, got 200 and 0"),
        ],
    )
    def test_message(self, case, message):
        function, *arguments = case.function_and_arguments()
        with on_h100(), pytest.raises(KernelArgumentError) as refusal:
            jax.eval_shape(function, *arguments)
        assert str(refusal.value) == f"backend must be 'xla' or None here: mosaic needs {message}"

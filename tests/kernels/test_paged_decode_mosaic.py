"""The Mosaic kernel of `paged_decode`: simulated, searched for races, and compiled for Hopper."""

from functools import partial
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from radixkv.kernels import KernelArgumentError, paged_decode
from radixkv.kernels.mosaic_limits import BLOCK_SIZES, HEAD_DIMS
from radixkv.kernels.online_softmax import check_options
from radixkv.kernels.paged_decode import mosaic as paged_decode_mosaic
from radixkv.kernels.paged_decode.config import (
    MERGE_VECTOR,
    WGMMA_ROWS,
    DecodeConfig,
    blocks_per_sm,
    choose_config,
)
from radixkv.kernels.paged_decode.merge import heads_together
from radixkv.kernels.paged_decode.mosaic import QUERY_PARTS

from .decode_checks import SM_SCALE, DecodeChecks
from .interpret import PARAMS, SEES_ASYNC_RACES, RaceError, races_detected
from .lowering import (
    SHARED_MEMORY_BYTES,
    at_night,
    compile_for_h100,
    lowered_for_h100,
    on_h100,
    shaped,
)
from .planted import planted
from .problems import Heads, assert_close, int32, make_cache, make_queries

ONE = DecodeConfig(tile_tokens=64, stages=3, programs=1)
FEW = DecodeConfig(tile_tokens=64, stages=4, programs=3)
QUANTISED = ("int8", "float8_e4m3fn")


def attend(
    q,
    k_blocks,
    v_blocks,
    block_tables,
    lengths,
    *,
    config=ONE,
    sm_scale=SM_SCALE,
    soft_cap=None,
    window=None,
    sinks=None,
    k_scales=None,
    v_scales=None,
    return_lse=True,
    interpret=PARAMS,
    module=paged_decode_mosaic,
):
    """`paged_decode` by the Mosaic kernel, with a given tiling, simulated."""
    return module.decode(
        q,
        k_blocks,
        v_blocks,
        block_tables,
        lengths,
        sinks,
        None if k_scales is None else (k_scales, v_scales),
        options=check_options(sm_scale, soft_cap, window, sinks, q.shape[1]),
        config=config,
        return_lse=return_lse,
        interpret=interpret,
    )


class TestSimulated(DecodeChecks):
    """Interpret mode; `mosaic.dot` replaces WGMMA, which it does not support."""

    SINKS = jnp.array([-2.0, 0.0, 3.0, 50.0, 1.0, 2.0, -9.0])
    # Each tiling, dtype, option and size occurs at least once.
    CASES: ClassVar[dict[str, dict[str, Any]]] = {
        "around the edges of blocks and tiles": dict(lengths=[0, 1, 15, 16, 17, 63, 64, 65, 300]),
        "a long row among short ones, which several thread blocks share": dict(
            lengths=[0, 900, 1, 65], config=DecodeConfig(tile_tokens=64, stages=3, programs=5)
        ),
        "wide tiles, a wide table, no groups": dict(
            lengths=[0, 129, 500], heads=Heads(2, 1, 128), block_size=32, width=50,
            config=DecodeConfig(tile_tokens=128, stages=3, programs=2),
        ),
        "splits, every option, a group that is no power of two": dict(
            lengths=[0, 1, 33, 64, 65, 600], heads=Heads(2, 3, 64), block_size=32, config=FEW,
            soft_cap=2.0, window=200, sinks=SINKS[:6],
        ),
        "a head_dim of 80": dict(lengths=[0, 65], heads=Heads(2, 3, 80)),
        "a head_dim of 96, splits, every option": dict(
            lengths=[0, 130], heads=Heads(1, 7, 96), block_size=32, config=FEW,
            soft_cap=2.0, window=200, sinks=SINKS,
        ),
        "a head_dim of 112": dict(
            lengths=[0, 63], heads=Heads(2, 1, 112), block_size=64, dtype="float16"
        ),
        "a head_dim of 192": dict(lengths=[0, 70], heads=Heads(1, 7, 192), block_size=32),
        "a head_dim of 256": dict(
            lengths=[0, 70], heads=Heads(1, 7, 256), block_size=64, dtype="float16"
        ),
        "int8 pools, parts of larger blocks, every option": dict(
            lengths=[0, 1, 127, 128, 129, 300], heads=Heads(1, 7, 128), block_size=128,
            dtype="float16", pool_dtype="int8", soft_cap=2.0, window=150, sinks=SINKS,
        ),
        "float8 pools, splits": dict(
            lengths=[0, 1, 33, 450], pool_dtype="float8_e4m3fn", lse_dtype="float32", config=FEW
        ),
    }  # fmt: skip

    @pytest.mark.slow
    @pytest.mark.parametrize("name", CASES)
    def test_equals_the_oracle(self, name):
        case = {"heads": Heads(1, 4, 64), "block_size": 16, "dtype": "bfloat16", **self.CASES[name]}
        attend_to = partial(attend, config=case.pop("config", ONE))
        out = self.check(case.pop("lengths"), attend=attend_to, **case)
        assert not out[0].any()  # exactly 0, sinks or not

    def test_what_the_contract_says_of_bad_rows(self):
        """A row longer than its table, ids outside the pool, recycled blocks before the window.

        With logits far below those of 0, which a maximum could start from.
        """
        pool = jnp.ones((4, 1, 16, 64), "bfloat16").at[0].set(5).at[2].set(jnp.nan).at[3].set(7)
        tables = int32([[1, 2], [99, 2], [-99, 2], [2, 1]])
        q = -jnp.ones((4, 1, 64), "bfloat16")
        out, lse = attend(q, pool, pool, tables, int32([33, 9, 9, 20]), window=3)
        assert jnp.isnan(out[0]).all() and jnp.isnan(lse[0]).all()
        assert out[1:, 0, 0].tolist() == [7, 5, 1]
        logits = -SM_SCALE * 64 * np.array([[7.0], [5.0], [1.0]])
        assert_close(lse[1:], logits + np.log(3), "float32")


class TestFloat8:
    """Pools of float8, whose keys are multiplied as they are, and whose values become float16."""

    @pytest.mark.parametrize(("dtype", "mantissa"), [("bfloat16", 7), ("float16", 10)])
    def test_parts_of_every_query(self, dtype, mantissa):
        """Each positive number of the dtype below 1, beside the largest of its row."""
        bits = np.arange(np.float32(1).astype(dtype).view(np.uint16), dtype=np.uint16)
        numbers = bits.view(dtype).astype(np.float64)
        for largest in (1.0, 1.5, 2 - 2.0**-mantissa, 16.0):
            rows = np.stack((numbers, np.full_like(numbers, -largest)), axis=1)
            parts, unit = split(jnp.asarray(rows, dtype), jnp.float8_e4m3fn)
            assert len(parts) == {"bfloat16": 2, "float16": 3}[dtype]
            found = sum(np.asarray(part, np.float64) for part in parts)
            errors = np.abs(found * np.asarray(unit, np.float64)[:, None] - rows)
            assert errors.max() <= 2.0**-17 * largest
            # The last bit is at least 2**-9 units: nothing is lost.
            exact = np.abs(rows) >= 2.0 ** (mantissa - 9) * np.asarray(unit)[:, None]
            assert exact.any(axis=0).all() and not errors[exact].any()

    @pytest.mark.parametrize("largest", [0.0, 2.0**-130, 2.0**-99, 2.0**127, np.nan])
    def test_parts_of_extreme_queries(self, largest):
        parts, unit = split(jnp.full((1, 8), largest, "bfloat16"), jnp.float8_e4m3fn)
        found = sum(part.astype(jnp.float32) for part in parts) * unit[:, None]
        expected = largest if largest != 2.0**-130 else 0.0
        assert np.array_equal(found, np.full((1, 8), expected), equal_nan=True)

    @pytest.mark.parametrize(
        ("block_size", "common"), [(64, 2.0**-40), (64, 1.0), (64, 2.0**40), (32, 1.0)]
    )
    @pytest.mark.parametrize("ratio", [2.0**-28, 2.0**28])
    def test_values_of_blocks_that_no_token_attends_to(self, block_size, ratio, common):
        """Weights of the others are as precise as ever, whichever block has the larger scale.

        It is in either tile, and in any place of it. A factor of all scales changes nothing:
        weights are in units of the largest scale.
        """
        rng = np.random.default_rng(0)
        shape = (3, 1, block_size, 64)
        v = jnp.asarray(rng.standard_normal(shape), jnp.float8_e4m3fn)
        # Tokens of blocks 1 and 2 have logits of -40 and 40, so 2**-115 is their largest ratio.
        k = jnp.ones(shape, jnp.float8_e4m3fn).at[1].set(-1)
        scales = common * jnp.array([[np.nan], [ratio], [1.0]], jnp.float32)
        rows = 128 // block_size  # block 2 is in another place of each
        out, _ = attend(
            jnp.ones((rows, 1, 64), "bfloat16"), k, v, int32(1 + np.eye(rows)), int32([128] * rows),
            sm_scale=40 / 64, k_scales=jnp.ones((3, 1)), v_scales=scales,
        )  # fmt: skip
        expected = np.asarray(v[2, 0], np.float64).mean(axis=0)
        assert np.abs(np.asarray(out, np.float64) / common - expected).max() <= 2.0**-8


def split(rows, dtype):
    return jax.jit(paged_decode_mosaic.split_queries, static_argnums=1)(rows, dtype)


def not_merged(parts, lses, pairs, *_):
    """Instead of `merge_parts`, as long as each pair has one part."""
    return parts[pairs[:, 0]], None


class TestRaces:
    """The race detector finds each missing wait and fence that interpret mode can see."""

    def run(self, changes, pool_dtype="bfloat16"):
        """A row that fills every pipeline stage twice, and a second work tile.

        Without the second kernel, because the detector forgets what it found in the first.
        """
        module = planted(paged_decode_mosaic, changes)
        vars(module)["merge_parts"] = not_merged
        heads = Heads(1, 4, 64)
        rng = np.random.default_rng(0)
        cache = make_cache(
            rng, [400, 200], block_size=64, width=7, num_blocks=11, heads=heads, dtype=pool_dtype
        )
        q = make_queries(rng, 2, heads, "bfloat16")
        with races_detected() as params:
            pools = cache.k_blocks, cache.v_blocks
            tables = cache.block_tables
            out = attend(
                q, *pools, tables, int32([400, 200]), interpret=params, module=module,
                **cache.scales,
            )  # fmt: skip
            jax.block_until_ready(out)

    @pytest.mark.parametrize("pool_dtype", ["bfloat16", *map(at_night, QUANTISED)])
    def test_the_kernel_has_none(self, pool_dtype):
        self.run({}, pool_dtype)

    MISSING_WAITS = (
        "        plgpu.barrier_wait(refs.q_full)\n",
        "        plgpu.barrier_wait(refs.k_full.at[stage])\n",
        "        plgpu.barrier_wait(refs.v_full.at[stage])\n",
    )
    MISSING_FENCES = (
        "        plgpu.commit_smem()  # all warps have finished tile i - 1: its stage is free\n",
        "            plgpu.commit_smem()\n            target = refs.parts",
        "            plgpu.wait_smem_to_gmem(0, wait_read_only=True)\n",
    )

    @pytest.mark.parametrize("line", MISSING_WAITS + (MISSING_FENCES if SEES_ASYNC_RACES else ()))
    def test_a_missing_line_is_found(self, line):
        missing = line.splitlines(keepends=True)[0]
        found = "RACE DETECTED|found a race|Barrier|Not all copy_smem_to_gmem"
        with pytest.raises((RaceError, ValueError, RuntimeError), match=found):
            self.run({line: line.removeprefix(missing)})


class Case(NamedTuple):
    """Shapes, dtypes and options of one call of the public function."""

    head_dim: int
    block_size: int
    pool_dtype: str = "bfloat16"
    dtype: str = "bfloat16"
    batch: int = 8
    """With 8 KV heads."""
    group: int = 16
    everything: bool = True
    """Use all options at once, or none."""

    def function_and_arguments(self):
        kv_heads, group, width = 8, self.group, 64
        pool = shaped((100, kv_heads, self.block_size, self.head_dim), self.pool_dtype)
        arguments: dict[str, Any] = {
            "q": shaped((self.batch, kv_heads * group, self.head_dim), self.dtype),
            "k_blocks": pool,
            "v_blocks": pool,
            "block_tables": shaped((self.batch, width), "int32"),
            "lengths": shaped((self.batch,), "int32"),
        }
        if self.pool_dtype in QUANTISED:
            scales = shaped((100, kv_heads), "float32")
            arguments |= {"k_scales": scales, "v_scales": scales}
        static: dict[str, Any] = {"sm_scale": 0.1, "backend": "mosaic"}
        if self.everything:
            arguments["sinks"] = shaped((kv_heads * group,), "float32")
            static |= {"soft_cap": 30.0, "window": 1000, "return_lse": True}

        def function(arguments):
            return paged_decode(**arguments, **static)

        return function, arguments


# Every configuration, with all options or without.
CASES = [
    Case(head_dim, block_size, pool_dtype, everything=everything, batch=8 if everything else 64)
    for block_size in BLOCK_SIZES
    for head_dim in HEAD_DIMS
    for pool_dtype, everything in (("bfloat16", False), ("int8", True), ("float8_e4m3fn", False))
    if pool_dtype not in QUANTISED or head_dim in (64, 128)
]
# The other sizes.
OTHERS = [
    *(Case(256, 16, everything=False, batch=64, group=group) for group in (1, 2, 5)),
    Case(64, 16, "float16", "float16"),
    Case(128, 32, "int8", "float16"),
    Case(128, 128, everything=True, batch=64),
]


class TestForHopper:
    @pytest.mark.nightly
    @pytest.mark.parametrize("case", CASES + OTHERS, ids=str)
    def test_lowers(self, case):
        assert "mosaic_gpu_v2" in lowered_for_h100(*case.function_and_arguments())

    # The block sizes with the most copies, which take the most registers.
    COMPILED = (
        Case(64, 16),
        Case(96, 64, everything=False, batch=64, group=5),
        Case(112, 16),
        Case(128, 16),
        Case(256, 16),
        Case(256, 64, everything=False, batch=64, group=4),
        Case(64, 16, "int8"),
        Case(128, 16, "float8_e4m3fn"),
    )
    COMPILED_AT_NIGHT = (
        Case(80, 16),
        Case(128, 64, everything=False, batch=64),
        Case(192, 16),
        Case(192, 16, everything=False, batch=64, group=5),
        Case(256, 16, everything=False, batch=64, group=4),
        Case(64, 16, "int8", everything=False, batch=64),
        Case(64, 16, "float8_e4m3fn", "float16"),
        Case(128, 16, "float8_e4m3fn", "float16"),
        Case(128, 64, "float8_e4m3fn", everything=False, batch=64),
    )

    @pytest.mark.sm_90a
    @pytest.mark.parametrize("case", [*COMPILED, *map(at_night, COMPILED_AT_NIGHT)], ids=str)
    def test_compiles(self, case):
        compiled = compile_for_h100(*case.function_and_arguments())
        itemsize = jnp.dtype(case.pool_dtype).itemsize
        config = choose_config(case.batch, 8, case.head_dim, itemsize, 132)
        assert compiled.spill_bytes == 0
        # All but the operands of products is in float32; int8 becomes bfloat16 by an exact
        # difference.
        float8 = case.pool_dtype == "float8_e4m3fn"
        products = {"f32.e4m3.e4m3", "f32.f16.f16"} if float8 else {"f32.bf16.bf16"}
        assert compiled.products() == products
        assert compiled.narrow() <= ({"sub.bf16x2"} if case.pool_dtype == "int8" else set())
        # Shared memory of a multiprocessor, less 1 KiB per thread block. Source: CUDA guide, 9.0.
        resident = blocks_per_sm(case.head_dim)
        assert compiled.shared_bytes <= min(228 * 1024 // resident - 1024, SHARED_MEMORY_BYTES)
        assert compiled.registers * 128 * resident <= 64 * 1024
        # WGMMA: 16 of head_dim at a time for the logits, or 32 of each part of float8 queries; and
        # 16 tokens at a time for the output.
        logits = QUERY_PARTS[case.dtype] * case.head_dim // 32 if float8 else case.head_dim // 16
        assert compiled.count("wgmma.mma_async") == logits + config.tile_tokens // 16
        # TMA, for K and V: `stages - 1` tiles in the loop over work tiles and before it (not with a
        # head_dim of 256), and one in the loop over tiles; and one for the queries.
        boxes = max(1, config.tile_tokens // case.block_size)
        copies = compiled.count("cp.async.bulk.tensor") - compiled.count("cp.async.bulk.commit")
        starts = 1 if case.head_dim == 256 else 2
        assert copies == 2 * boxes * (starts * (config.stages - 1) + 1) + 1
        # The parts and their log-sum-exps in float32, the work list, outputs to be cut, and queries
        # and outputs of heads that stand in.
        together = 4 if case.head_dim == 256 else heads_together(case.head_dim)
        group = -(-case.group // together) * together
        parts = case.batch * 8 + config.programs
        part_bytes = 4 * (group * case.head_dim + WGMMA_ROWS)
        lists = 4 * (3 * config.programs + 2 * case.batch * 8)
        lse = 4 * case.batch * 8 * max(group * case.head_dim, MERGE_VECTOR)
        padded = 2 * 2 * case.batch * 8 * group * case.head_dim * (group > case.group)
        most = parts * part_bytes + lists + lse * case.everything + padded + 2**16
        assert compiled.temp_bytes <= most


class TestConfig:
    def test_the_ring_fills_the_shared_memory(self):
        assert choose_config(64, 8, 64, 2, 132) == DecodeConfig(128, 3, 264)
        assert choose_config(64, 8, 128, 1, 132) == DecodeConfig(64, 4, 264)


class TestUnsupported:
    @pytest.mark.parametrize(
        ("case", "message"),
        [
            (Case(128, 16, "float32", "float32"), "q of bfloat16 or float16, got float32"),
            (Case(128, 16, "float16"), "pools of q's dtype bfloat16, got float16"),
            (Case(72, 16), "a head_dim of 64, 80, 96, 112, 128, 192 or 256, got 72"),
            (Case(128, 8), "a block_size of 16, 32, 64 or 128, got 8"),
            (Case(96, 32, "int8"), "a head_dim of 64 or 128 for quantised pools, got 96"),
            (Case(256, 32, "int8"), "a head_dim of 64 or 128 for quantised pools, got 256"),
            (Case(128, 16, batch=0), "at least one row, got none"),
        ],
    )
    def test_message(self, case, message):
        function, arguments = case.function_and_arguments()
        with on_h100(), pytest.raises(KernelArgumentError) as refusal:
            jax.eval_shape(function, arguments)
        assert str(refusal.value) == f"backend must be 'xla' or None here: mosaic needs {message}"

    def test_too_many_queries_for_a_kv_head(self):
        pool = shaped((9, 1, 16, 64), "bfloat16")
        q, table = shaped((2, 65, 64), "bfloat16"), shaped((2, 4), "int32")
        attend = partial(paged_decode, sm_scale=1.0, backend="mosaic")
        with on_h100(), pytest.raises(KernelArgumentError) as refusal:
            jax.eval_shape(attend, q, pool, pool, table, shaped((2,), "int32"))
        assert "mosaic needs at most 64 query heads per KV head, got 65" in str(refusal.value)

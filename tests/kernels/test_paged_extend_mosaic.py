"""The Mosaic extend: simulated on a CPU, searched for races, and compiled for an H100."""

from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from radixkv.kernels import paged_extend
from radixkv.kernels.online_softmax import AttentionOptions
from radixkv.kernels.paged_extend import consumer, kernel_params, producer
from radixkv.kernels.paged_extend import mosaic as paged_extend_mosaic
from radixkv.kernels.paged_extend.config import ExtendConfig, tile_heads_of

from . import oracle
from .interpret import PARAMS, SEES_ASYNC_RACES, assert_caught, races_detected
from .lowering import SHARED_MEMORY_BYTES, compile_for_h100, lowered_for_h100, on_h100, shaped
from .planted import planted, planted_below
from .problems import Heads, assert_close, int32, make_cache, make_queries

SM_SCALE = 0.3
SMALL = ExtendConfig(programs=2, block_kv=64, stages=2)


def run(
    kv_lengths,
    q_lengths,
    *,
    interpret=PARAMS,
    module=paged_extend_mosaic,
    q_starts=None,
    num_tokens=None,
    block_size=16,
    heads=Heads(1, 4, 64),  # noqa: B008
    dtype="bfloat16",
    pool_dtype=None,
    config=SMALL,
    return_lse=True,
    width=None,
    **options,
):
    """Compare output and lse with the oracle, on NaN-poisoned pools."""
    blocks = [-(-length // block_size) for length in kv_lengths]
    cache = make_cache(
        np.random.default_rng(0),
        kv_lengths,
        block_size=block_size,
        width=max(1, *blocks),
        num_blocks=sum(blocks) + 3,
        heads=heads,
        dtype=pool_dtype or dtype,
    )
    tables = cache.block_tables[:, :width]
    q_starts = q_starts or np.cumsum([0, *q_lengths[:-1]])
    num_tokens = num_tokens or max(s + n for s, n in zip(q_starts, q_lengths, strict=True)) + 3
    q = make_queries(np.random.default_rng(1), num_tokens, heads, dtype)
    attention = AttentionOptions(SM_SCALE, options.get("soft_cap"), options.get("window"))
    pools = cache.k_blocks, cache.v_blocks, tables
    rows = int32(kv_lengths), int32(q_lengths), int32(q_starts)
    out, lse = module.extend(
        q, *pools, *rows, options.get("sinks"), tuple(cache.scales.values()) or None,
        options=attention, return_lse=return_lse, config=config, interpret=interpret,
    )  # fmt: skip
    assert out.dtype == dtype
    expected = oracle.extend(
        q.astype(jnp.float32), *cache.for_oracle, kv_lengths, q_lengths, q_starts,
        sm_scale=SM_SCALE, **options,
    )  # fmt: skip
    if width is not None:
        for row, blocks_used in enumerate(blocks):
            if blocks_used > width and q_lengths[row]:
                tokens = slice(q_starts[row], q_starts[row] + q_lengths[row])
                assert jnp.isnan(out[tokens]).all() and jnp.isnan(lse[tokens]).all()
                out, lse = out.at[tokens].set(0), lse.at[tokens].set(0)
                expected[0][tokens], expected[1][tokens] = 0, 0
    assert_close(out, expected[0], dtype)
    padding = np.isneginf(expected[1]).all(1)
    assert not out[padding].any()
    if return_lse:
        # Keys of quantised pools are rounded, by the kernel and not by the oracle.
        assert_close(lse, expected[1], dtype if pool_dtype else "float32")


CASES: dict[str, dict[str, Any]] = {
    "ragged rows around block edges": dict(
        kv_lengths=[0, 1, 15, 16, 17, 79, 80, 81, 130],
        q_lengths=[0, 1, 3, 16, 9, 1, 2, 64, 5],
        programs=3,
    ),
    "every option, a group of 7, a block larger than a step": dict(
        kv_lengths=[5, 300], q_lengths=[5, 70], block_size=128, heads=Heads(1, 7, 128),
        dtype="float16", soft_cap=2.0, window=90, sinks=jnp.array([1.0, 2, 3, -120, 0, 0, 120]),
    ),
    "rows in any order, longer than the table, more queries than KV": dict(
        kv_lengths=[9, 30, 3, 40, 5], q_lengths=[5, 2, 7, 3, 0], q_starts=[20, 9, 1, 12, -77],
        num_tokens=30, width=2, heads=Heads(2, 1, 64),
    ),
    "a group of 20, two tiles for each KV head, some divided, every option": dict(
        kv_lengths=[200, 5], q_lengths=[7, 5], q_starts=[0, 8], heads=Heads(2, 20, 64),
        soft_cap=2.0, window=190, sinks=jnp.linspace(-9.0, 20.0, 40), programs=7,
    ),
    "a head_dim of 80, a group of 5, whose tiles have 24 tokens": dict(
        kv_lengths=[70, 3], q_lengths=[9, 3], heads=Heads(1, 5, 80)
    ),
    "a head_dim of 96, every option": dict(
        kv_lengths=[70], q_lengths=[20], block_size=32, heads=Heads(1, 4, 96), soft_cap=2.0,
        window=50, sinks=jnp.array([-2.0, 0.0, 3.0, 50.0]),
    ),
    "a head_dim of 112": dict(
        kv_lengths=[65], q_lengths=[16], block_size=64, heads=Heads(1, 2, 112), dtype="float16"
    ),
    "a head_dim of 192, in three parts": dict(
        kv_lengths=[70], q_lengths=[20], block_size=32, heads=Heads(1, 2, 192),
    ),
    "a head_dim of 256, in parts, logits ahead, without lse": dict(
        kv_lengths=[70, 33], q_lengths=[20, 33], block_size=32, heads=Heads(1, 2, 256),
        config=ExtendConfig(1, 64, 2, overlap=True), return_lse=False,
    ),
}  # fmt: skip
CASES["a work tile that four thread blocks divide, every option"] = dict(
    kv_lengths=[60, 330], q_lengths=[1, 20], num_tokens=21, programs=4,
    soft_cap=2.0, window=290, sinks=jnp.array([-2.0, 0.0, 3.0, 50.0]),
)  # fmt: skip
CASES["logits ahead of the softmax, every option"] = dict(
    kv_lengths=[0, 300, 7, 130], q_lengths=[0, 20, 1, 30], num_tokens=53,
    config=ExtendConfig(3, 64, 3, overlap=True),
    soft_cap=2.0, window=150, sinks=jnp.array([-2.0, 0.0, 3.0, 50.0]),
)  # fmt: skip
CASES["divided work tiles of two query heads per KV head"] = dict(
    kv_lengths=[260, 200, 130], q_lengths=[1, 40, 3], heads=Heads(2, 2, 128), block_size=64,
    programs=5, dtype="float16",
)  # fmt: skip
CASES["single tokens among other rows"] = dict(
    kv_lengths=[90, 70, 0, 40, 33, 5, 100], q_lengths=[1, 9, 0, 1, 1, 1, 2],
    q_starts=[13, 1, -5, 11, 20, 10, 14], num_tokens=24, width=5,
    soft_cap=2.0, window=60, sinks=jnp.array([-2.0, 0.0, 3.0, 50.0]),
)  # fmt: skip
CASES["more queries than KV in a tile, the widest window"] = dict(
    kv_lengths=[6, 70], q_lengths=[16, 80], num_tokens=96, window=2**31 - 1,
)  # fmt: skip
CASES["int8 pools"] = dict(kv_lengths=[90, 150], q_lengths=[20, 7], pool_dtype="int8")
CASES["float8 pools with every option, blocks larger than a step"] = dict(
    kv_lengths=[70, 300, 9], q_lengths=[1, 66, 9], heads=Heads(1, 4, 128), block_size=128,
    pool_dtype="float8_e4m3fn", dtype="float16",
    soft_cap=2.0, window=90, sinks=jnp.array([-2.0, 0.0, 3.0, 50.0]),
)  # fmt: skip
if SEES_ASYNC_RACES:  # 0.10 simulates 15 times slower: `test_no_race` alone, which compares too

    @pytest.mark.parametrize("name", CASES)
    def test_equals_the_oracle(name):
        case = dict(CASES[name])
        case["config"] = case.get("config", ExtendConfig(case.pop("programs", 2), 64, 2))
        run(**case)


PART_BUGS = {
    "every part has the sinks": ("jnp.where(work.whole, 0.0, -jnp.inf)", "0.0"),
    "a part stands for the whole tile": (" & (piece.end >= steps)", ""),
    "steps that the window cuts are not masked": (
        "full_begin=jnp.clip(item.full_begin, begin, end)", "full_begin=begin"
    ),
    "tokens of other rows are merged": ("(offset >= of.valid_begin[:, None]) & ", ""),
    "parts have no sinks": ("is None else sinks.reshape", "is not None else sinks.reshape"),
}  # fmt: skip
if SEES_ASYNC_RACES:

    @pytest.mark.nightly
    @pytest.mark.parametrize("bug", PART_BUGS)
    def test_planted_bug_of_parts_is_caught(bug):
        case = dict(CASES["a work tile that four thread blocks divide, every option"])
        case["config"] = ExtendConfig(case.pop("programs"), 64, 2)
        below = kernel_params, consumer, producer
        module = planted_below(paged_extend_mosaic, *below, changes=dict([PART_BUGS[bug]]))
        with pytest.raises(AssertionError):
            run(**case, module=module)


# Two tiles of one program: 3 and 2 steps through 2 stages, the last step with unwritten rows.
BUSY = dict(kv_lengths=[150], q_lengths=[40], config=ExtendConfig(1, 64, 2), num_tokens=40)


@pytest.mark.slow
@pytest.mark.parametrize("soft_cap", [None, 5.0] if SEES_ASYNC_RACES else [None])
def test_no_race(soft_cap):
    with races_detected() as params:
        run(**BUSY, interpret=params, soft_cap=soft_cap)


if SEES_ASYNC_RACES:

    @pytest.mark.slow
    def test_no_race_of_logits_ahead():
        with races_detected() as params:
            run(**BUSY | {"config": ExtendConfig(1, 64, 2, overlap=True)}, interpret=params)

    @pytest.mark.slow
    def test_no_race_of_parts():
        """Three thread blocks divide 5 steps of two work tiles."""
        with races_detected() as params:
            run(**BUSY | {"config": ExtendConfig(3, 64, 2)}, interpret=params)


BUGS = {
    "V is not waited for": "plgpu.barrier_wait(refs.v_full.at[stage])",
    "Q is not waited for": "plgpu.barrier_wait(refs.q_full.at[warpgroup])",
    "K is loaded over a tile that is read": "plgpu.barrier_wait(refs.k_empty.at[stage])",
    "zeroed rows of V are not waited for": "plgpu.barrier_wait(refs.v_full.at[stages])",
    "the output is not fenced": "plgpu.commit_smem()  # of output",
    "the output overwrites an unread part": "plgpu.wait_smem_to_gmem(0, wait_read_only=True)",
    "the last copies are not waited for": "plgpu.wait_smem_to_gmem(0)\n",
}
if SEES_ASYNC_RACES:  # in 0.10, warpgroups also wait forever for a failed one

    @pytest.mark.parametrize("bug", BUGS)
    def test_planted_bug_is_caught(bug):
        line = BUGS[bug]
        missing = {line: "pass" + "\n" * line.count("\n")}
        module = planted(paged_extend_mosaic, {})
        produces = line in Path(producer.__file__).read_text()
        name, changed = ("producer", producer) if produces else ("consumer", consumer)
        vars(module)[name] = planted(changed, missing)
        assert_caught(lambda params: run(**BUSY, interpret=params, module=module))


def arguments(
    *, tokens=2048, batch=8, kv_heads=8, group=4, head_dim=128, block_size=16, dtype="bfloat16",
    pool_dtype=None, sinks=False,
):  # fmt: skip
    pool = shaped((1025, kv_heads, block_size, head_dim), pool_dtype or dtype)
    row = shaped((batch,), "int32")
    q = shaped((tokens, kv_heads * group, head_dim), dtype)
    args = q, pool, pool, shaped((batch, 512), "int32"), row, row, row
    scales = shaped((1025, kv_heads), "float32")
    more: dict[str, Any] = {"sinks": shaped((kv_heads * group,), "float32")} if sinks else {}
    return args, more | ({"k_scales": scales, "v_scales": scales} if pool_dtype else {})


def attend(args, more, **options):
    options |= {"sm_scale": 0.1, **more}
    return paged_extend(*args, **options)


EVERY_OPTION = dict(soft_cap=30.0, window=1000, return_lse=True, sinks=True)
# Other sizes, dtypes and options, one for each head_dim and block size below.
OTHERS: list[dict[str, Any]] = [
    {},
    dict(kv_heads=32, group=1),
    EVERY_OPTION,
    dict(dtype="float16"),
    dict(kv_heads=4, group=7),
    dict(tokens=8, batch=1),
    dict(soft_cap=30.0),
    dict(tokens=1001),
    dict(kv_heads=2, group=16),
    dict(window=1000),
    dict(dtype="float16", **EVERY_OPTION),
    dict(kv_heads=8, group=5, return_lse=True),
]
SHAPES = [
    dict(head_dim=d, block_size=b, **others)
    for (d, b), others in zip(product((64, 128, 256), (16, 32, 64, 128)), OTHERS, strict=True)
]
SHAPES += [dict(pool_dtype="int8"), dict(pool_dtype="float8_e4m3fn", head_dim=64, **EVERY_OPTION)]


def split(case):
    """A case's shapes, and its options."""
    options = {key: case[key] for key in case if key in ("soft_cap", "window", "return_lse")}
    return {key: case[key] for key in case if key not in options}, options


@pytest.mark.nightly
@pytest.mark.parametrize("case", SHAPES, ids=str)
def test_lowers_for_an_h100(case):
    shapes, options = split(case)
    text = lowered_for_h100(partial(attend, **options), *arguments(**shapes))
    assert text.count("mosaic_gpu_v2") == 2  # all rows, and the merge of their parts


COMPILED = [
    *(dict(head_dim=d, **options) for d in (64, 128, 192, 256) for options in ({}, EVERY_OPTION)),
    dict(head_dim=80, **EVERY_OPTION),
    dict(head_dim=96, group=5),
    dict(head_dim=112, **EVERY_OPTION),
    dict(block_size=64),
    dict(head_dim=256, block_size=64),
    dict(head_dim=256, kv_heads=32, group=1, **EVERY_OPTION),
    dict(head_dim=256, group=5, block_size=32, dtype="float16", return_lse=True),
    dict(kv_heads=4, group=7, dtype="float16"),
    dict(kv_heads=2, group=64, **EVERY_OPTION),
    dict(pool_dtype="int8", **EVERY_OPTION),
    dict(pool_dtype="float8_e4m3fn", **EVERY_OPTION),
    dict(pool_dtype="float8_e4m3fn", head_dim=64, dtype="float16"),
]


@pytest.mark.sm_90a
@pytest.mark.parametrize("case", COMPILED, ids=str)
def test_compiles_for_an_h100(case):
    shapes, options = split(case)
    report = compile_for_h100(partial(attend, **options), *arguments(**shapes))
    head_dim, block_size = shapes.get("head_dim", 128), shapes.get("block_size", 16)
    block_kv = 64 if head_dim > 128 else 128
    loops = 3 if "window" in options else 2
    # Three warpgroups start with 168 registers, which `setmaxnreg` shifts; the merge may have more.
    assert 168 <= report.registers <= 255
    assert report.count("setmaxnreg.inc") == report.count("setmaxnreg.dec") == 1
    assert report.spill_bytes == 0
    operand = {"float16": "f16", "bfloat16": "bf16"}[shapes.get("dtype", "bfloat16")]
    assert report.products() == {f"f32.{operand}.{operand}"} and not report.narrow()
    assert report.shared_bytes <= SHARED_MEMORY_BYTES
    # The zeroed rows of V, each part of the output, and the log-sum-exp are fenced for copies and
    # WGMMA. (The simulated WGMMA reads as threads do: it does not miss the first.)
    # The dequantised tiles of K and of V replace the first.
    quantised = "pool_dtype" in shapes
    parts = head_dim // 64 if head_dim > 128 else 2 if quantised and head_dim == 128 else 1
    fences = 1 + quantised + parts + ("return_lse" in options)
    assert report.count("fence.proxy.async") == fences
    columns = f"wgmma.mma_async.sync.aligned.m64n{block_kv}k16"
    both = f"wgmma.mma_async.sync.aligned.m64n{head_dim}k16"
    assert report.count("wgmma.mma_async") == loops * (head_dim + block_kv) // 16
    assert report.count(columns) > 0 and report.count(both) > 0
    # A copy for each block of K and V and each head of Q at least, stores besides.
    heads = tile_heads_of(shapes.get("group", 4))
    loads = (2 + 2 * quantised) * max(1, block_kv // block_size) + heads
    assert report.count("cp.async.bulk.tensor") >= loads
    assert report.count("cp.async.bulk.tensor") - loads < 50


@pytest.mark.nightly
@pytest.mark.sm_90a
@pytest.mark.parametrize("options", [{}, EVERY_OPTION], ids=["plain", "every option"])
@pytest.mark.parametrize(("head_dim", "block_kv", "stages"), [(64, 128, 4), (128, 64, 4)])
def test_logits_ahead_compile(head_dim, block_kv, stages, options):
    args, more = arguments(head_dim=head_dim, sinks="sinks" in options)
    attention = AttentionOptions(0.1, options.get("soft_cap"), options.get("window"))
    extend = partial(
        paged_extend_mosaic.extend, options=attention, return_lse="return_lse" in options,
        config=ExtendConfig(132, block_kv, stages, overlap=True),
    )  # fmt: skip
    report = compile_for_h100(extend, *args, more.get("sinks"), None)
    assert report.spill_bytes == 0
    # The first logits, those in each loop, and the output in each loop and at the end.
    loops = 3 if "window" in options else 2
    assert report.count("wgmma.mma_async") == (loops + 1) * (head_dim + block_kv) // 16


class TestChoice:
    REFUSED = (
        (dict(dtype="float32"), "mosaic needs q of bfloat16 or float16, got float32"),
        (dict(pool_dtype="int8", head_dim=256), "mosaic needs a head_dim of 64 or 128 for quantised pools, got 256"),  # noqa: E501
        (dict(head_dim=72), "mosaic needs a head_dim of 64, 80, 96, 112, 128, 192 or 256, got 72"),
        (dict(block_size=8), "mosaic needs a block_size of 16, 32, 64 or 128, got 8"),
        (dict(group=65), "mosaic needs at most 64 query heads per KV head, got 65"),
        (dict(tokens=0), "mosaic needs at least one token and one row, got 0 and 8"),
        (dict(batch=0), "mosaic needs at least one token and one row, got 2048 and 0"),
    )  # fmt: skip

    @pytest.mark.parametrize(("case", "reason"), REFUSED)
    def test_what_it_cannot_serve_is_served_by_xla(self, case, reason):
        args = arguments(**case)
        assert "mosaic_gpu_v2" not in lowered_for_h100(attend, *args)
        with on_h100(), pytest.raises(ValueError) as refusal:
            jax.eval_shape(partial(attend, backend="mosaic"), *args)
        assert str(refusal.value) == f"backend must be 'xla' or None here: {reason}"

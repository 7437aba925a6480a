"""How exactly the attention kernels compute: a table of their products, for each platform.

A row of a table changes on purpose, together with the kernel. TF32, for one, has no effect on a
CPU, where the other tests run.
"""

from collections import Counter
from collections.abc import Callable
from functools import cache, partial
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from radixkv.kernels import batched_attention, online_softmax, paged_decode, paged_extend
from radixkv.kernels.online_softmax import AttentionOptions
from radixkv.kernels.paged_decode import batched as decode_batched
from radixkv.kernels.paged_decode import mosaic as decode_mosaic
from radixkv.kernels.paged_decode import xla as decode_xla
from radixkv.kernels.paged_decode.config import DecodeConfig
from radixkv.kernels.paged_extend import consumer
from radixkv.kernels.paged_extend import mosaic as extend_mosaic
from radixkv.kernels.paged_extend import xla as extend_xla
from radixkv.kernels.paged_extend.config import ExtendConfig

from . import oracle
from .arithmetic import Arithmetic, arithmetic
from .lowering import shaped
from .planted import planted_below
from .problems import Heads, int32, make_cache, make_queries

HIGHEST = "float32, float32 -> float32 at HIGHEST"
BF16 = "bfloat16, bfloat16 -> float32 by wgmma"
F16 = "float16, float16 -> float32 by wgmma"
F8 = "float8_e4m3fn, float8_e4m3fn -> float32 by wgmma"

Case = tuple[str, str, str]

# Logits and output; in extend for rows of one token and for tiles, but Mosaic has no difference
# there and three loops: steps that the window cuts, whole ones, and those at the end. The output is
# rounded; Mosaic also rounds weights for the second product, and numbers of quantised pools. Its
# merge of parts rounds four vectors.
DECODE = Arithmetic({HIGHEST: 2}, {}, roundings=1)
EXTEND = Arithmetic({HIGHEST: 4}, {}, roundings=2)


def on_gpus(logits: str, output: str) -> tuple[Arithmetic, Arithmetic]:
    """XLA on GPUs: the weights are rounded, too. There are two programs, or three for tiles."""
    by_default = (f"{dtype}, {dtype} -> float32 at default" for dtype in (logits, output))
    decode, extend = Counter[str](), Counter[str]()
    for product in by_default:
        decode[product] += 2
        extend[product] += 5
    return Arithmetic(decode, {}, roundings=3), Arithmetic(extend, {}, roundings=7)


ARITHMETIC: dict[Case, tuple[Arithmetic, Arithmetic]] = {
    # Platform, queries and pools. Weights of int8 values are bfloat16 for any queries. Decode
    # multiplies keys of float8 by two or three parts of the queries, and values by float16.
    ("h100", "bfloat16", "bfloat16"): (
        Arithmetic({BF16: 2}, {}, roundings=5), Arithmetic({BF16: 6}, {}, roundings=8)
    ),
    ("h100", "bfloat16", "int8"): (
        Arithmetic({BF16: 2}, {}, roundings=5), Arithmetic({BF16: 6}, {}, roundings=17)
    ),
    ("h100", "bfloat16", "float8_e4m3fn"): (
        Arithmetic({F8: 2, F16: 1}, {}, roundings=7), Arithmetic({BF16: 6}, {}, roundings=17)
    ),
    ("h100", "float16", "float16"): (
        Arithmetic({F16: 2}, {}, roundings=5), Arithmetic({F16: 6}, {}, roundings=8)
    ),
    ("h100", "float16", "int8"): (
        Arithmetic({F16: 1, BF16: 1}, {}, roundings=5), Arithmetic({F16: 6}, {}, roundings=17)
    ),
    ("h100", "float16", "float8_e4m3fn"): (
        Arithmetic({F8: 3, F16: 1}, {}, roundings=8), Arithmetic({F16: 6}, {}, roundings=17)
    ),
    **{
        ("cpu", "float32", pool): (DECODE._replace(roundings=0), EXTEND._replace(roundings=0))
        for pool in ("float32", "int8", "float8_e4m3fn")
    },
    **{
        ("cpu", dtype, pool): (DECODE, EXTEND)
        for dtype in ("bfloat16", "float16")
        for pool in (dtype, "int8", "float8_e4m3fn")
    },
    **{
        (platform, "float32", pool): (
            Arithmetic({HIGHEST: 4}, {}, roundings=0), Arithmetic({HIGHEST: 10}, {}, roundings=0)
        )
        for platform in ("a100", "h100")
        for pool in ("float32", "int8", "float8_e4m3fn")
    },
    **{
        ("a100", dtype, pool): on_gpus(dtype, dtype if dtype == pool else "bfloat16")
        for dtype in ("bfloat16", "float16")
        for pool in (dtype, "int8", "float8_e4m3fn")
    },
}  # fmt: skip


def decode_arguments(dtype: str, pool: str) -> tuple[Any, ...]:
    """Queries, pools, tables and lengths."""
    blocks = shaped((100, 8, 16, 128), pool)
    return (
        shaped((8, 32, 128), dtype), blocks, blocks, shaped((8, 64), "int32"),
        shaped((8,), "int32"),
    )  # fmt: skip


def extend_arguments(dtype: str, pool: str) -> tuple[Any, ...]:
    q, *rest, lengths = decode_arguments(dtype, pool)
    return (shaped((200, 32, 128), q.dtype.name), *rest, lengths, lengths, lengths)


def attend(kernel: Callable[..., Any], platform: str, args: tuple[Any, ...]) -> Arithmetic:
    """The arithmetic of a kernel with every option, and with sinks of the queries' dtype."""
    quantised = args[0].dtype != args[1].dtype
    scales = {name: shaped((100, 8), "float32") for name in ("k_scales", "v_scales") if quantised}
    options = partial(kernel, sm_scale=0.1, soft_cap=30.0, window=1000, return_lse=True)
    more = {"sinks": shaped((32,), args[0].dtype.name), **scales}
    return arithmetic(platform, lambda args, more: options(*args, **more), args, more)


@pytest.mark.parametrize("case", ARITHMETIC, ids="-".join)
def test_products_are_those_of_the_table(case: Case) -> None:
    """And all else is in float32: softmax, sums, scales and the merge of parts."""
    platform, *dtypes = case
    decode, extend = ARITHMETIC[case]
    assert attend(paged_decode, platform, decode_arguments(*dtypes)) == decode
    assert attend(paged_extend, platform, extend_arguments(*dtypes)) == extend


OPTIONS = AttentionOptions(0.1, 30.0, 1000)
SINKS = shaped((32,), "float32")


def jnp_decode(module: ModuleType) -> Arithmetic:
    args = (*decode_arguments("bfloat16", "bfloat16"), SINKS)
    return arithmetic("a100", lambda *args: module.decode(*args, OPTIONS), *args)


def jnp_extend(module: ModuleType) -> Arithmetic:
    args = (*extend_arguments("bfloat16", "bfloat16"), SINKS)
    return arithmetic("a100", lambda *args: module.extend(*args, OPTIONS), *args)


def batched_decode(module: ModuleType) -> Arithmetic:
    args = (*decode_arguments("float16", "int8"), SINKS)
    scales = (shaped((100, 8), "float32"),) * 2

    def decode(args: Any, scales: Any) -> Any:
        return module.decode(*args, OPTIONS, scales)

    return arithmetic("a100", decode, args, scales)


def batched_decode_float32(module: ModuleType) -> Arithmetic:
    args = (*decode_arguments("float32", "float32"), SINKS)
    return arithmetic("a100", lambda *args: module.decode(*args, OPTIONS), *args)


def mosaic_extend(module: ModuleType) -> Arithmetic:
    extend = partial(
        module.extend, options=OPTIONS, return_lse=True, config=ExtendConfig(132, 128, 2)
    )
    args = (*extend_arguments("bfloat16", "bfloat16"), SINKS, None)
    return arithmetic("h100", extend, *args)


def mosaic_decode(module: ModuleType) -> Arithmetic:
    decode = partial(module.decode, options=OPTIONS, config=DecodeConfig(64, 3, 1), return_lse=True)
    args = (*decode_arguments("bfloat16", "bfloat16"), SINKS, None)
    return arithmetic("h100", decode, *args)


KERNELS: dict[str, tuple[Callable[[ModuleType], Arithmetic], ModuleType, ModuleType]] = {
    "jnp decode": (jnp_decode, decode_xla, online_softmax),
    "jnp extend": (jnp_extend, extend_xla, online_softmax),
    "decode on GPUs": (batched_decode, decode_batched, batched_attention),
    "decode on GPUs in float32": (batched_decode_float32, decode_batched, batched_attention),
    "mosaic decode": (mosaic_decode, decode_mosaic, online_softmax),
    "mosaic extend": (mosaic_extend, extend_mosaic, consumer),
}

JNP_BUGS = {
    "logits in TF32": ("k, q, precision=lax.Precision.HIGHEST", "k, q"),
    "output in TF32": ("weights, v, precision=lax.Precision.HIGHEST", "weights, v"),
    "three passes of bfloat16": (
        "k, q, precision=lax.Precision.HIGHEST", "k, q, precision=lax.Precision.HIGH"
    ),
    "accumulation in bfloat16": (
        '"whrc,whcd->whrd", weights, v', '"whrc,whcd->whrd", *map(jnp.bfloat16, (weights, v))'
    ),
    "softmax in bfloat16": (
        "jnp.exp(logits - peak[..., None])", "jnp.exp(jnp.bfloat16(logits - peak[..., None]))"
    ),
    "the sum of weights in bfloat16": (
        "peak, weights.sum(axis=-1)", "peak, weights.astype('bfloat16').sum(axis=-1)"
    ),
    "a merge in bfloat16": (
        "factor = jnp.exp(state.peak - peak)", "factor = jnp.exp(jnp.bfloat16(state.peak - peak))"
    ),
    "the division in bfloat16": (
        "state.weighted / (V_FACTOR * total[..., None])",
        "jnp.bfloat16(state.weighted) / jnp.bfloat16(V_FACTOR * total[..., None])",
    ),
}  # fmt: skip
BUGS: dict[str, tuple[str, str, str]] = {
    **{
        f"{kernel}: {name}": (kernel, *change)
        for name, change in JNP_BUGS.items()
        for kernel in ("jnp decode", "jnp extend")
    },
    "jnp decode: queries stay bfloat16": (
        "jnp decode", "head_dim).astype(jnp.float32)", "head_dim)"
    ),
    "jnp extend: queries stay bfloat16": ("jnp extend", "q.astype(jnp.float32)", "q"),
    "decode on GPUs: products in TF32": (
        "decode on GPUs in float32", "lax.Precision.HIGHEST if dtype", "None if dtype"
    ),
    "decode on GPUs: accumulation in bfloat16": (
        "decode on GPUs", "preferred_element_type=jnp.float32", "preferred_element_type=dtype"
    ),
    "decode on GPUs: weights of quantised values in float16": (
        "decode on GPUs", "q.dtype if wide else jnp.dtype(jnp.bfloat16)", "q.dtype"
    ),
    "decode on GPUs: softmax in bfloat16": (
        "decode on GPUs", "jnp.exp(logits - peak[..., None])",
        "jnp.exp(jnp.bfloat16(logits - peak[..., None]))",
    ),
    "decode on GPUs: the merge in bfloat16": (
        "decode on GPUs", "jnp.exp(peaks - peak[:, None])",
        "jnp.exp(jnp.bfloat16(peaks - peak[:, None]))",
    ),
    "mosaic decode: softmax in bfloat16": (
        "mosaic decode", "= jnp.exp2(logits - ", "= jnp.exp2(jnp.bfloat16(logits) - "
    ),
    "mosaic extend: the sum of weights in bfloat16": (
        "mosaic extend", "total += weights.sum(axis=1)\n            weighted, total",
        "total += narrow.sum(axis=1)\n            weighted, total",
    ),
    "mosaic extend: softmax in bfloat16": (
        "mosaic extend", "weights = jnp.exp2(logits * scale - ",
        "weights = jnp.exp2(jnp.bfloat16(logits * scale) - ",
    ),
}  # fmt: skip


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_changes_the_table(bug: str) -> None:
    name, old, new = BUGS[bug]
    traced, module, below = KERNELS[name]
    expected = traced(module)
    assert not expected.narrow
    assert traced(planted_below(module, below, changes={old: new})) != expected


EDGES = (256, 4096, 32_768)
LENGTHS = [1, *(edge + d for edge in EDGES for d in (-1, 0, 1))]


@cache
def long_rows() -> tuple[Any, jax.Array, list[tuple[np.ndarray, np.ndarray]]]:
    """A sequence in bfloat16, a query for each length of it, and their results in float64."""
    heads, block_size = Heads(1, 1, 8), 64
    length = EDGES[-1] + block_size
    rng = np.random.default_rng(0)
    made = make_cache(
        rng, [length], block_size=block_size, width=length // block_size,
        num_blocks=length // block_size, heads=heads, dtype="bfloat16",
    )  # fmt: skip
    q = make_queries(rng, len(LENGTHS), heads, "bfloat16")
    *pools, table = made.for_oracle
    k, v = (pool[table[0]].swapaxes(1, 2).reshape(length, 1, 8) for pool in pools)
    wide = np.asarray(q.astype(jnp.float32), np.float64)
    attended = [
        oracle.attend_one(wide[row], k, v, length - 1, sm_scale=0.3)
        for row, length in enumerate(LENGTHS)
    ]
    return made, q, attended


def check_long_rows(module: ModuleType) -> None:
    """The output is rounded once, from a result in float32; the log-sum-exp is not rounded."""
    made, q, expected = long_rows()
    tables = jnp.tile(made.block_tables, (len(LENGTHS), 1))
    pools = made.k_blocks, made.v_blocks, tables, int32(LENGTHS)
    out, lse = module.decode(q, *pools, None, AttentionOptions(0.3, None, None))
    found = np.asarray(out.astype(jnp.float32), np.float64)
    for row, (wanted, log) in enumerate(expected):
        assert np.abs(np.asarray(lse[row], np.float64) - log).max() < 1e-5
        assert (np.abs(found[row] - wanted) <= 2**-8 * np.abs(wanted) + 1e-5).all()


def test_long_rows_in_bfloat16() -> None:
    check_long_rows(decode_xla)


LONG_BUGS = {
    "the scale is applied twice": (
        "ids, options.sm_scale, k_scales", "ids, options.sm_scale**2, k_scales"
    ),
    "softmax in bfloat16": JNP_BUGS["softmax in bfloat16"],
    "accumulation in bfloat16": JNP_BUGS["accumulation in bfloat16"],
    "the sum of weights in bfloat16": JNP_BUGS["the sum of weights in bfloat16"],
}  # fmt: skip


@pytest.mark.nightly
@pytest.mark.parametrize("bug", LONG_BUGS)
def test_a_planted_bug_shows_in_long_rows(bug: str) -> None:
    changed = planted_below(decode_xla, online_softmax, changes=dict([LONG_BUGS[bug]]))
    with pytest.raises(AssertionError):
        check_long_rows(changed)

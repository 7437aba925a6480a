"""The precision of the forward pass: a table of what it computes, and its parts against float64.

A row of the table changes on purpose, together with the model. TF32, for one, has no effect on a
CPU, where the other tests run.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from radixkv.scheduler.models import Batch, RopeConfig, rope, transformer

from ...kernels.arithmetic import PLATFORMS, Arithmetic, arithmetic
from ...kernels.planted import planted_below
from . import reference
from .long_context import problem

HALF_ULP: Final = {"float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}
"""Relative error of a number that is rounded once."""

HIGHEST = "float32, float32 -> float32 at HIGHEST"
NORMS = {"llama": 3, "qwen3": 5}


def expected(family: str, dtype: str, decode: bool, platform: str) -> Arithmetic:
    """What one layer and the logits compute; on GPUs by XLA, because the head_dim is 16.

    Eight products with matrices, and two of attention in decode or four in extend. In 16 bits are
    the weight of each norm, SiLU and its product with the other half, and two sums. Roundings: each
    norm, each of seven products (logits stay float32), two rotations, and each attention.
    """
    attention = 2 if decode else 4
    if dtype == "float32":
        return Arithmetic({HIGHEST: 8 + attention}, {}, roundings=0)
    narrow = f"{dtype}, {dtype} -> float32 at default"
    on_cpu = platform == "cpu"
    return Arithmetic(
        {narrow: 8, HIGHEST: attention} if on_cpu else {narrow: 8 + attention},
        {"mul": NORMS[family] + 2, "add": 2, "logistic": 1},
        roundings=NORMS[family] + 7 + 2 + attention // (2 if on_cpu else 1),
    )


def traced(module: ModuleType, family: str, dtype: str, decode: bool, platform: str) -> Arithmetic:
    """The arithmetic of a step of 8 rows with the shapes of `long_context`."""
    config, params, *_ = problem(family)
    tokens = jax.ShapeDtypeStruct((8 if decode else 200,), "int32")
    rows = jax.ShapeDtypeStruct((8,), "int32")
    tables = jax.ShapeDtypeStruct((8, 9), "int32")
    batch = Batch(tokens, tokens, tokens, tables, rows, rows, rows, rows)
    pools = (jax.ShapeDtypeStruct((100, 1, 64, 16), dtype),)
    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype), params)

    def forward(*args: Any) -> Any:
        return module.forward(config, *args, decode=decode)

    return arithmetic(platform, forward, params, batch, pools, pools)


@pytest.mark.parametrize("dtype", HALF_ULP)
@pytest.mark.parametrize("family", NORMS)
def test_arithmetic_is_that_of_the_table(family: str, dtype: str) -> None:
    for platform in PLATFORMS:
        for decode in (False, True):
            found = traced(transformer, family, dtype, decode, platform)
            assert found == expected(family, dtype, decode, platform), (platform, decode)


ROPES: Final = {
    "default": RopeConfig(1_000_000.0),
    "linear": RopeConfig(50_000.0, "linear", 4.0),
    "llama3": RopeConfig(500_000.0, "llama3", 8.0, 1.0, 4.0, 8192),
}
EDGES: Final = (256, 4096, 32_768, 131_072)
POSITIONS: Final = np.array([0, 1, *(edge + d for edge in EDGES for d in (-1, 0, 1))])


def check_tables(module: ModuleType, kind: str) -> None:
    """Cosine and sine beyond every edge of a narrower type."""
    positions = jnp.asarray(POSITIONS, jnp.int32)
    for head_dim in (64, 96):  # of 96, the exponents of the frequencies are rounded
        found = module.rope_tables(ROPES[kind], head_dim, positions)
        exact = reference.cos_and_sin(ROPES[kind], head_dim, POSITIONS)
        # One unit in the last place of an angle, where the frequency is rounded otherwise.
        angles = np.outer(POSITIONS, reference.frequencies(ROPES[kind], head_dim))
        spacing = np.spacing(angles.astype(np.float32))
        for got, wanted in zip(found, exact, strict=True):
            assert got.dtype == jnp.float32
            assert (np.abs(reference.wide(got) - wanted) <= 1e-6 + 2 * spacing).all()


def check_parts(module: ModuleType, dtype: str) -> None:
    """Rotation, norm and matrix product compute in float32 and round once (the norm twice)."""
    rng = np.random.default_rng(0)

    def random(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape), dtype)

    def check(got: jax.Array, wanted: np.ndarray, roundings: int = 1) -> None:
        assert got.dtype == dtype
        bound = roundings * 1.01 * HALF_ULP[dtype] * np.abs(wanted) + 1e-5
        assert (np.abs(reference.wide(got) - wanted) <= bound).all()

    x, cos_and_sin = random(14, 3, 64), reference.cos_and_sin(ROPES["default"], 64, POSITIONS)
    turned = module.rotate(x, *(jnp.asarray(each, jnp.float32) for each in cos_and_sin))
    check(turned, reference.rotated(reference.wide(x), *cos_and_sin))
    # 4,096 of 16 equal numbers, which a sum in 16 bits would lose one by one.
    rows, norm = jnp.repeat(random(3, 16), 256, axis=1), 1 + random(4096) / 8
    wide = reference.wide(rows)
    scaled = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-6) * reference.wide(norm)
    check(module.rms_norm(rows, norm, 1e-6), scaled, roundings=2)
    linear = module.Linear(jnp.abs(random(8, 4096)), random(8))
    product = wide @ reference.wide(linear.weight).T + reference.wide(linear.bias)
    error = 4e-3  # of a sum of 4,096 products in float32
    got = module.linear(linear, rows)
    bound = 1.01 * HALF_ULP[dtype] * np.abs(product) + error
    assert got.dtype == dtype and (np.abs(reference.wide(got) - product) <= bound).all()


@pytest.mark.parametrize("kind", ROPES)
def test_angles_far_from_the_start(kind: str) -> None:
    check_tables(rope, kind)


@pytest.mark.parametrize("dtype", HALF_ULP)
def test_parts_round_once(dtype: str) -> None:
    check_parts(transformer, dtype)


ANGLES = "positions[:, None].astype(jnp.float32) * inverse_frequencies(rope, head_dim)"
BUGS: Final[dict[str, tuple[str, str]]] = {
    "positions in bfloat16": (ANGLES, ANGLES.replace("float32", "bfloat16")),
    "positions in float16": (ANGLES, ANGLES.replace("float32", "float16")),
    "frequencies computed in float32": (
        "dtype=np.float64) / head_dim\n    frequencies = rope.theta**-exponents",
        "dtype=np.float32) / np.float32(head_dim)\n"
        "    frequencies = np.float32(rope.theta) ** -exponents",
    ),
    "frequencies in bfloat16": (ANGLES, ANGLES + ".astype(jnp.bfloat16)"),
    "angles in bfloat16": (ANGLES, f"({ANGLES}).astype(jnp.bfloat16)"),
    "cosine in bfloat16": ("jnp.cos(angles)", "jnp.cos(angles).astype(jnp.bfloat16)"),
    "rotation in the model's dtype": (
        "cos, sin = cos[:, None, :], sin[:, None, :]",
        "first, second, cos, sin = (a.astype(x.dtype) for a in (first, second, cos[:, None, :], "
        "sin[:, None, :]))",
    ),
    "angles in the model's dtype": (
        "config.head_dim, batch.positions)",
        "config.head_dim, batch.positions.astype(embedding.dtype))",
    ),
    "products in TF32": (
        "precision=jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None", "precision=None"
    ),
    "accumulation in bfloat16": (
        "preferred_element_type=jnp.float32", "preferred_element_type=x.dtype"
    ),
    "a bias added in bfloat16": (
        "y = y + layer.bias.astype(jnp.float32)", "y = y.astype(x.dtype) + layer.bias"
    ),
    "a norm in bfloat16": ("wide = x.astype(jnp.float32)", "wide = x"),
    "logits in bfloat16": (
        "logits = _matmul(lm_head.weight, ", "logits = linear(lm_head, "
    ),
    "the residual stream in bfloat16, of a float32 model": (
        "on_all(mesh, embedding[batch.tokens])",
        "on_all(mesh, embedding[batch.tokens].astype(jnp.bfloat16))",
    ),
}  # fmt: skip


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_caught(bug: str) -> None:
    changed = planted_below(transformer, rope, changes=dict([BUGS[bug]]))

    def check() -> None:
        for dtype in ("float32", "bfloat16"):
            found = traced(changed, "qwen3", dtype, False, "a100")
            assert found == expected("qwen3", dtype, False, "a100")
        check_tables(changed, "default")
        check_parts(changed, "bfloat16")

    with pytest.raises(AssertionError):
        check()


def test_the_epsilon_of_a_norm_is_added_to_the_mean_square() -> None:
    rows = jnp.array([[0.0, 0.0], [1e-3, 1e-3]], jnp.float32)
    normal = transformer.rms_norm(rows, jnp.ones(2, jnp.float32), 1e-6)
    np.testing.assert_allclose(normal, [[0.0, 0.0], [0.5**0.5] * 2], rtol=1e-5)

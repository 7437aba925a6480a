"""The forward pass far from the start of a text, in float32 and bfloat16, against float64."""

from __future__ import annotations

from typing import Final

import pytest

from radixkv.scheduler.models import rope, transformer

from ...kernels.planted import planted_below
from .long_context import FAMILIES, error

TOLERANCE: Final = {"float32": 1e-5, "bfloat16": 0.02}
"""Three times what is measured, and a fifth of what the mildest planted bug does."""


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("family", FAMILIES)
def test_equals_float64(family: str, dtype: str) -> None:
    assert error(family, dtype) < TOLERANCE[dtype]


BUGS: Final = {
    "positions in bfloat16": (
        "positions[:, None].astype(jnp.float32)", "positions[:, None].astype(jnp.bfloat16)"
    ),
    "positions in 16 bits": (
        "positions[:, None].astype(jnp.float32)",
        "positions[:, None].astype(jnp.int16).astype(jnp.float32)",
    ),
    "the scale is applied twice": ("config.head_dim**-0.5", "config.head_dim**-1.0"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_caught(bug: str, dtype: str) -> None:
    changed = planted_below(transformer, rope, changes=dict([BUGS[bug]]))
    assert error("llama", dtype, changed) > 5 * TOLERANCE[dtype]

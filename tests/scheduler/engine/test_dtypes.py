"""Dtypes of the programs after the logits: all of them compute in float32.

XLA on CPUs may leave out conversions to a narrow type and back, so results there do not show them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import ClosedJaxpr, Jaxpr

from radixkv.scheduler.engine.adjustments import RowValues, adjust_logits
from radixkv.scheduler.engine.logprobs import top_logprobs
from radixkv.scheduler.engine.sampling import SamplingBatch, sample

ROWS, VOCABULARY = 20, 70


def of(shape: tuple[int, ...], dtype: Any) -> Any:
    """Return what stands for an array while a program is traced."""
    return jax.ShapeDtypeStruct(shape, dtype)


FLOATS, INTS = of((ROWS,), jnp.float32), of((ROWS,), jnp.int32)
LOGITS = of((ROWS, VOCABULARY), jnp.float32)
PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "sample": (
        sample,
        (LOGITS, SamplingBatch(FLOATS, INTS, FLOATS, of((ROWS,), jnp.uint32), INTS)),
    ),
    "top_logprobs": (top_logprobs, (LOGITS, INTS)),
    "adjust_logits": (
        adjust_logits,
        (
            LOGITS,
            FLOATS,
            RowValues(FLOATS, FLOATS, FLOATS, FLOATS),
            of((ROWS, VOCABULARY), jnp.int32),
            of((ROWS, -(-VOCABULARY // 32)), jnp.int32),
        ),
    ),
}


def equations(jaxpr: Jaxpr) -> Iterator[Any]:
    """Yield the equations of a program and of those inside of it."""
    for equation in jaxpr.eqns:
        yield equation
        for value in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda each: isinstance(each, ClosedJaxpr)
        ):
            if isinstance(value, ClosedJaxpr):
                yield from equations(value.jaxpr)
            elif isinstance(value, Jaxpr):
                yield from equations(value)


def narrow(function: Callable[..., Any], *given: Any) -> list[str]:
    """Return what a program computes in a type of fewer than 32 bits, other than bool."""
    results = [
        (equation.primitive.name, each.aval.dtype)
        for equation in equations(jax.make_jaxpr(function)(*given).jaxpr)
        for each in equation.outvars
    ]
    return [
        f"{name}: {dtype}"
        for name, dtype in results
        if dtype != jnp.bool_
        and not jnp.issubdtype(dtype, jax.dtypes.prng_key)
        and dtype.itemsize < 4
    ]


@pytest.mark.parametrize("name", PROGRAMS)
def test_nothing_is_narrower_than_float32(name: str) -> None:
    function, given = PROGRAMS[name]
    assert narrow(function, *given) == []


def test_a_narrow_type_is_seen_in_a_loop() -> None:
    def halve(x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, 3, lambda _, y: y.astype(jnp.bfloat16).astype(y.dtype), x)

    assert narrow(jax.jit(halve), FLOATS) == ["convert_element_type: bfloat16"]

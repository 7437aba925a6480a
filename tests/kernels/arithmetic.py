"""What a traced program computes, and how exactly: its products, and what is not in float32.

Tables of both stand in the tests (`test_precision.py`), one per operation and platform, so that a
change of precision is made there too, on purpose. Nothing is compiled: any platform can be traced.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from .lowering import A100, H100

PLATFORMS = {
    "cpu": AbstractDevice(device_kind="cpu", num_cores=None, platform="cpu"),
    "a100": A100,
    "h100": H100,
}

MOVES = frozenset({
    "addupdate", "broadcast", "broadcast_in_dim", "concatenate", "copy_gmem_to_smem",
    "copy_smem_to_gmem", "dynamic_slice", "dynamic_update_slice", "empty_ref", "freeze", "full",
    "gather", "get", "get_scalar", "iota", "layout_cast", "load", "new_ref",
    "optimization_barrier", "pad", "reshape", "scatter", "select_n", "slice", "split", "squeeze",
    "swap", "transpose",
})  # fmt: skip
"""Primitives that move numbers, and compute none."""


class Arithmetic(NamedTuple):
    """What a program computes."""

    products: dict[str, int]
    """How often each kind of matrix product occurs: "operands -> result at precision"."""
    narrow: dict[str, int]
    """How often each other primitive computes floats of less than 32 bits."""
    roundings: int
    """Conversions of arrays of 32 bits to narrower floats."""


def arithmetic(platform: str, function: Callable[..., Any], *args: Any) -> Arithmetic:
    """Trace `function` for a platform and return what it computes."""
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=PLATFORMS[platform])):
        jaxpr = jax.make_jaxpr(function)(*args).jaxpr
    products: Counter[str] = Counter()
    narrow: Counter[str] = Counter()
    roundings = 0
    for equation in _equations(jaxpr):
        name = equation.primitive.name
        if name in ("dot_general", "wgmma_ref"):
            products[_product(equation)] += 1
        elif name == "convert_element_type":
            source = equation.invars[0].aval
            roundings += bool(source.shape) and source.dtype.itemsize >= 4 and _narrow(equation)
        elif name not in MOVES and not any(_jaxprs(equation)) and _narrow(equation):
            narrow[name] += 1
    return Arithmetic(dict(products), dict(narrow), roundings)


def _narrow(equation: Any) -> bool:
    """Whether a result is of floats of less than 32 bits."""
    results = [_dtype(each) for each in equation.outvars]
    return any(jnp.issubdtype(each, jnp.floating) and each.itemsize < 4 for each in results)


def _equations(jaxpr: Any) -> Iterator[Any]:
    for equation in jaxpr.eqns:
        yield equation
        for inner in _jaxprs(equation):
            yield from _equations(inner)


def _jaxprs(equation: Any) -> Iterator[Any]:
    for value in equation.params.values():
        for each in value if isinstance(value, tuple | list) else (value,):
            if isinstance(each, ClosedJaxpr):
                yield each.jaxpr
            elif isinstance(each, Jaxpr):
                yield each


def _dtype(variable: Any) -> Any:
    aval = variable.aval
    return jnp.dtype(getattr(getattr(aval, "inner_aval", aval), "dtype", jnp.int32))


def _product(equation: Any) -> str:
    if equation.primitive.name == "wgmma_ref":
        # The left operand has the same dtype; if it shares its memory, it is a reference to bytes.
        accumulator, _, right, *_ = (_dtype(each).name for each in equation.invars)
        return f"{right}, {right} -> {accumulator} by wgmma"
    left, right = (_dtype(each).name for each in equation.invars)
    precision = equation.params["precision"]
    assert precision is None or precision[0] == precision[1]
    said = "default" if precision is None else precision[0].name
    return f"{left}, {right} -> {_dtype(equation.outvars[0]).name} at {said}"

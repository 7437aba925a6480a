"""Manual axes of a mesh, as `jax.shard_map` checks them unless it is told ``check_vma=False``."""

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

T = TypeVar("T")


def varying_axes(*arrays: jax.Array) -> frozenset[str]:
    """Return the manual axes over which any of the arrays varies; none outside of `shard_map`."""
    return frozenset().union(*(jax.typeof(array).manual_axis_type.varying for array in arrays))


def vary_like(initial: T, *arrays: jax.Array) -> T:
    """Mark arrays as varying over all axes over which `arrays` vary.

    A loop needs it: what it starts with must vary as what it computes.
    """
    axes = varying_axes(*arrays)

    def mark(array: jax.Array) -> jax.Array:
        missing = tuple(sorted(axes - varying_axes(array)))
        return lax.pcast(array, missing, to="varying") if missing else array

    marked: T = jax.tree.map(mark, initial)
    return marked


def output_like(output: jax.ShapeDtypeStruct, *arrays: jax.Array) -> jax.ShapeDtypeStruct:
    """Return the shape and dtype of what a kernel computes from `arrays`, with their axes."""
    if not varying_axes(*arrays):
        return output
    marked = vary_like(jnp.zeros((), output.dtype), *arrays)
    made: Any = jax.ShapeDtypeStruct  # has no types in some versions
    axes = jax.typeof(marked).manual_axis_type
    struct: jax.ShapeDtypeStruct = made(output.shape, output.dtype, manual_axis_type=axes)
    return struct

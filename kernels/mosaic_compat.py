"""What Pallas Mosaic GPU calls by other names, or cannot simulate, in JAX 0.10.2 to 0.12.

The Mosaic kernels import Pallas and this module, and only when one of them is used:
`import radixkv.kernels` stays light. Mosaic's API is "highly unstable": what depends on JAX's
version is here and nowhere else.

Interpret mode runs a kernel on a CPU, thread by thread, and can look for races. It has no WGMMA
with values in registers or, in 0.10, at all: `dot` and `dot_add` have a stand-in there, which is
why they take `interpret`.
"""

from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

# Untyped on purpose: what their types say differs between versions, as they do.
pl: Any = import_module("jax.experimental.pallas")
try:
    plgpu: Any = import_module("jax.experimental.pallas.mosaic_gpu")
except ModuleNotFoundError as missing:  # not a dependency of JAX 0.10, and its Mosaic needs it
    raise ModuleNotFoundError(
        f"Pallas Mosaic GPU in JAX {jax.__version__} needs {missing.name}: pip install absl-py"
    ) from missing

IS_010 = jax.__version_info__ < (0, 11, 0)

Interpret = Any
"""`InterpretGPUParams` simulates a kernel; None compiles it for a GPU. Static."""


def tiles(dtype: Any) -> tuple[Any, ...]:
    """Transforms of a shared buffer that WGMMA reads: rows of 128 bytes, swizzled, 8 to a tile.

    A buffer of 1-byte numbers, which threads widen for WGMMA, has rows of 64: the same 64 columns.
    """
    itemsize = jnp.dtype(dtype).itemsize
    columns = min(64, 128 // itemsize)
    return plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(columns * itemsize)


def transposed(ref: Any) -> Any:
    """A view of a shared matrix as WGMMA's right operand, its axes swapped."""
    return plgpu.transpose_ref(ref, (1, 0)) if IS_010 else ref.T


def layout_cast(value: jax.Array, layout: Any, interpret: Interpret) -> jax.Array:
    """`value` in a register layout, which interpret mode does not have."""
    if interpret is not None:
        return value
    cast: jax.Array = plgpu.layout_cast(value, layout)
    return cast


def load(ref: Any, index: Any, layout: Any, interpret: Interpret) -> jax.Array:
    """`ref[index]` in a register layout, of global or shared memory."""
    if interpret is not None:
        loaded: jax.Array = ref[index]
    elif IS_010:
        index = index if isinstance(index, tuple) else (index,)
        loaded = plgpu.load(ref, index, layout=layout, optimized=False)
    else:
        loaded = plgpu.load(ref.at[index], layout=layout, optimized=False)
    return loaded


def iota(shape: tuple[int, ...], dimension: int, layout: Any, interpret: Interpret) -> jax.Array:
    """int32 indices along a dimension, in a register layout."""
    if interpret is not None:
        return lax.broadcasted_iota(jnp.int32, shape, dimension)
    indices: jax.Array = plgpu.broadcasted_iota(jnp.int32, shape, dimension, layout=layout)
    return indices


def interpret_params(**options: Any) -> Interpret:
    """Parameters of interpret mode, such as `detect_races=True`."""
    if IS_010:
        module = import_module("jax._src.pallas.mosaic_gpu.interpret.params")
        return module.InterpretGPUParams(**options)
    return plgpu.InterpretGPUParams(**options)


def dot(
    a: Any,
    b: Any,
    shape: tuple[int, int],
    interpret: Interpret,
    meanwhile: Callable[[], None] = lambda: None,
) -> jax.Array:
    """`a @ b.T` of two shared matrices `[m, d]`, `[n, d]`: float32 `shape` = [m, n], by WGMMA.

    `meanwhile` is called after the start of the product and before the wait for its end.
    """
    if interpret is not None:
        product: jax.Array = jnp.dot(a[...], b[...].T, preferred_element_type=jnp.float32)
        meanwhile()
        return product

    def multiply(accumulator: Any) -> jax.Array:
        plgpu.wgmma(accumulator, a, transposed(b))
        meanwhile()
        value: jax.Array = accumulator[...]
        return value

    product = pl.run_scoped(multiply, plgpu.ACC(shape, jnp.float32))
    return product


def dot_add(
    total: jax.Array,
    a: jax.Array,
    b: Any,
    interpret: Interpret,
    meanwhile: Callable[[], None] = lambda: None,
) -> jax.Array:
    """`total + a @ b`: a value in registers times a shared matrix, float32, by WGMMA.

    Interpret mode reads `b` as threads do, not as the tensor cores do: before its slot is filled
    again by a copy, the stand-in needs the `commit_smem` that WGMMA does not.
    """
    if interpret is not None:
        added: jax.Array = total + jnp.dot(a, b[...], preferred_element_type=jnp.float32)
        meanwhile()
        return added

    def multiply(accumulator: Any) -> None:
        plgpu.wgmma(accumulator, a, b)
        meanwhile()

    added = pl.run_state(multiply)(plgpu.ACC.init(total))
    return added


def run(
    body: Callable[..., None],
    inputs: Sequence[jax.Array],
    updated: Sequence[jax.Array] = (),
    outputs: Sequence[jax.ShapeDtypeStruct] = (),
    *,
    name: str,
    grid: dict[str, int],
    warpgroups: int = 1,
    scratch: Sequence[Any] = (),
    interpret: Interpret = None,
    **options: Any,
) -> tuple[jax.Array, ...]:
    """Run `body(*inputs, *updated, *outputs, *scratch)` on references; return updated and outputs.

    An array that is updated keeps its buffer when the caller donates it. (`plgpu.kernel` refuses
    references in JAX 0.10; a kernel over a mesh takes them everywhere.)

    Args:
        body: The kernel, a function of references.
        inputs: Arrays that it only reads.
        updated: Arrays that it reads and writes, in place.
        outputs: Arrays that it makes.
        name: Of the kernel, in profiles and reports.
        grid: Name and size of each axis.
        warpgroups: If several, each runs the body, with its number on the axis "warpgroup".
        scratch: Shared memory and barriers.
        interpret: Simulate it on a CPU.
        options: Fields of `plgpu.CompilerParams`.
    """
    axes = () if warpgroups == 1 else ("warpgroup",)
    threads = {"num_threads": warpgroups, "thread_name": axes[0]} if axes else {}

    # Interpret mode knows barriers from `run_scoped`, not from `scratch_types`.
    def scoped(*refs: Any) -> None:
        pl.run_scoped(partial(body, *refs), *scratch, collective_axes=axes)

    refs = [jax.new_ref(array, memory_space=plgpu.GMEM) for array in updated]
    kernel = pl.kernel(
        scoped,
        out_type=tuple(outputs),
        mesh=plgpu.Mesh(grid=tuple(grid.values()), grid_names=tuple(grid), **threads),
        compiler_params=plgpu.CompilerParams(**options),
        interpret=False if interpret is None else interpret,
        name=name,
    )
    made = kernel(*inputs, *refs)
    return (*(jax.freeze(ref) for ref in refs), *made)

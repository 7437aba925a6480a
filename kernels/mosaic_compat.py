"""Compatibility layer over Pallas Mosaic GPU for JAX 0.10.2 to 0.12, and for interpret mode.

Only the Mosaic kernels import Pallas, through this module, and only when one is used, so
`import radixkv.kernels` stays light. Mosaic's API is "highly unstable": all code that depends on
the version of JAX is in this module.

Interpret mode runs a kernel on a CPU, thread by thread, and can detect races. It does not support
WGMMA with operands in registers, and JAX 0.10 supports no WGMMA there, so `dot` and `dot_add`
compute the product with jnp in interpret mode.

Workarounds, and their issues in jax-ml/jax as of 2026-11-23:

- absl must be installed for JAX 0.10: #27715.
- Shared memory that threads write has a multiple of 128 elements (`block_copy`): #32123.
- References instead of aliased inputs and outputs, for updates in place (`run`): #37972.
- No references to arrays that vary over a mesh (`run`): no upstream issue found; #36000 is about
  references under `jax.shard_map`, #36180 lifts the check inside of kernels.
- Interpret mode without WGMMA, register layouts and barriers of `scratch_types`: no upstream issue
  found.
- Layout inference that does not terminate (`paged_decode`, head_dim 256): no upstream issue found;
  #39966 and #39997 are shapes for which it fails.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from .argument_checks import KernelArgumentError
from .manual_axes import output_like, varying_axes

# Untyped on purpose, because their types differ between versions.
pl: Any = import_module("jax.experimental.pallas")
try:
    plgpu: Any = import_module("jax.experimental.pallas.mosaic_gpu")
except ModuleNotFoundError as missing:  # Mosaic of JAX 0.10 needs absl, JAX does not
    raise ModuleNotFoundError(
        f"Pallas Mosaic GPU in JAX {jax.__version__} needs {missing.name}: pip install absl-py"
    ) from missing

IS_010 = jax.__version_info__ < (0, 11, 0)

T = TypeVar("T")

Interpret = Any
"""`InterpretGPUParams` to simulate a kernel on a CPU, None to compile it for a GPU. Static."""


def when(condition: Any) -> Callable[[Callable[[], None]], None]:
    """`pl.when`, with the types of a decorator: calls the function below it if the condition holds.

    ::

        @when(step + 1 < num_steps)
        def load_next() -> None: ...
    """
    call: Callable[[Callable[[], None]], None] = pl.when(condition)
    return call


def tiles(dtype: Any, columns: int) -> tuple[Any, ...]:
    """Transforms of a shared buffer for WGMMA: tiles of 8 rows of up to 128 bytes, swizzled.

    Tiles divide the columns of the buffer, at most 64, so tiles of 16-bit numbers have rows of
    128, 64 or 32 bytes, the swizzles that WGMMA reads::

        columns            64, 128, 192, 256    96    80, 112
        columns of a tile                 64    32         16

    A buffer of 1-byte numbers, which threads convert for WGMMA, has tiles of the same columns.
    """
    itemsize = jnp.dtype(dtype).itemsize
    columns = math.gcd(columns, min(64, 128 // itemsize))
    return plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(columns * itemsize)


def transposed(ref: Any) -> Any:
    """A transposed view of a shared matrix, for the right operand of WGMMA."""
    return plgpu.transpose_ref(ref, (1, 0)) if IS_010 else ref.T


def layout_cast(value: jax.Array, layout: Any, interpret: Interpret) -> jax.Array:
    """Cast `value` to a register layout; interpret mode has no layouts."""
    if interpret is not None:
        return value
    cast: jax.Array = plgpu.layout_cast(value, layout)
    return cast


def load(ref: Any, index: Any, layout: Any, interpret: Interpret) -> jax.Array:
    """Load `ref[index]` from global or shared memory in a register layout."""
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


def dot(a: Sequence[Any], b: Any, shape: tuple[int, int], interpret: Interpret) -> jax.Array:
    """`sum(a) @ b.T` of shared matrices `[m, d]`, `[n, d]`: float32 `shape` = [m, n], by WGMMA."""
    return dot_beside(a, b, shape, interpret, lambda: None)[0]


def dot_beside(
    a: Sequence[Any],
    b: Any,
    shape: tuple[int, int],
    interpret: Interpret,
    overlapped: Callable[[], T],
) -> tuple[jax.Array, T]:
    """`dot`, and what `overlapped` returns, which is called while the tensor cores compute it."""
    if interpret is not None:
        products = [jnp.dot(x[...], b[...].T, preferred_element_type=jnp.float32) for x in a]
        return sum(products[1:], start=products[0]), overlapped()

    def multiply(accumulator: Any) -> tuple[jax.Array, T]:
        for each in a:
            plgpu.wgmma(accumulator, each, transposed(b))
        beside = overlapped()
        return accumulator[...], beside

    result: tuple[jax.Array, T] = pl.run_scoped(multiply, plgpu.ACC(shape, jnp.float32))
    return result


def dot_add(
    total: jax.Array,
    a: jax.Array,
    b: Any,
    interpret: Interpret,
    overlapped: Callable[[], None] = lambda: None,
) -> jax.Array:
    """`total + a @ b`: a value in registers times a shared matrix, float32, by WGMMA.

    `overlapped` is called while the tensor cores compute the product. See `release` for `b`.
    """
    if interpret is not None:
        added: jax.Array = total + jnp.dot(a, b[...], preferred_element_type=jnp.float32)
        overlapped()
        return added

    def multiply(accumulator: Any) -> None:
        plgpu.wgmma(accumulator, a, b)
        overlapped()

    added = pl.run_state(multiply)(plgpu.ACC.init(total))
    return added


def release(barrier: Any, interpret: Interpret) -> None:
    """Hand shared memory that `dot` or `dot_add` has read back to the producer.

    In interpret mode, threads have read it instead of the tensor cores: they need a fence before a
    copy overwrites it.
    """
    if interpret is not None:
        plgpu.commit_smem()
    plgpu.barrier_arrive(barrier)


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
    """Launch `body(*inputs, *updated, *outputs, *scratch)` on references.

    Updated arrays keep their buffer if the caller donates them. (`plgpu.kernel` rejects references
    in JAX 0.10; a kernel over a mesh accepts them in all versions.)

    Args:
        body: The kernel, a function of references.
        inputs: Arrays that the kernel only reads.
        updated: Arrays that the kernel updates in place.
        outputs: Shapes and dtypes of the arrays that the kernel creates.
        name: Name of the kernel in profiles and reports.
        grid: Name and size of each grid axis.
        warpgroups: Number of warpgroups; if several, each runs the body with its index on the axis
            "warpgroup".
        scratch: Shared memory and barriers.
        interpret: Parameters to simulate the kernel on a CPU.
        options: Fields of `plgpu.CompilerParams`.

    Returns:
        The updated arrays, then the outputs.

    Raises:
        KernelArgumentError: `jax.shard_map` checks varying axes, for which JAX since 0.11 has no
            references.
    """
    if updated and varying_axes(*updated) and not IS_010:
        raise KernelArgumentError(
            f"{name} updates arrays in place: with backend='mosaic', jax.shard_map needs"
            " check_vma=False"
        )
    outputs = [output_like(each, *inputs, *updated) for each in outputs]
    axes = () if warpgroups == 1 else ("warpgroup",)
    threads = {"num_threads": warpgroups, "thread_name": axes[0]} if axes else {}

    # Interpret mode supports barriers of `run_scoped`, but not of `scratch_types`.
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

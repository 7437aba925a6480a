"""The compiled programs of an engine: which there are, their compilation, and a step of them.

::

    unrolled         step                                 one per shape, with all layers
    layer by layer   embed, layer x num_layers, head      three per shape, for any number of layers
    by groups        embed, layers x num_groups, head     three or four per shape
    in both          draw                                 one, for steps with requests to draw for

On accelerators one program per shape is right: a step is one launch, and a Pallas kernel is
compiled once for all layers. On a CPU, XLA compiles every layer again, in 0.1 to 0.3 s, while a
launch takes microseconds; so models of many layers run layer by layer there. A prefill node that
sends the KV of a group of layers while it computes the next needs a program per group, because the
results of a program are ready together.

Logits, tokens and what is drawn from have one row per request that may run, whatever the shape. So
one program draws for all shapes, and no other one sorts. Greedy tokens come from the step itself.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.stages import Compiled, Lowered
from jaxtyping import Array, Float, Int32

from ...kernels import compiler_options
from ...kernels.backends import target_device
from ...kvcache import BlockArrays, Int32Array
from ...kvcache.copies.block_arrays import put_of
from ..models import Batch, LayerParams, Linear, Model, ModelConfig, Params, forward
from ..models.tensor_parallel import on_all, whole
from ..models.transformer import Pools, Rope, compute_layers, compute_logits, embed
from .batch_state import BatchState
from .sampling import SamplingBatch, draw
from .step_arrays import NO_SLOT, Shape, unpack

_MOST_UNROLLED_LAYERS: Final = 4
"""Layers of the largest model that a CPU runs as one program."""

_log = logging.getLogger(__name__)


class Rows(NamedTuple):
    """The rows of a step, and padding rows up to the number of requests that may run.

    Attributes:
        sampling: how to sample each; padding is greedy.
        slots: place of each in the batch on the device; none for padding.
    """

    sampling: SamplingBatch
    slots: Int32[Array, " all_rows"]


class Programs:
    """The programs of an engine. It owns the logits, so use it from one thread only.

    Attributes:
        logits: those of the last step, as the model computed them; the next step replaces them.
    """

    def __init__(
        self,
        model: Model,
        arrays: BlockArrays,
        state: BatchState,
        shapes: Sequence[Shape],
        block_size: int,
        num_groups: int = 1,
    ) -> None:
        """Compile every program, the largest first, so that a lack of memory shows at once.

        The programs are compiled in parallel threads. The logger of this module is told of each, as
        information: "compiling 3 of 7 programs".

        Args:
            model: configuration and parameters.
            arrays, state: pools and batch of the shapes and dtypes of each step.
            shapes: shapes to compile.
            block_size: tokens per block.
            num_groups: number of groups of layers that `run` tells apart.
        """
        self._hidden: tuple[Batch, Array] | None = None  # of a step that keeps them
        self._config, self._mesh, self._block_size = model.config, model.mesh, block_size
        num_rows = max(shape.num_rows for shape in shapes)
        zeros = np.zeros((num_rows, model.config.vocab_size), np.float32)
        on_devices = whole(model.mesh)
        self.logits = put_of(on_devices)(zeros, on_devices)
        is_cpu = target_device().platform == "cpu"
        self._by_layer = is_cpu and model.config.num_layers > _MOST_UNROLLED_LAYERS
        num_layers = model.config.num_layers
        self._groups = [layers_of(num_layers, group, num_groups) for group in range(num_groups)]
        self._layers = [layers_of(num_layers, layer, num_layers) for layer in range(num_layers)]
        lower = _lower_step
        if self._by_layer or num_groups > 1:
            lower = partial(_lower_layers, parts=self._parts(keep_hidden=False))
        lowerings: dict[Any, Callable[[], Lowered]] = {}
        for shape in sorted(shapes, key=lambda shape: -shape.num_tokens):
            lowerings.update(lower(model, arrays, state, shape, block_size, self.logits))
        rows = empty_rows(num_rows)
        tokens = np.zeros(num_rows, np.int32)
        lowerings["draw"] = partial(_draw.lower, self.logits, rows, tokens, state.last_tokens)
        self._programs = _compile(lowerings)

    def run(
        self,
        shape: Shape,
        params: Params,
        packed: Int32Array,
        state: BatchState,
        arrays: BlockArrays,
        *,
        keep_hidden: bool = False,
        wrote: Callable[[int], None] | None = None,
    ) -> tuple[Int32[Array, " all_rows"], Rows, BatchState]:
        """Dispatch a step, which replaces the pools and the logits.

        Args:
            shape: shape of the step.
            params: parameters of the model.
            packed: the arrays of the step, see `pack`.
            state: batch on the device; donated.
            arrays: pools.
            keep_hidden: whether `take_hidden` is to follow, which needs the programs for single
                layers.
            wrote: is told of each group of layers but the last one when all that writes its KV is
                dispatched, and before the next is.

        Returns:
            The most likely token of each row and of padding, the rows, and the new batch.
        """
        if self._by_layer or keep_hidden or len(self._groups) > 1:
            parts = self._parts(keep_hidden=keep_hidden)
            if ("layers", shape, _length(parts[0])) not in self._programs:
                model = Model(self._config, params, self._mesh)
                given = model, arrays, state, shape, self._block_size, self.logits
                self._programs.update(_compile(dict(_lower_layers(*given, parts=parts))))
            results = self._programs["embed", shape](params.embedding, packed, state)
            batch, rows, state, x, rope = results
            keys, values, group = list(arrays.keys), list(arrays.values), 0
            for part in parts:
                compute = self._programs["layers", shape, _length(part)]
                x, keys[part], values[part] = compute(
                    params.layers[part], batch, x, rope, tuple(keys[part]), tuple(values[part])
                )
                if part.stop == self._groups[group].stop and wrote and part.stop < len(keys):
                    arrays.keys, arrays.values = tuple(keys), tuple(values)
                    wrote(group)
                    group += 1
            arrays.keys, arrays.values = tuple(keys), tuple(values)
            self._hidden = (batch, x) if keep_hidden else None
            tokens, last_tokens, self.logits = self._programs["head", shape](
                params.norm, params.lm_head, batch, x, rows.slots, state.last_tokens, self.logits
            )
            state = state._replace(last_tokens=last_tokens)
        else:
            results = self._programs[shape](
                params, packed, state, self.logits, arrays.keys, arrays.values
            )
            tokens, rows, state, self.logits, arrays.keys, arrays.values = results
        return tokens, rows, state

    def take_hidden(self) -> tuple[Batch, Float[Array, "tokens hidden"]] | None:
        """Return, once, batch and residual stream after the last layer of a step that kept them."""
        hidden, self._hidden = self._hidden, None
        return hidden

    def _parts(self, *, keep_hidden: bool) -> list[slice]:
        """Return the layers of each program of a step that is not unrolled."""
        return self._layers if self._by_layer or keep_hidden else self._groups

    def draw(
        self,
        logits: Float[Array, "all_rows vocab"],
        rows: Rows,
        tokens: Int32[Array, " all_rows"],
        state: BatchState,
    ) -> tuple[Int32[Array, " all_rows"], BatchState]:
        """Replace the tokens of rows with a temperature above 0 by drawn ones."""
        tokens, last_tokens = self._programs["draw"](logits, rows, tokens, state.last_tokens)
        return tokens, state._replace(last_tokens=last_tokens)


def layers_of(num_layers: int, group: int, num_groups: int) -> slice:
    """Return the layers of one of several groups of nearly equal size."""
    first, stop = [(group + each) * num_layers // num_groups for each in (0, 1)]
    return slice(first, stop)


def _length(part: slice) -> int:
    length: int = part.stop - part.start
    return length


def _compile(lowerings: Mapping[Any, Callable[[], Lowered]]) -> dict[Any, Compiled]:
    """Compile programs in parallel. They are lowered on this thread, because that holds the GIL."""
    programs, total, options = {}, len(lowerings), compiler_options()
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        try:
            _log.info("compiling %d of %d programs", 1, total)
            futures = {
                pool.submit(lower().compile, options): key for key, lower in lowerings.items()
            }
            for number, future in enumerate(as_completed(futures), start=2):
                programs[futures[future]] = future.result()
                if number <= total:
                    _log.info("compiling %d of %d programs", number, total)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return programs


def _lower_step(
    model: Model,
    arrays: BlockArrays,
    state: BatchState,
    shape: Shape,
    block_size: int,
    logits: Array,
) -> Iterator[tuple[Any, Callable[[], Lowered]]]:
    """Yield the program of a shape, by the shape."""
    static = model.config, model.mesh, shape, block_size
    step = *static, model.params, _empty(shape), state, logits
    yield shape, partial(_step.lower, *step, arrays.keys, arrays.values)


def _lower_layers(
    model: Model,
    arrays: BlockArrays,
    state: BatchState,
    shape: Shape,
    block_size: int,
    logits: Array,
    *,
    parts: Sequence[slice],
) -> Iterator[tuple[Any, Callable[[], Lowered]]]:
    """Yield the programs of a shape that computes its layers in parts, by name and shape."""
    of_model, params = (model.config, model.mesh), model.params
    static = *of_model, shape, block_size, len(logits)
    given = params.embedding, _empty(shape), state
    batch, rows, _, x, rope = jax.eval_shape(partial(_embed, *static), *given)
    for part in {_length(part): part for part in parts}.values():
        pools = arrays.keys[part], arrays.values[part]
        given_layers = *of_model, shape.is_decode, params.layers[part], batch, x, rope, *pools
        yield ("layers", shape, _length(part)), partial(_layers.lower, *given_layers)
    head = params.norm, params.lm_head, batch, x, rows.slots, state.last_tokens, logits
    yield ("head", shape), partial(_head.lower, *of_model, *head)
    yield ("embed", shape), partial(_embed.lower, *static, *given)


def _empty(shape: Shape) -> Int32Array:
    return np.zeros(shape.packed_size, np.int32)


def empty_rows(num_rows: int) -> Any:
    """Return rows that are all padding, to compile with."""
    floats, integers = np.zeros(num_rows, np.float32), np.zeros(num_rows, np.int32)
    sampling: Any = floats, integers, floats, integers.astype(np.uint32), integers
    return Rows(SamplingBatch(*sampling), sampling[1])


# One function for all engines, so that JAX reuses the programs of earlier engines.


@partial(jax.jit, static_argnums=(0, 1, 2, 3), donate_argnums=(6, 7, 8, 9))
def _step(
    config: ModelConfig,
    mesh: Mesh | None,
    shape: Shape,
    block_size: int,
    params: Params,
    packed: Int32[Array, " packed"],
    state: BatchState,
    logits: Float[Array, "all_rows vocab"],
    k_pools: Pools,
    v_pools: Pools,
) -> tuple[Array, Rows, BatchState, Array, Pools, Pools]:
    batch, rows, state = _unpack(mesh, shape, block_size, len(logits), packed, state)
    computed, k_pools, v_pools = forward(
        config, params, batch, k_pools, v_pools, decode=shape.is_decode, mesh=mesh
    )
    tokens, last_tokens, logits = _choose(computed, rows.slots, state.last_tokens, logits)
    state = state._replace(last_tokens=last_tokens)
    return *on_all(mesh, (tokens, rows, state, logits)), k_pools, v_pools


@partial(jax.jit, static_argnums=(0, 1, 2, 3, 4), donate_argnums=7)
def _embed(
    config: ModelConfig,
    mesh: Mesh | None,
    shape: Shape,
    block_size: int,
    num_rows: int,
    embedding: Float[Array, "vocab hidden"],
    packed: Int32[Array, " packed"],
    state: BatchState,
) -> tuple[Batch, Rows, BatchState, Float[Array, "tokens hidden"], Rope]:
    batch, rows, state = _unpack(mesh, shape, block_size, num_rows, packed, state)
    return on_all(mesh, (batch, rows, state, *embed(config, embedding, batch, mesh=mesh)))


@partial(jax.jit, static_argnums=(0, 1, 2), donate_argnums=(5, 7, 8))
def _layers(
    config: ModelConfig,
    mesh: Mesh | None,
    is_decode: bool,
    layers: tuple[LayerParams, ...],
    batch: Batch,
    x: Float[Array, "tokens hidden"],
    rope: Rope,
    k_pools: Pools,
    v_pools: Pools,
) -> tuple[Float[Array, "tokens hidden"], Pools, Pools]:
    return compute_layers(
        config, layers, batch, x, rope, k_pools, v_pools, decode=is_decode, mesh=mesh
    )


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=(7, 8))
def _head(
    config: ModelConfig,
    mesh: Mesh | None,
    norm: Float[Array, " hidden"],
    lm_head: Linear,
    batch: Batch,
    x: Float[Array, "tokens hidden"],
    slots: Int32[Array, " all_rows"],
    last_tokens: Int32[Array, " slots"],
    logits: Float[Array, "all_rows vocab"],
) -> tuple[Array, Array, Array]:
    computed = compute_logits(config, norm, lm_head, batch, x, mesh=mesh)
    return on_all(mesh, _choose(computed, slots, last_tokens, logits))


@partial(jax.jit, donate_argnums=3)
def _draw(
    logits: Float[Array, "all_rows vocab"],
    rows: Rows,
    tokens: Int32[Array, " all_rows"],
    last_tokens: Int32[Array, " slots"],
) -> tuple[Array, Array]:
    tokens = draw(logits, rows.sampling, tokens)
    return tokens, last_tokens.at[rows.slots].set(tokens, mode="drop")


def _unpack(
    mesh: Mesh | None,
    shape: Shape,
    block_size: int,
    num_rows: int,
    packed: Array,
    state: BatchState,
) -> tuple[Batch, Rows, BatchState]:
    packed = on_all(mesh, packed)
    batch, sampling, state, slots = unpack(packed, state, shape, block_size)
    more = (0, num_rows - shape.num_rows)
    padded = SamplingBatch(*(jnp.pad(field, more) for field in sampling))
    return batch, Rows(padded, jnp.pad(slots, more, constant_values=NO_SLOT)), state


def _choose(
    computed: Float[Array, "rows vocab"], slots: Array, last_tokens: Array, logits: Array
) -> tuple[Array, Array, Array]:
    """Return the greedy tokens, the last tokens with those, and the logits with the step's."""
    tokens = jnp.argmax(computed, axis=-1).astype(jnp.int32)
    tokens = jnp.pad(tokens, (0, len(slots) - len(tokens)))
    last_tokens = last_tokens.at[slots].set(tokens, mode="drop")
    return tokens, last_tokens, lax.dynamic_update_slice(logits, computed, (0, 0))

"""The second kernel of the Mosaic `paged_decode`: merges the parts of each (row, KV head).

A thread block of four warps merges the parts of some query heads. A vector of `MERGE_VECTOR`
elements or a multiple, as many for each thread, holds one head or a few::

    head_dim            64    80    96   112   128   192   256
    heads together       2     8     4     8     1     2     1
    elements           128   640   384   896   128   384   256

Each step reads `MERGE_PARTS` parts, so that their latencies overlap; the last one stands in for
those past it, which weigh 0::

    weight[i] = exp2(lse[i] - peak)       out = sum(weight[i] * part[i]) / sum(weight[i])

The log-sum-exps of the parts are in base 2.
"""

import math
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from .. import mosaic_compat as mosaic
from ..mosaic_compat import Interpret, plgpu
from .config import MERGE_PARTS, MERGE_VECTOR, MERGE_VECTORS

LOG2E = math.log2(math.e)
LOWEST = -1e30


def heads_together(head_dim: int) -> int:
    """Query heads in a vector of the merge, which divide the heads of a group."""
    return math.lcm(head_dim, MERGE_VECTOR) // head_dim


def merge_parts(
    parts: Float[Array, "parts group head_dim"],
    lses: Float[Array, "parts rows"],
    parts_of_pairs: Int32[Array, "pairs 2"],
    sinks: Float[Array, "kv_heads group"] | None,
    dtype: Any,
    return_lse: bool,
    interpret: Interpret,
) -> tuple[Float[Array, "pairs elements"], Float[Array, "pairs group"] | None]:
    """Merge the parts of each pair of a row and a KV head.

    Args:
        parts: Attention of each part, normalised; those that no pair names are not read.
        lses: Log-sum-exps in base 2, -inf for a head that saw no token; ``rows >= group``.
        parts_of_pairs: Index of the first part of each pair, and number of parts.
        sinks: As in `paged_decode`, included in no part.
        dtype: That of the output.
        return_lse: Whether to return the log-sum-exps; they are None otherwise.
        interpret: Simulate on a CPU.

    Returns:
        The output, heads side by side, and the natural log-sum-exps. 0 and -inf for a head that saw
        no token, or has no part; NaN for one with a part that is NaN.
    """
    num_parts, group, head_dim = parts.shape
    pairs, size = parts_of_pairs.shape[0], heads_together(head_dim) * head_dim
    number = group * head_dim // size
    shaped = cast(Any, jax.ShapeDtypeStruct)  # has no types in some versions
    inputs = {
        "parts": parts.reshape(num_parts, number, size),
        "lses": lses,
        "pairs": parts_of_pairs,
    }
    if sinks is not None:
        inputs["sinks"] = sinks.astype(jnp.float32) * LOG2E
    outputs = {"out": shaped((pairs, number, size), dtype)}
    if return_lse:
        outputs["lse"] = shaped((pairs, number, size), jnp.float32)
    each = math.gcd(number, max(1, MERGE_VECTORS * MERGE_VECTOR // size))
    out, *lse = mosaic.run(
        partial(_body, (*inputs, *outputs), head_dim, each, interpret),
        tuple(inputs.values()),
        outputs=tuple(outputs.values()),
        name="paged_decode_merge",
        grid={"pair": pairs, "part": number // each},
        interpret=interpret,
        approx_math=True,
        lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
    )
    heads = [each.reshape(pairs, group, head_dim)[..., 0] for each in lse]
    return out.reshape(pairs, -1), heads[0] if heads else None


def _body(
    names: tuple[str, ...], head_dim: int, number: int, interpret: Interpret, *references: Any
) -> None:
    """Merge `number` vectors of one pair."""
    refs = SimpleNamespace(**dict(zip(names, references, strict=True)))
    pair, block = lax.axis_index("pair"), lax.axis_index("part")
    first, end = refs.pairs[pair, 0], refs.pairs[pair, 0] + refs.pairs[pair, 1]
    heads = heads_together(head_dim)
    size = heads * head_dim

    def by_head(scalars: list[Any]) -> Any:
        """A vector of one scalar per head."""
        spread = lax.broadcast(scalars[0], (size,))
        if heads > 1:
            element = mosaic.iota((size,), 0, plgpu.Layout.WG_STRIDED((size,), 1), interpret)
            for i in range(1, heads):
                spread = jnp.where(element >= i * head_dim, scalars[i], spread)
        return spread

    def add(i: Any, state: tuple[Any, ...]) -> tuple[Any, ...]:
        """The parts from `first + i * MERGE_PARTS` on."""
        merged = []
        for v, (weighted, peak, total) in enumerate(state):
            vector = block * number + v
            lses, values = [], []
            for j in range(MERGE_PARTS):
                wanted = first + i * MERGE_PARTS + j
                part = jnp.minimum(wanted, end - 1)
                of_heads = [refs.lses[part, vector * heads + h] for h in range(heads)]
                lses.append(by_head([jnp.where(wanted < end, lse, -jnp.inf) for lse in of_heads]))
                values.append(refs.parts[part, vector])
            new_peak = peak
            for lse in lses:
                new_peak = jnp.maximum(new_peak, lse)
            factor = jnp.exp2(peak - new_peak)
            weighted, total = weighted * factor, total * factor
            for lse, value in zip(lses, values, strict=True):
                weight = jnp.exp2(lse - new_peak)
                weighted, total = weighted + weight * value, total + weight
            merged.append((weighted, new_peak, total))
        return tuple(merged)

    zeros = jnp.zeros((size,), jnp.float32)
    state = tuple((zeros, zeros + LOWEST, zeros) for _ in range(number))
    steps = lax.div(end - first + (MERGE_PARTS - 1), jnp.int32(MERGE_PARTS))
    for v, (weighted, peak, total) in enumerate(lax.fori_loop(0, steps, add, state)):
        vector = block * number + v
        empty = total == 0  # not `> 0`: NaN in, NaN out
        if "sinks" in names:
            kv_head = lax.rem(pair, jnp.int32(refs.sinks.shape[0]))
            sink = by_head([refs.sinks[kv_head, vector * heads + h] for h in range(heads)])
            new_peak = jnp.maximum(peak, sink)
            factor = jnp.exp2(peak - new_peak)
            weighted, total = weighted * factor, total * factor + jnp.exp2(sink - new_peak)
            peak = new_peak
        total = jnp.where(empty, 1.0, total)
        refs.out[pair, vector] = (weighted / total).astype(refs.out.dtype)
        if "lse" in names:
            lse = jnp.where(empty, -jnp.inf, (peak + jnp.log2(total)) / LOG2E)
            refs.lse[pair, vector] = lse

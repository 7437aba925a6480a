"""Checks of the values of ids, lengths and scales at run time, under `checkify`."""

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
from jax.experimental import checkify

from .block_copy import copy_blocks, gather_blocks, scatter_blocks
from .kv_write import kv_write
from .latent_attention import latent_decode, latent_extend
from .paged_decode import paged_decode
from .paged_extend import paged_extend

Kernel = TypeVar("Kernel", bound=Callable[..., Any])


def checked(kernel: Kernel) -> Kernel:
    """Return a kernel with checks of its values, for use under ``checkify``.

    ::

        def step(...):
            return checked(paged_decode)(q, k_blocks, v_blocks, block_tables, lengths, ...)

        error, out = jax.jit(checkify.checkify(step))(...)
        error.throw()           # checkify.JaxRuntimeError: block_tables[3, 7] must be in 0 .. 512

    The kernels themselves have no such checks, in any backend, and never access memory outside
    their arguments. The last column is what they do without `checked`::

        argument                     must be                         otherwise
        lengths, kv_lengths          >= 0                            treated as 0
                                     within the row's table          NaN in that row
        block_tables, where used     a block of the pools            a wrong result in that row
        q_lengths                    0 .. kv_lengths                 see paged_extend
        q_starts of active rows      disjoint rows within q          undefined outputs
        slots                        -1 or in the pools              the token is skipped
                                     distinct                        undefined contents there
        k_scales, v_scales           > 0 where a token is written    undefined contents
        ids, sources, destinations   -1 or in the pool               the entry is skipped
        ids that are written         distinct, no source among them  undefined contents
        count                        0 .. n                          clipped to that range

    Args:
        kernel: `paged_decode`, `paged_extend`, `latent_decode`, `latent_extend`, `kv_write`,
            `copy_blocks`, `gather_blocks` or `scatter_blocks`.

    Raises:
        KeyError: ``kernel`` is another function.
    """
    check = _CHECKS[kernel]
    signature = inspect.signature(kernel)

    @wraps(kernel)
    def call(*args: Any, **kwargs: Any) -> Any:
        result = kernel(*args, **kwargs)  # before: it checks the shapes
        check(**signature.bind(*args, **kwargs).arguments)
        return result

    return cast(Kernel, call)


def _fail_if(bad: jax.Array, message: str, **values: jax.Array) -> None:
    """Fail if an element is bad; the message may name `row`, `column` and `values` of the first."""
    if bad.size == 0:
        return
    first = jnp.unravel_index(jnp.argmax(bad), bad.shape)
    found: dict[str, Any] = dict(zip(("row", "column"), first, strict=False))
    found |= {name: jnp.broadcast_to(value, bad.shape)[first] for name, value in values.items()}
    checkify.check(~bad.any(), message, **found)


def _check_tables(
    block_tables: jax.Array, kv_lengths: jax.Array, first_visible: jax.Array, pool: jax.Array
) -> None:
    num_blocks, _, block_size, _ = pool.shape
    column = jnp.arange(block_tables.shape[1])
    used = (column >= first_visible[:, None] // block_size) & (
        column * block_size < kv_lengths[:, None]
    )
    _fail_if(
        used & ((block_tables < 0) | (block_tables >= num_blocks)),
        f"block_tables[{{row}}, {{column}}] must be in 0 .. {num_blocks - 1}, got {{id}}",
        id=block_tables,
    )


def _check_lengths(name: str, lengths: jax.Array, block_tables: jax.Array, pool: jax.Array) -> None:
    _fail_if(lengths < 0, f"{name}[{{row}}] must be >= 0, got {{length}}", length=lengths)
    capacity = block_tables.shape[1] * pool.shape[2]
    _fail_if(
        lengths > capacity,
        f"{name}[{{row}}] must be at most {capacity}, the capacity of its block table, "
        "got {length}",
        length=lengths,
    )


def _check_decode(
    *,
    k_blocks: jax.Array,
    block_tables: jax.Array,
    lengths: jax.Array,
    window: int | None = None,
    **_: Any,
) -> None:
    _check_lengths("lengths", lengths, block_tables, k_blocks)
    first_visible = jnp.zeros_like(lengths) if window is None else lengths - window
    _check_tables(block_tables, lengths, first_visible, k_blocks)


def _check_extend(
    *,
    q: jax.Array,
    k_blocks: jax.Array,
    block_tables: jax.Array,
    kv_lengths: jax.Array,
    q_lengths: jax.Array,
    q_starts: jax.Array,
    window: int | None = None,
    **_: Any,
) -> None:
    _check_lengths("kv_lengths", kv_lengths, block_tables, k_blocks)
    _fail_if(
        (q_lengths < 0) | (q_lengths > kv_lengths),
        "q_lengths[{row}] must be in 0 .. {kv_length} (its kv_lengths), got {length}",
        length=q_lengths,
        kv_length=kv_lengths,
    )
    active = q_lengths > 0
    ends = q_starts + q_lengths
    _fail_if(
        active & ((q_starts < 0) | (ends > q.shape[0])),
        f"row {{row}} must lie within the {q.shape[0]} tokens of q, got {{start}} .. {{end}}",
        start=q_starts,
        end=ends,
    )
    starts = jnp.where(active, q_starts, jnp.iinfo(jnp.int32).max)  # type: ignore[no-untyped-call]
    order = jnp.argsort(starts)
    _fail_if(
        (jnp.where(active, ends, 0)[order][:-1] > starts[order][1:]),
        "rows must be disjoint in q, but row {one} ends after row {other} starts",
        one=order[:-1],
        other=order[1:],
    )
    lengths = jnp.where(active, kv_lengths, 0)
    first = jnp.zeros_like(lengths) if window is None else lengths - q_lengths + 1 - window
    _check_tables(block_tables, lengths, first, k_blocks)


def _check_ids(name: str, ids: jax.Array, active: jax.Array, size: int) -> None:
    _fail_if(
        active & ((ids < -1) | (ids >= size)),
        f"{name}[{{row}}] must be -1 or in 0 .. {size - 1}, got {{id}}",
        id=ids,
    )


def _check_distinct(name: str, ids: jax.Array, active: jax.Array) -> None:
    written = jnp.sort(jnp.where(active, ids, -1))
    _fail_if(
        (written[1:] == written[:-1]) & (written[1:] >= 0),
        f"{name} must be distinct, but {{id}} occurs twice",
        id=written[1:],
    )


def _check_write(
    *,
    slots: jax.Array,
    k_blocks: jax.Array,
    k_scales: jax.Array | None = None,
    v_scales: jax.Array | None = None,
    **_: Any,
) -> None:
    num_blocks, block_size = k_blocks.shape[0], k_blocks.shape[2]
    all_tokens = jnp.ones(slots.shape, bool)
    _check_ids("slots", slots, all_tokens, num_blocks * block_size)
    _check_distinct("slots", slots, all_tokens)
    block = slots // block_size
    for name, scales in (("k_scales", k_scales), ("v_scales", v_scales)):
        if scales is not None:
            used = scales.at[block].get(mode="clip")
            _fail_if(
                (slots[:, None] >= 0) & ~(used > 0),
                f"{name}[{{block}}, {{column}}] must be > 0, got {{scale}}",
                block=block[:, None],
                scale=used,
            )


def _active(ids: jax.Array, count: jax.Array) -> jax.Array:
    """Check `count`; return the mask of the first `count` entries."""
    _fail_if(
        (count < 0) | (count > ids.shape[0]),
        f"count must be in 0 .. {ids.shape[0]}, got {{count}}",
        count=count,
    )
    return jnp.arange(ids.shape[0]) < count


def _num_blocks(blocks: Any) -> int:
    size: int = (blocks[0] if isinstance(blocks, tuple) else blocks).shape[0]
    return size


def _check_copy(
    *, blocks: Any, sources: jax.Array, destinations: jax.Array, count: jax.Array, **_: Any
) -> None:
    active = _active(sources, count)
    size = _num_blocks(blocks)
    _check_ids("sources", sources, active, size)
    _check_ids("destinations", destinations, active, size)
    active &= (sources >= 0) & (destinations >= 0)
    _check_distinct("destinations", destinations, active)
    _fail_if(
        active & jnp.isin(destinations, jnp.where(active, sources, -1)),
        "destinations[{row}] must not be a source, got {id}",
        id=destinations,
    )


def _check_gather(*, blocks: Any, ids: jax.Array, count: jax.Array, **_: Any) -> None:
    _check_ids("ids", ids, _active(ids, count), _num_blocks(blocks))


def _check_scatter(*, blocks: Any, ids: jax.Array, count: jax.Array, **_: Any) -> None:
    active = _active(ids, count)
    _check_ids("ids", ids, active, _num_blocks(blocks))
    _check_distinct("ids", ids, active)


_CHECKS: dict[Callable[..., Any], Callable[..., None]] = {
    paged_decode: _check_decode,
    paged_extend: _check_extend,
    latent_decode: lambda *, latents, **rest: _check_decode(k_blocks=latents, **rest),
    latent_extend: lambda *, latents, **rest: _check_extend(k_blocks=latents, **rest),
    kv_write: _check_write,
    copy_blocks: _check_copy,
    gather_blocks: _check_gather,
    scatter_blocks: _check_scatter,
}

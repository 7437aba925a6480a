"""Compiled block copies: within the pools, from the pools to staging arrays, and back."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cache
from typing import Any, Final, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jax.stages import Compiled
from jaxtyping import Array, Float, Int32, Shaped

from ...kernels import compiler_options, copy_blocks, gather_blocks, scatter_blocks
from ..tokens import Int32Array, as_count
from .block_arrays import BlockArrays, put_of, put_parts
from .host_arrays import check_block_ids

Pools = tuple[Float[Array, "blocks kv_heads block_size head_dim"], ...]
Staging = tuple[Float[Array, "n kv_heads block_size head_dim"], ...]

P: Final[Any] = PartitionSpec  # has no types
CopyKind: TypeAlias = Literal["gather", "scatter", "copy"]

COPY_KINDS: Final[tuple[CopyKind, ...]] = ("gather", "scatter", "copy")

_HOST_PLATFORMS: Final = frozenset({"cpu"})
"""Platforms whose memory is host memory already; pinning would only add a copy."""
_PADDING_ID: Final = -1
"""An id outside the pool, which the kernels skip."""


class BlockCopies:
    """Compiled programs that copy blocks of all layers, one per power of two up to max_blocks.

    More blocks are copied in pieces; fewer are padded. Staging is an array per pool: each layer's
    K, then each layer's V. (XLA on CPU takes 4 to 12 times as long to fill one array for all.)
    """

    def __init__(
        self,
        arrays: BlockArrays,
        max_blocks: int,
        kinds: Collection[CopyKind] = COPY_KINDS,
        *,
        min_blocks: int = 1,
        whole: bool = False,
    ) -> None:
        """Compile and run every program, the largest first; no block changes its content.

        Args:
            arrays: pools of the shapes that all later calls use.
            max_blocks: blocks of the largest piece, rounded up to a power of two.
            kinds: kinds of copies to compile.
            min_blocks: blocks of the smallest piece, rounded up to a power of two.
            whole: whether `gather` gives each of several devices all heads, not only its own. On
                devices of several processes, it always does.

        Raises:
            CountError: if either number is less than 1.
        """
        self.max_blocks = _power_of_two(as_count("max_blocks", max_blocks, minimum=1))
        self._min_blocks = _power_of_two(as_count("min_blocks", min_blocks, minimum=1))
        self._num_pools = len(arrays.keys) + len(arrays.values)
        self._shape = tuple(arrays.keys[0].shape)
        self._dtype = arrays.keys[0].dtype
        sharding = arrays.keys[0].sharding
        self._sharding = sharding if isinstance(sharding, NamedSharding) else None
        self._pinned = pinned_host(arrays.keys[0].addressable_shards[0].device)
        self._put = put_of(self._sharding)
        self._joins = whole or self._put is put_parts
        self._whole: NamedSharding | None = None
        if self._sharding is not None:
            self._whole = NamedSharding(self._sharding.mesh, P())
            if self._pinned is not None and self._put is not put_parts:
                self._pinned = self._sharding.with_memory_kind("pinned_host")
        nothing = np.empty(0, np.int32)
        size = self.max_blocks
        while size >= self._min_blocks:
            # The first run also loads code and allocates buffers for later runs.
            if "gather" in kinds:
                self.gather(arrays, nothing, size)
            if "scatter" in kinds:
                shape = (size, *self._shape[1:])
                staging = [np.zeros(shape, self._dtype)] * self._num_pools
                self.scatter(arrays, staging, nothing, size)
            if "copy" in kinds:
                self.copy(arrays, nothing, nothing, size)
            size //= 2

    def pieces(self, num_blocks: int) -> Iterator[tuple[slice, int]]:
        """Split a number of blocks into pieces: the slice of blocks, and the padded size."""
        for first in range(0, num_blocks, self.max_blocks):
            last = min(first + self.max_blocks, num_blocks)
            yield slice(first, last), max(_power_of_two(last - first), self._min_blocks)

    def gather(self, arrays: BlockArrays, ids: Int32Array, size: int) -> Staging:
        """Read blocks into new arrays, as they are now; later dispatches do not affect them.

        If each device gets all heads, ``addressable_data(0)`` is a copy of its own process.

        Raises:
            IndexError: for the id of an unusable block.
        """
        program = self._program(_gather, size)
        staging: Staging = program((*arrays.keys, *arrays.values), self._pad(ids, size))
        return staging

    def to_host(self, staging: Staging) -> Staging:
        """Start to copy staging to the host, into pinned memory if supported; return the copy."""
        if self._pinned is not None:
            pinned: Staging = jax.device_put(staging, self._pinned)
            return pinned
        for each in staging:
            each.copy_to_host_async()
        return staging

    def scatter(
        self,
        arrays: BlockArrays,
        staging: Sequence[Shaped[np.ndarray | jax.Array, "size kv_heads block_size head_dim"]],
        ids: Int32Array,
        size: int,
    ) -> None:
        """Write blocks from staging, which must not change afterwards; the pools are donated.

        Raises:
            IndexError: for the id of an unusable block.
        """
        program, padded = self._program(_scatter, size), self._pad(ids, size)
        on_device = self._put(tuple(staging), self._sharding)
        _replace(arrays, program((*arrays.keys, *arrays.values), on_device, padded))

    def copy(
        self, arrays: BlockArrays, sources: Int32Array, destinations: Int32Array, size: int
    ) -> None:
        """Copy blocks within the pools, which are donated.

        Raises:
            IndexError: for the id of an unusable block.
        """
        ids = self._pad(sources, size), self._pad(destinations, size)
        program = self._program(_copy, size)
        _replace(arrays, program((*arrays.keys, *arrays.values), *ids))

    def check_ids(self, ids: Int32Array) -> None:
        """Reject ids of unusable blocks.

        Raises:
            IndexError: for the id of an unusable block.
        """
        check_block_ids("device", ids, self._shape[0] - 1)

    def _program(self, copy: Callable[..., jax.Array | Pools], size: int) -> Compiled:
        shapes = self._num_pools, self._shape, self._dtype, size, self._sharding
        return _compiled(copy, *shapes, joins=self._joins and copy is _gather)

    def _pad(self, ids: Int32Array, size: int) -> Int32[Array, " size"]:
        self.check_ids(ids)
        padded = np.full(size, _PADDING_ID, np.int32)
        padded[: len(ids)] = ids
        on_device: jax.Array = self._put(padded, self._whole)
        return on_device


def exact_pieces(num_blocks: int, max_blocks: int) -> Iterator[slice]:
    """Split a number of blocks into pieces that need no padding: 37 into 32, 4 and 1.

    Args:
        num_blocks: the number.
        max_blocks: blocks of the largest piece, a power of two.
    """
    first = 0
    while first < num_blocks:
        left = min(num_blocks - first, max_blocks)
        last = first + (1 << (left.bit_length() - 1))
        yield slice(first, last)
        first = last


def pinned_host(device: jax.Device) -> jax.sharding.Sharding | None:
    """Return the sharding for pinned host memory of a device; None if it is unavailable.

    Tests it with a few bytes, because some platforms and versions of JAX lack it.
    """
    if device.platform in _HOST_PLATFORMS:
        return None
    data = np.arange(1024, dtype=np.int32)
    try:
        pinned = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
        copy = np.asarray(jax.device_put(jax.device_put(data, device), pinned))
    except Exception:  # JAX's error types differ by version
        return None
    return pinned if np.array_equal(data, copy) else None


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


def _replace(arrays: BlockArrays, pools: Pools) -> None:
    num_layers = len(arrays.keys)
    arrays.keys, arrays.values = pools[:num_layers], pools[num_layers:]


def _gather(pools: Pools, ids: Int32[Array, " size"]) -> Staging:
    return gather_blocks(pools, ids, jnp.int32(ids.shape[0]))


def _scatter(pools: Pools, staging: Staging, ids: Int32[Array, " size"]) -> Pools:
    return scatter_blocks(pools, staging, ids, jnp.int32(ids.shape[0]))


def _copy(
    pools: Pools, sources: Int32[Array, " size"], destinations: Int32[Array, " size"]
) -> Pools:
    return copy_blocks(pools, sources, destinations, jnp.int32(sources.shape[0]))


@cache
def _compiled(
    copy: Callable[..., jax.Array | Pools],
    num_pools: int,
    shape: tuple[int, ...],
    dtype: np.dtype,
    size: int,
    sharding: NamedSharding | None,
    *,
    joins: bool,
) -> Compiled:
    """Compile a program once per copy, shapes, dtype and devices."""
    whole = None if sharding is None else NamedSharding(sharding.mesh, P())
    pools = (_aval(shape, dtype, sharding),) * num_pools
    staging = (_aval((size, *shape[1:]), dtype, sharding),) * num_pools
    ids = _aval((size,), np.dtype(np.int32), whole)
    given: tuple[Any, ...] = pools, ids
    if copy is _scatter:
        given = pools, staging, ids
    elif copy is _copy:
        given = pools, ids, ids
    if sharding is not None:
        copy = jax.shard_map(
            copy,
            mesh=sharding.mesh,
            in_specs=tuple(P() if each is ids else sharding.spec for each in given),
            out_specs=sharding.spec,
            check_vma=False,  # JAX has no references that vary, and kernels write in place
        )
    is_gather = len(given) == 2
    options: dict[str, Any] = {"donate_argnums": () if is_gather else 0}
    if joins:
        options["out_shardings"] = whole
    program = jax.jit(copy, **options)
    return program.lower(*given).compile(compiler_options())


def _aval(
    shape: tuple[int, ...], dtype: np.dtype, sharding: NamedSharding | None
) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)  # type: ignore[no-untyped-call]  # JAX's

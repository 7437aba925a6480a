"""The Mosaic GPU backend of the block copies: TMA through a pipeline in shared memory.

A block is contiguous. It moves in chunks, each one TMA box::

    pool [blocks, kv_heads, block_size, head_dim]  seen as  [blocks, chunks, rows, 128]

Up to POOLS_PER_LAUNCH pools share a launch: program `p` works on pool `p % pools` and takes every
`workers`-th of its chunks. No byte passes through registers. At step `k` of its chunks, a program
issues two copies::

    stage (k - 1) % 4   <- chunk k + 3    when the store of chunk k - 1 has read it
    stage  k      % 4   -> destination    when chunk k has arrived

so three loads are always in flight. Programs are not ordered, so no destination may be a source.
"""

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ..mosaic_compat import Interpret, pl, plgpu, run, when
from .config import (
    CHUNK_BYTES,
    LANES,
    MAX_ROWS,
    POOLS_PER_LAUNCH,
    PROGRAMS_PER_CORE,
    STAGES,
    Pools,
)


class Chunks(NamedTuple):
    """Division of a block into chunks."""

    per_block: int
    rows: int

    @classmethod
    def of(cls, blocks: jax.Array) -> "Chunks":
        """Return the division into the largest chunks of equal size."""
        rows = prod(blocks.shape[1:]) // LANES
        most = min(CHUNK_BYTES // (LANES * blocks.dtype.itemsize), MAX_ROWS)
        size = next(size for size in range(min(most, rows), 0, -1) if rows % size == 0)
        return cls(rows // size, size)

    def shape(self, num_blocks: int) -> tuple[int, ...]:
        """Shape of an array of blocks in chunks."""
        return num_blocks, self.per_block, self.rows, LANES

    def view(self, blocks: jax.Array) -> jax.Array:
        """View an array of blocks in chunks."""
        return blocks.reshape(self.shape(blocks.shape[0]))


def in_launches(move: Callable[..., Pools], *pools: Pools) -> Pools:
    """Call `move` on POOLS_PER_LAUNCH pools at a time; it is lowered and compiled once."""
    results: list[jax.Array] = []
    for start in range(0, len(pools[0]), POOLS_PER_LAUNCH):
        results += move(*(each[start : start + POOLS_PER_LAUNCH] for each in pools))
    return tuple(results)


@partial(jax.jit, static_argnames=("num_cores", "interpret"))
def copy(
    pools: Pools,
    sources: jax.Array,
    destinations: jax.Array,
    count: jax.Array,
    *,
    num_cores: int,
    interpret: Interpret = None,
) -> Pools:
    """`copy_blocks` without its checks, in one launch."""
    chunks, num_blocks = Chunks.of(pools[0]), pools[0].shape[0]

    def body(sources: Any, destinations: Any, count: Any, *refs: Any) -> None:
        *pools, ring, full = refs

        def active(entry: jax.Array) -> jax.Array:
            return _inside(sources[entry], num_blocks) & _inside(destinations[entry], num_blocks)

        transfer = Transfer(
            num_ids=sources.shape[0],
            num_entries=jnp.minimum(count[0], sources.shape[0]),
            active=active,
            sources=pools,
            source_of=lambda entry: sources[entry],
            destinations=pools,
            destination_of=lambda entry: destinations[entry],
        )
        _move(transfer, chunks, num_cores, ring, full)

    inputs = (sources, destinations, count[None])
    views = [chunks.view(pool) for pool in pools]
    moved = _launch(body, inputs, views, (), num_cores, interpret)
    return tuple(view.reshape(pools[0].shape) for view in moved)


@partial(jax.jit, static_argnames=("num_cores", "interpret"))
def gather(
    pools: Pools, ids: jax.Array, count: jax.Array, *, num_cores: int, interpret: Interpret = None
) -> Pools:
    """`gather_blocks` without its checks, in one launch."""
    chunks, num_blocks = Chunks.of(pools[0]), pools[0].shape[0]

    def body(ids: Any, count: Any, *refs: Any) -> None:
        *arrays, ring, zeros, full = refs
        zeros[...] = jnp.zeros(zeros.shape, zeros.dtype)
        plgpu.commit_smem()  # makes the zeros visible to the copies below
        transfer = Transfer(
            num_ids=ids.shape[0],
            num_entries=ids.shape[0],
            active=lambda entry: (entry < count[0]) & _inside(ids[entry], num_blocks),
            sources=arrays[: len(arrays) // 2],
            source_of=lambda entry: ids[entry],
            destinations=arrays[len(arrays) // 2 :],
            destination_of=lambda entry: entry,
        )
        _move(transfer, chunks, num_cores, ring, full, zeros.at[pl.ds(0, chunks.rows)])

    views = [chunks.view(pool) for pool in pools]
    staging = jax.ShapeDtypeStruct(chunks.shape(ids.shape[0]), pools[0].dtype)  # type: ignore[no-untyped-call]
    outputs = [staging] * len(pools)
    made = _launch(body, (ids, count[None], *views), (), outputs, num_cores, interpret)
    return tuple(view.reshape(ids.shape[0], *pools[0].shape[1:]) for view in made)


@partial(jax.jit, static_argnames=("num_cores", "interpret"))
def scatter(
    pools: Pools,
    staging: Pools,
    ids: jax.Array,
    count: jax.Array,
    *,
    num_cores: int,
    interpret: Interpret = None,
) -> Pools:
    """`scatter_blocks` without its checks, in one launch."""
    chunks, num_blocks = Chunks.of(pools[0]), pools[0].shape[0]

    def body(ids: Any, count: Any, *refs: Any) -> None:
        *arrays, ring, full = refs
        transfer = Transfer(
            num_ids=ids.shape[0],
            num_entries=jnp.minimum(count[0], ids.shape[0]),
            active=lambda entry: _inside(ids[entry], num_blocks),
            sources=arrays[: len(arrays) // 2],
            source_of=lambda entry: entry,
            destinations=arrays[len(arrays) // 2 :],
            destination_of=lambda entry: ids[entry],
        )
        _move(transfer, chunks, num_cores, ring, full)

    inputs = (ids, count[None], *(chunks.view(each) for each in staging))
    views = [chunks.view(pool) for pool in pools]
    moved = _launch(body, inputs, views, (), num_cores, interpret)
    return tuple(view.reshape(pools[0].shape) for view in moved)


class Transfer(NamedTuple):
    """The moves of one launch: one block per entry and pool."""

    num_ids: int
    """Number of ids, of which the first `num_entries` count."""
    num_entries: Any
    active: Callable[[jax.Array], jax.Array]
    """Whether an entry is moved."""
    sources: Sequence[Any]
    source_of: Callable[[jax.Array], jax.Array]
    """Block id of an entry in each source."""
    destinations: Sequence[Any]
    destination_of: Callable[[jax.Array], jax.Array]
    """Block id of an entry in each destination."""


def _move(
    transfer: Transfer, chunks: Chunks, num_cores: int, ring: Any, full: Any, zeros: Any = None
) -> None:
    """Do one program's share of a transfer.

    Args:
        transfer: The moves of the launch.
        chunks: Division of blocks into chunks.
        num_cores: Number of multiprocessors.
        ring: Shared memory of the STAGES pipeline stages.
        full: One barrier per stage.
        zeros: A chunk to write for inactive entries; None leaves their destination unchanged.
    """
    num_pools = len(transfer.sources)
    workers = _workers(num_pools, num_cores)
    program = lax.axis_index("program")
    pool_index = lax.rem(program, jnp.int32(num_pools))
    worker = lax.div(program, jnp.int32(num_pools))
    num_items = transfer.num_entries * chunks.per_block
    num_steps = lax.div(num_items - worker + (workers - 1), jnp.int32(workers))

    def entry_and_chunk(step: jax.Array) -> tuple[jax.Array, jax.Array]:
        item, per_block = worker + step * workers, jnp.int32(chunks.per_block)
        return lax.div(item, per_block), lax.rem(item, per_block)

    def load(step: jax.Array, _: None = None) -> None:
        """Start to load the chunk of a step, if there is such a step."""
        stage = lax.rem(step, jnp.int32(STAGES))
        entry, chunk = entry_and_chunk(step)
        # No branch before the id is read: the first id arrives together with the number of
        # entries, not after it. Each takes most of a microsecond.
        entry = jnp.minimum(entry, transfer.num_ids - 1)
        active = transfer.active(entry) & (step < num_steps)
        block = transfer.source_of(entry)
        for index, source in enumerate(transfer.sources):

            @when(active & (pool_index == index))
            def load_chunk(source: Any = source) -> None:
                chunk_ref = source.at[block, chunk]
                plgpu.copy_gmem_to_smem(chunk_ref, ring.at[stage], full.at[stage])

    def store(step: jax.Array, content: Any, active: jax.Array) -> None:
        entry, chunk = entry_and_chunk(step)
        block = transfer.destination_of(entry)
        for index, destination in enumerate(transfer.destinations):

            @when(active & (pool_index == index))
            def store_chunk(destination: Any = destination) -> None:
                plgpu.copy_smem_to_gmem(content, destination.at[block, chunk])

    def advance(step: jax.Array, _: None) -> None:
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # frees the previous stage
        load(step + (STAGES - 1))
        stage = lax.rem(step, jnp.int32(STAGES))
        active = transfer.active(entry_and_chunk(step)[0])

        @when(active)
        def wait_for_chunk() -> None:
            plgpu.barrier_wait(full.at[stage])

        store(step, ring.at[stage], active)
        if zeros is not None:
            store(step, zeros, jnp.logical_not(active))

    lax.fori_loop(0, STAGES - 1, load, None)
    lax.fori_loop(0, num_steps, advance, None)
    plgpu.wait_smem_to_gmem(0)


def _inside(block: jax.Array, num_blocks: int) -> jax.Array:
    return (block >= 0) & (block < num_blocks)


def _workers(num_pools: int, num_cores: int) -> int:
    """Number of programs per pool that together fill the GPU; at least one."""
    return max(1, PROGRAMS_PER_CORE * num_cores // num_pools)


def _launch(
    body: Callable[..., None],
    inputs: Sequence[jax.Array],
    updated: Sequence[jax.Array],
    outputs: Sequence[jax.ShapeDtypeStruct],
    num_cores: int,
    interpret: Interpret,
) -> Pools:
    """Launch a kernel over a group of pools; one with outputs also gets a chunk for zeros."""
    pools: Sequence[Any] = outputs or updated
    chunk = pools[0].shape[2:]
    ring = plgpu.SMEM((STAGES, *chunk), pools[0].dtype)
    # Threads write it, so its rows are rounded up to a number that they share evenly
    # (jax-ml/jax#32123).
    zeros = plgpu.SMEM((-(-chunk[0] // 8) * 8, LANES), pools[0].dtype)
    return run(
        body,
        inputs,
        updated,
        outputs,
        name="move_blocks",
        grid={"program": _workers(len(pools), num_cores) * len(pools)},
        scratch=(ring, *([zeros] if outputs else []), plgpu.Barrier(num_barriers=STAGES)),
        interpret=interpret,
    )

"""The Mosaic GPU backend of the block copies: TMA through a ring in shared memory.

A block is one run of bytes. It moves in chunks, each a box of TMA's:

    pool [blocks, kv_heads, block_size, head_dim]  seen as  [blocks, chunks, rows, 128]

Up to POOLS_PER_LAUNCH pools share a launch: program `p` works on pool `p % pools` and takes every
`workers`-th of its chunks. A program never touches the bytes; at step k of its chunks

    slot (k - 1) % 4   <- chunk k + 3    once the store of chunk k - 1 has read it
    slot  k      % 4   -> destination    once chunk k has arrived

so three loads are always in flight. Nothing orders two programs: hence no destination may be a
source.
"""

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ..mosaic_compat import (
    Interpret,
    pl,
    plgpu,
    run,
)
from .api import LANES, Pools

MAX_ROWS = 256
"""Rows of a TMA box."""

# Not measured on a GPU yet. Two programs of 64 KiB fit an SM; of their eight chunks, six are being
# loaded: 96 KiB, four times what 3.35 TB/s over 132 SMs needs at a latency of 1 us.
CHUNK_BYTES = 16 * 1024
SLOTS = 4
PROGRAMS_PER_CORE = 2

POOLS_PER_LAUNCH = 16
"""Each pool has copy instructions of its own in the kernel, and compile time grows faster."""


class Chunks(NamedTuple):
    """How blocks are cut."""

    per_block: int
    rows: int

    @classmethod
    def of(cls, blocks: jax.Array) -> "Chunks":
        """The largest chunks that a block divides into."""
        rows = prod(blocks.shape[1:]) // LANES
        most = min(CHUNK_BYTES // (LANES * blocks.dtype.itemsize), MAX_ROWS)
        size = next(size for size in range(min(most, rows), 0, -1) if rows % size == 0)
        return cls(rows // size, size)

    def shape(self, num_blocks: int) -> tuple[int, ...]:
        """Shape of an array of blocks, as the kernels see it."""
        return num_blocks, self.per_block, self.rows, LANES

    def view(self, blocks: jax.Array) -> jax.Array:
        """Blocks, as the kernels see them."""
        return blocks.reshape(self.shape(blocks.shape[0]))


def by_launch(move: Callable[..., Pools], *pools: Pools) -> Pools:
    """`move(*pools)`, a few pools at a time: JAX lowers, and Mosaic compiles, `move` once."""
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
        *pools, ring, arrived = refs

        def moves(entry: jax.Array) -> jax.Array:
            return _inside(sources[entry], num_blocks) & _inside(destinations[entry], num_blocks)

        plan = Plan(
            num_entries=jnp.minimum(count[0], sources.shape[0]),
            moves=moves,
            sources=pools,
            source_of=lambda entry: sources[entry],
            destinations=pools,
            destination_of=lambda entry: destinations[entry],
        )
        _move(plan, chunks, num_cores, ring, arrived)

    inputs = (sources, destinations, count[None])
    views = [chunks.view(pool) for pool in pools]
    moved = _launch(body, inputs, views, (), num_cores, interpret)
    return tuple(view.reshape(pools[0].shape) for view in moved)


@partial(jax.jit, static_argnames=("num_cores", "interpret"))
def gather(
    pools: Pools,
    ids: jax.Array,
    count: jax.Array,
    *,
    num_cores: int,
    interpret: Interpret = None,
) -> Pools:
    """`gather_blocks` without its checks, in one launch."""
    chunks, num_blocks = Chunks.of(pools[0]), pools[0].shape[0]

    def body(ids: Any, count: Any, *refs: Any) -> None:
        *arrays, ring, zeros, arrived = refs
        zeros[...] = jnp.zeros(zeros.shape, zeros.dtype)
        plgpu.commit_smem()  # the copies below see what was written above
        plan = Plan(
            num_entries=ids.shape[0],
            moves=lambda entry: (entry < count[0]) & _inside(ids[entry], num_blocks),
            sources=arrays[: len(arrays) // 2],
            source_of=lambda entry: ids[entry],
            destinations=arrays[len(arrays) // 2 :],
            destination_of=lambda entry: entry,
        )
        _move(plan, chunks, num_cores, ring, arrived, zeros.at[pl.ds(0, chunks.rows)])

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
        *arrays, ring, arrived = refs
        plan = Plan(
            num_entries=jnp.minimum(count[0], ids.shape[0]),
            moves=lambda entry: _inside(ids[entry], num_blocks),
            sources=arrays[: len(arrays) // 2],
            source_of=lambda entry: entry,
            destinations=arrays[len(arrays) // 2 :],
            destination_of=lambda entry: ids[entry],
        )
        _move(plan, chunks, num_cores, ring, arrived)

    inputs = (ids, count[None], *(chunks.view(each) for each in staging))
    views = [chunks.view(pool) for pool in pools]
    moved = _launch(body, inputs, views, (), num_cores, interpret)
    return tuple(view.reshape(pools[0].shape) for view in moved)


class Plan(NamedTuple):
    """What one launch moves: for each entry a block of every source."""

    num_entries: Any
    moves: Callable[[jax.Array], jax.Array]
    """Whether an entry is moved at all."""
    sources: Sequence[Any]
    source_of: Callable[[jax.Array], jax.Array]
    """The block of a source that an entry is read from."""
    destinations: Sequence[Any]
    destination_of: Callable[[jax.Array], jax.Array]
    """The block of a destination that it goes to."""


def _move(
    plan: Plan, chunks: Chunks, num_cores: int, ring: Any, arrived: Any, zeros: Any = None
) -> None:
    """Do one program's share of a plan, through its ring of SLOTS chunks.

    Args:
        plan: What moves.
        chunks: How blocks are cut.
        num_cores: Of the chip.
        ring: Shared memory.
        arrived: A barrier for each slot.
        zeros: What an entry gets that does not move; None: its destination stays as it is.
    """
    num_pools = len(plan.sources)
    workers = _workers(num_pools, num_cores)
    program = lax.axis_index("program")
    mine, worker = lax.rem(program, jnp.int32(num_pools)), lax.div(program, jnp.int32(num_pools))
    num_items = plan.num_entries * chunks.per_block
    num_steps = lax.div(num_items - worker + (workers - 1), jnp.int32(workers))

    def entry_and_chunk(step: jax.Array) -> tuple[jax.Array, jax.Array]:
        item, per_block = worker + step * workers, jnp.int32(chunks.per_block)
        return lax.div(item, per_block), lax.rem(item, per_block)

    def load(step: jax.Array, _: None = None) -> None:
        slot = lax.rem(step, jnp.int32(SLOTS))
        entry, chunk = entry_and_chunk(step)
        moves, block = plan.moves(entry), plan.source_of(entry)
        for index, source in enumerate(plan.sources):
            copy = partial(
                plgpu.copy_gmem_to_smem, source.at[block, chunk], ring.at[slot], arrived.at[slot]
            )
            pl.when(moves & (mine == index))(copy)

    def store(step: jax.Array, content: Any, when: jax.Array) -> None:
        entry, chunk = entry_and_chunk(step)
        block = plan.destination_of(entry)
        for index, destination in enumerate(plan.destinations):
            copy = partial(plgpu.copy_smem_to_gmem, content, destination.at[block, chunk])
            pl.when(when & (mine == index))(copy)

    def advance(step: jax.Array, _: None) -> None:
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # so the slot before this one is free
        pl.when(step + (SLOTS - 1) < num_steps)(lambda: load(step + (SLOTS - 1)))
        slot = lax.rem(step, jnp.int32(SLOTS))
        moves = plan.moves(entry_and_chunk(step)[0])

        pl.when(moves)(lambda: plgpu.barrier_wait(arrived.at[slot]))
        store(step, ring.at[slot], moves)
        if zeros is not None:
            store(step, zeros, jnp.logical_not(moves))

    lax.fori_loop(0, jnp.minimum(num_steps, SLOTS - 1), load, None)
    lax.fori_loop(0, num_steps, advance, None)
    plgpu.wait_smem_to_gmem(0)


def _inside(block: jax.Array, num_blocks: int) -> jax.Array:
    return (block >= 0) & (block < num_blocks)


def _workers(num_pools: int, num_cores: int) -> int:
    """Programs that share a pool: so many that all of them fill the chip, and at least one."""
    return max(1, PROGRAMS_PER_CORE * num_cores // num_pools)


def _launch(
    body: Callable[..., None],
    inputs: Sequence[jax.Array],
    updated: Sequence[jax.Array],
    outputs: Sequence[jax.ShapeDtypeStruct],
    num_cores: int,
    interpret: Interpret,
) -> Pools:
    """One kernel over a group of pools; one that makes outputs also gets a chunk of its own."""
    pools: Sequence[Any] = outputs or updated
    chunk = pools[0].shape[2:]
    ring = plgpu.SMEM((SLOTS, *chunk), pools[0].dtype)
    # Threads write it, so its rows are rounded up to what they share evenly.
    zeros = plgpu.SMEM((-(-chunk[0] // 8) * 8, LANES), pools[0].dtype)
    return run(
        body,
        inputs,
        updated,
        outputs,
        name="move_blocks",
        grid={"program": _workers(len(pools), num_cores) * len(pools)},
        scratch=(ring, *([zeros] if outputs else []), plgpu.Barrier(num_barriers=SLOTS)),
        interpret=interpret,
    )

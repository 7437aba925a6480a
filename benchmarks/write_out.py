"""Measure how writing out preempted blocks slows the steps down, as Markdown.

Run:
    python benchmarks/write_out.py [--rounds 5] [--steps 300] [--directory DIR]

A step is a program that keeps one core busy for 5 ms and writes a token into every pool; the pools
are donated, and the step waits for the result. Every tenth step, 16 MiB of blocks are preempted.
The rows::

    nothing      no block is moved
    gather       the blocks are gathered on the device and the result is discarded
    host         a `TierDriver` copies them to the host tier
    files        it then stores them in a directory through `StorageWorkers`, with checksums
    in the step  the step waits for the gather, the copy to the host tier and the store

The time of a step includes the preemption before it. All rows run in one process and take turns. At
the end of each round every block is read back from the directory and compared.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from statistics import median

import jax
import jax.numpy as jnp
import numpy as np
from machine import describe_machine

from radixkv.kvcache import BlockArrays, HostArrays, TierDriver
from radixkv.kvcache.copies.block_copies import BlockCopies, Pools
from radixkv.kvcache.ids import Epoch, OpId
from radixkv.kvcache.storage import ChecksummedBackend, FileBackend, Status, StorageWorkers
from radixkv.kvcache.tiers.operations import Operation, OpKind

SIZES = {"num_layers": 8, "num_blocks": 512, "kv_heads": 4, "block_size": 16, "head_dim": 64}
PREEMPTED_BLOCKS = 64  # of 256 KiB
PREEMPT_EVERY = 10
STEP_S = 0.005
TIMEOUT_S = 60.0
NO_IDS = np.empty(0, np.int32)


@dataclass
class Machine:
    """The pools and the step that all rows share."""

    arrays: BlockArrays
    loops: int

    def step(self) -> None:
        """Run the program and wait for it."""
        pools = (*self.arrays.keys, *self.arrays.values)
        pools, busy = _step(pools, np.int32(self.loops))
        half = len(pools) // 2
        self.arrays.keys, self.arrays.values = pools[:half], pools[half:]
        busy.block_until_ready()


@partial(jax.jit, donate_argnums=0)
def _step(pools: Pools, loops: jax.Array) -> tuple[Pools, jax.Array]:
    busy = jax.lax.fori_loop(0, loops, lambda _, x: jnp.sin(x) + 1, jnp.float32(0))
    return tuple(pool.at[1, :, 0].set(busy) for pool in pools), busy


def make_machine() -> Machine:
    """Fill block n with n, and find the number of loops that takes 5 ms."""
    arrays = BlockArrays.zeros(**SIZES, dtype=jnp.dtype(jnp.float32))
    ids = jnp.arange(SIZES["num_blocks"] + 1, dtype=jnp.float32)[:, None, None, None]
    fill = jax.jit(lambda pool: pool + ids, donate_argnums=0)
    arrays.keys = tuple(fill(pool) for pool in arrays.keys)
    arrays.values = tuple(fill(pool) for pool in arrays.values)
    machine = Machine(arrays, 1000)
    machine.step()
    for _ in range(5):
        times = [timed(machine.step) for _ in range(20)]
        machine.loops = max(1, round(machine.loops * STEP_S / median(times)))
    return machine


def timed(call: Callable[[], None]) -> float:
    """Return the seconds of a call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def preemptions(steps: int) -> dict[int, np.ndarray]:
    """Return the preempted blocks by step, without block 1, which the steps write."""
    slots = SIZES["num_blocks"] // PREEMPTED_BLOCKS
    ids = np.arange(1, SIZES["num_blocks"] + 1, dtype=np.int32).reshape(slots, -1)[1:]
    at = range(PREEMPT_EVERY - 1, steps, PREEMPT_EVERY)
    return {step: ids[number % len(ids)] for number, step in enumerate(at)}


def keys_of(step: int) -> tuple[bytes, ...]:
    """Return the storage keys of the blocks that a step preempted."""
    return tuple(sha256(b"%d %d" % (step, block)).digest() for block in range(PREEMPTED_BLOCKS))


def run_nothing(machine: Machine, steps: int) -> list[float]:
    """Run the steps alone."""
    return [timed(machine.step) for _ in range(steps)]


def run_gather(machine: Machine, steps: int) -> list[float]:
    """Do only the work of the device: gather the preempted blocks."""
    copies = BlockCopies(machine.arrays, 32)
    wanted = preemptions(steps)

    def step(number: int) -> None:
        if number in wanted:
            for piece, size in copies.pieces(PREEMPTED_BLOCKS):
                copies.gather(machine.arrays, wanted[number][piece], size)
        machine.step()

    return [timed(partial(step, number)) for number in range(steps)]


def run_driver(
    machine: Machine, steps: int, host: HostArrays, directory: str | None
) -> list[float]:
    """Let a driver move preempted blocks to the host tier, and to the directory if given."""
    storage = None
    if directory is not None:
        storage = StorageWorkers(open_files(directory), num_threads=2, max_bytes_in_flight=2**30)
    driver = TierDriver(host, storage)
    driver.warm_up(machine.arrays)
    wanted = preemptions(steps)
    stored: dict[OpId, Operation] = {}
    done = 0

    def poll() -> None:
        nonlocal done
        for result in driver.poll():
            assert all(result.ok), result
            down = stored.pop(result.op_id, None)
            done += 1
            if down is not None and storage is not None:
                keys = keys_of(result.op_id)
                out = OpId(steps + result.op_id), Epoch(1), OpKind.HOST_TO_STORAGE
                operation = Operation(*out, down.destinations, NO_IDS, keys, TIMEOUT_S)
                driver.dispatch([operation], machine.arrays)

    def step(number: int) -> None:
        poll()
        if number in wanted:
            ids, kind = wanted[number], OpKind.DEVICE_TO_HOST
            down = Operation(OpId(number), Epoch(1), kind, ids, ids, (), TIMEOUT_S)
            stored[down.id] = down
            driver.dispatch([down], machine.arrays)
        machine.step()

    times = [timed(partial(step, number)) for number in range(steps)]
    while done < len(wanted) * (1 if storage is None else 2):
        driver.wait(TIMEOUT_S)
        poll()
    for ids in wanted.values():
        check(host, ids)
    assert driver.close()
    assert storage is None or storage.close(timeout_s=TIMEOUT_S)
    return times


def run_in_step(machine: Machine, steps: int, host: HostArrays, directory: str) -> list[float]:
    """Move preempted blocks within the step, and wait for each part."""
    files = open_files(directory)
    checksummed = ChecksummedBackend(files)
    copies = BlockCopies(machine.arrays, 32)
    wanted = preemptions(steps)

    def step(number: int) -> None:
        if number in wanted:
            ids, keys = wanted[number], keys_of(number)
            for piece, size in copies.pieces(len(ids)):
                staging = copies.gather(machine.arrays, ids[piece], size)
                host.write(ids[piece], [np.asarray(each) for each in staging])
            for key, block in zip(keys, host.blocks(ids), strict=True):
                status, error = checksummed.store(key, [block.data])
                assert status is Status.STORED, error
        machine.step()

    times = [timed(partial(step, number)) for number in range(steps)]
    files.close()
    return times


def open_files(directory: str) -> FileBackend:
    """Open the directory of a round."""
    return FileBackend(directory, max_bytes=2**40, sync="none")


def check(host: HostArrays, ids: np.ndarray) -> None:
    """Assert that the host blocks have the content of the device blocks."""
    for pool in host.read(ids):
        assert (pool == ids[:, None, None, None]).all()


def check_files(directory: str, steps: int, host: HostArrays) -> None:
    """Assert that every preempted block can be read back from the directory."""
    files = open_files(directory)
    checksummed = ChecksummedBackend(files)
    for step, ids in preemptions(steps).items():
        host.memory[:] = 0
        for key, block in zip(keys_of(step), host.blocks(ids), strict=True):
            status, error = checksummed.load(key, [block.data])
            assert status is Status.LOADED, error
        check(host, ids)
    files.close()


def run(
    row: str, machine: Machine, steps: int, host: HostArrays, parent: str | None
) -> list[float]:
    """Run one row once; return the seconds of each step."""
    host.memory[:] = 0
    if row == "nothing":
        return run_nothing(machine, steps)
    if row == "gather":
        return run_gather(machine, steps)
    if row == "host":
        return run_driver(machine, steps, host, None)
    with tempfile.TemporaryDirectory(dir=parent) as directory:
        run_row = run_driver if row == "files" else run_in_step
        times = run_row(machine, steps, host, directory)
        check_files(directory, steps, host)
        return times


def main() -> None:
    """Measure every row in each round and print the table."""
    arguments = parse_arguments()
    machine = make_machine()
    host = HostArrays.like(machine.arrays, SIZES["num_blocks"])
    rows = ["nothing", "gather", "host", "files", "in the step"]
    measured: dict[str, list[list[float]]] = {row: [] for row in rows}
    for number in range(arguments.rounds + 1):  # the first round warms up
        for row in rows if number % 2 else reversed(rows):
            times = run(row, machine, arguments.steps, host, arguments.directory)
            if number:
                measured[row].append([1e3 * each for each in times])
    print(describe_run(arguments))
    print(
        "\n| Moved | p50, ms | p95, ms | p99, ms | p95 / nothing | p95 / gather |\n"
        "| --- | --- | --- | --- | --- | --- |"
    )
    p95 = {
        row: [float(np.percentile(times, 95)) for times in rounds]
        for row, rounds in measured.items()
    }
    for row, rounds in measured.items():
        cells = [quantile(rounds, percent) for percent in (50, 95, 99)]
        for base in ("nothing", "gather"):
            pairs = zip(p95[row], p95[base], strict=True)
            cells.append(spread([own / other for own, other in pairs]))
        print(f"| {row} | {' | '.join(cells)} |")


def quantile(rounds: list[list[float]], percent: int) -> str:
    """Format the median over rounds of a percentile, and its range."""
    return spread([float(np.percentile(times, percent)) for times in rounds])


def spread(values: list[float]) -> str:
    """Format median and range."""
    return f"{median(values):.2f} [{min(values):.2f} to {max(values):.2f}]"


def describe_run(arguments: argparse.Namespace) -> str:
    """Return the machine, the versions and the settings."""
    versions = f"JAX {jax.__version__} on {jax.devices()[0].device_kind}", f"numpy {np.__version__}"
    return (
        f"{describe_machine(*versions)}\n\n"
        f"{arguments.steps} steps of 5 ms, 16 MiB preempted at every {PREEMPT_EVERY}th; "
        f"median of {arguments.rounds} rounds and range."
    )


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--directory", help="directory on the disk to measure; default: temporary")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=300)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

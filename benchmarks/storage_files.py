"""Print what the file backend costs beside a plain loop over the same values, as Markdown.

Run:
    python benchmarks/storage_files.py [--directory DIR] [--mib 512] [--rounds 5] [--sync data]
        [--cold]

The plain loop writes each value to a temporary name with `os.writev`, renames it, and reads it back
with `os.readv`: no checksum, no index, no budget. The backend seals and verifies every value. Both
name their files by key in 256 directories, which are there before, use the same buffers, 16 blocks
of a `HostArrays`, and run on as many threads as `--threads` says. Reads come from the page cache,
or with `--cold` from the disk: the page cache lets go of a round's files before they are read.
Nothing is synced unless `--sync data` says so; then the plain loop calls `fdatasync` too, before
the rename.

A second ratio is to a plain loop that computes the digest too, with the same call of xxhash as the
backend: of what it writes before that, of what it read after that.

They take turns every 64 MiB, so that what else the machine does meets all. A rate is the median
over all turns; a ratio is the median of the turns' ratios, in brackets their quartiles. On one
thread, and without a sync, times are CPU times of that thread: neither the disk, which writes
later, nor other processes are in them. Elsewhere, and with `--cold`, they are elapsed times, and
mean something on a quiet machine alone.

Rows of "storage" are what an engine has: `StorageWorkers` with its four threads, to which values
are given in operations of 32 and which is polled every 0.1 ms, beside the plain loop on one thread.
"""

from __future__ import annotations

import argparse
import os
import platform
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from statistics import median, quantiles
from typing import Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from radixkv.kvcache import HostArrays
from radixkv.kvcache.storage import (
    ChecksummedBackend,
    FileBackend,
    Status,
    StorageOpId,
    StorageWorkers,
)

SIZES = (256 * 1024, 2 * 1024 * 1024)
TURN_BYTES = 64 * 2**20
NUM_BUFFERS = 16
BATCH = 32
PAUSE_S = 0.0001
STORAGE_THREADS = 4
STORED, LOADED = (Status.STORED, ""), (Status.LOADED, "")


class Values:
    """Keys of one size of values, and buffers for them."""

    def __init__(self, size: int, count: int) -> None:
        """Make count keys, and fill the buffers."""
        content = np.random.default_rng(0).integers(0, 256, (NUM_BUFFERS, size), np.uint8)
        self.size = size
        self.keys = [sha256(b"%d" % number).digest() for number in range(count)]
        self.payloads = make_buffers(content)
        self.destinations = make_buffers(content)
        turn = TURN_BYTES // size
        self.turns = [range(first, min(first + turn, count)) for first in range(0, count, turn)]


class Side(Protocol):
    """One of those that take turns."""

    def store(self, turn: range) -> float:
        """Write the values of a turn, and return how many seconds it took."""

    def load(self, turn: range) -> float:
        """Read the values of a turn, and return how many seconds it took."""

    def close(self) -> None:
        """Let go of files and threads."""


class Loop:
    """Values one by one, on some threads."""

    def __init__(
        self, values: Plain | Backend, num_threads: int, clock: Callable[[], float]
    ) -> None:
        """Start the threads; clock is read on each of them."""
        self._values = values
        self._pool = ThreadPoolExecutor(num_threads)
        self._num_threads = num_threads
        self._clock = clock

    def store(self, turn: range) -> float:
        """See Side."""
        return self._run(turn, self._values.store)

    def load(self, turn: range) -> float:
        """See Side."""
        return self._run(turn, self._values.load)

    def close(self) -> None:
        """See Side."""
        self._pool.shutdown()
        self._values.close()

    def _run(self, turn: range, step: Callable[[int], None]) -> float:
        def share(thread: int) -> tuple[float, float]:
            start = self._clock()
            for number in turn[thread :: self._num_threads]:
                step(number)
            return start, self._clock()

        shares = self._pool.map(share, range(self._num_threads))
        starts, ends = zip(*shares, strict=True)
        return float(max(ends) - min(starts))


class Plain:
    """The least that could be done with a value; or that, and the digest of it."""

    def __init__(self, directory: Path, sync: str, values: Values, *, digest: bool) -> None:
        """Make the directories."""
        for number in range(256):
            (directory / f"{number:02x}").mkdir(mode=0o700)
        self._directory = str(directory)
        self._durable = sync == "data"
        self._values = values
        self._digest = digest

    def store(self, number: int) -> None:
        """Write to a temporary name, and rename."""
        if self._digest:
            xxhash.xxh3_128_digest(self._values.payloads[number % NUM_BUFFERS])
        name = self._values.keys[number].hex()
        temporary = f"{self._directory}/{name[:2]}/.tmp-{number}"
        file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        os.writev(file, [self._values.payloads[number % NUM_BUFFERS]])
        if self._durable:
            os.fdatasync(file)
        os.close(file)
        os.rename(temporary, f"{self._directory}/{name[:2]}/{name}")

    def load(self, number: int) -> None:
        """Open, read and close."""
        name = self._values.keys[number].hex()
        file = os.open(f"{self._directory}/{name[:2]}/{name}", os.O_RDONLY)
        os.readv(file, [self._values.destinations[number % NUM_BUFFERS]])
        os.close(file)
        if self._digest:
            xxhash.xxh3_128_digest(self._values.destinations[number % NUM_BUFFERS])

    def close(self) -> None:
        """Keep nothing open."""


class Backend:
    """A value through the backend and its envelope."""

    def __init__(self, directory: Path, sync: str, values: Values) -> None:
        """Open the backend."""
        self._files = open_files(directory, sync)
        self._sealed = ChecksummedBackend(self._files)
        self._values = values

    def store(self, number: int) -> None:
        """Seal and write."""
        payload = [self._values.payloads[number % NUM_BUFFERS]]
        assert self._sealed.store(self._values.keys[number], payload) == STORED

    def load(self, number: int) -> None:
        """Read and verify."""
        destination = [self._values.destinations[number % NUM_BUFFERS]]
        assert self._sealed.load(self._values.keys[number], destination) == LOADED

    def close(self) -> None:
        """Let go of the directory."""
        self._files.close()


class Engine:
    """What an engine has: operations, the driver's threads, and a poll now and then."""

    def __init__(self, directory: Path, sync: str, values: Values) -> None:
        """Open the backend and start the driver."""
        self._values = values
        self._workers = StorageWorkers(
            open_files(directory, sync),
            num_threads=STORAGE_THREADS,
            max_bytes_in_flight=2 * TURN_BYTES,
        )

    def store(self, turn: range) -> float:
        """See Side."""
        return self._run(turn, self._workers.store, self._values.payloads)

    def load(self, turn: range) -> float:
        """See Side."""
        return self._run(turn, self._workers.load, self._values.destinations)

    def close(self) -> None:
        """See Side."""
        self._workers.close()

    def _run(
        self, turn: range, submit: Callable[..., StorageOpId], buffers: Sequence[memoryview]
    ) -> float:
        blocks = [[buffers[number % NUM_BUFFERS]] for number in turn]
        keys = self._values.keys[turn.start : turn.stop]
        start = time.perf_counter()
        batches = [slice(first, first + BATCH) for first in range(0, len(turn), BATCH)]
        for batch in batches:
            submit(keys[batch], blocks[batch], timeout_s=600.0)
        waiting = len(batches)
        while waiting:
            time.sleep(PAUSE_S)
            for completion in self._workers.poll():
                assert completion.prefix == len(completion.statuses), completion
                waiting -= 1
        return time.perf_counter() - start


def main() -> None:
    """Measure each size on one and on several threads, and print the table."""
    arguments = parse_arguments()
    print("\n".join(describe_run(arguments)))
    print(
        "\n| Value | Threads | What | Plain loop, MiB/s | File backend, MiB/s | Ratio "
        "| Ratio to a plain loop with xxh3_128 |\n| --- | --- | --- | --- | --- | --- | --- |"
    )
    for size in SIZES:
        for num_threads in sorted({1, arguments.threads}):
            measure(arguments, size, num_threads, engine=False)
        measure(arguments, size, 1, engine=True)


def measure(arguments: argparse.Namespace, size: int, num_threads: int, *, engine: bool) -> None:
    """Print the rows of one size: a plain loop on num_threads beside the backend or an engine."""
    values = Values(size, arguments.mib * 2**20 // size)
    elapsed = num_threads > 1 or engine or arguments.sync == "data" or arguments.cold
    clock = time.perf_counter if elapsed else time.thread_time
    times: dict[str, list[list[float]]] = {"store": [], "load": []}
    for round_number in range(arguments.rounds + 1):  # the first warms up
        with ExitStack() as stack:
            places = [
                Path(stack.enter_context(tempfile.TemporaryDirectory(dir=arguments.directory)))
                for _ in range(3)
            ]
            plain = Plain(places[0], arguments.sync, values, digest=False)
            digesting = Plain(places[1], arguments.sync, values, digest=True)
            ours: Side = (
                Engine(places[2], arguments.sync, values)
                if engine
                else Loop(Backend(places[2], arguments.sync, values), num_threads, clock)
            )
            sides = [*(Loop(each, num_threads, clock) for each in (plain, digesting)), ours]
            for side in sides:
                stack.callback(side.close)
            stores = take_turns(values, [side.store for side in sides])
            if arguments.cold:
                let_go(places)
            loads = take_turns(values, [side.load for side in sides])
            if round_number:
                times["store"] += stores
                times["load"] += loads
    threads = f"1, storage {STORAGE_THREADS}" if engine else str(num_threads)
    for what, turns in times.items():
        print(f"| {size // 1024} KiB | {threads} | {what} | {describe(turns)} |", flush=True)


def let_go(places: Sequence[Path]) -> None:
    """Write the files below some directories to the disk, and drop them from the page cache."""
    os.sync()
    for path in (path for place in places for path in place.rglob("*") if path.is_file()):
        file = os.open(path, os.O_RDONLY)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def take_turns(values: Values, sides: Sequence[Callable[[range], float]]) -> list[list[float]]:
    """Return seconds per MiB of each side for each turn; who goes first alternates."""
    times = []
    for number, turn in enumerate(values.turns):
        num_mib = len(turn) * values.size / 2**20
        row = [0.0] * len(sides)
        for place in range(len(sides)):
            side = (number + place) % len(sides)
            row[side] = sides[side](turn) / num_mib
        times.append(row)
    return times


def describe(turns: Sequence[Sequence[float]]) -> str:
    """Return four cells: the rates of the plain loop and of ours, and the ratios to both loops."""
    plain_s, _, our_s = (median(column) for column in zip(*turns, strict=True))
    cells = [f"{1 / plain_s:,.0f}", f"{1 / our_s:,.0f}"]
    for other in (0, 1):
        low, middle, high = quantiles([times[other] / times[2] for times in turns], n=4)
        cells.append(f"{middle:.2f} [{low:.2f} to {high:.2f}]")
    return " | ".join(cells)


def make_buffers(content: npt.NDArray[np.uint8]) -> list[memoryview]:
    """Return the blocks of a host tier with these bytes."""
    num_blocks, size = content.shape
    host = HostArrays(1, num_blocks, 1, 1, size // 2, np.uint8)
    host.memory[1:] = content
    return [block.data for block in host.blocks(np.arange(1, num_blocks + 1, dtype=np.int32))]


def open_files(directory: Path, sync: str) -> FileBackend:
    """Open a backend, and make its directories."""
    files = FileBackend(directory, max_bytes=2**40, sync="data" if sync == "data" else "none")
    for number in range(256):
        first = bytes([number]) + bytes(31)
        files.put(first, [memoryview(b"")])
        files.delete(first)
    return files


def describe_run(arguments: argparse.Namespace) -> list[str]:
    """Return the machine, the date and the versions, as Markdown."""
    return [
        f"{datetime.now(UTC):%Y-%m-%d}, {platform.machine()}, {os.cpu_count()} cores, "
        f"load {os.getloadavg()[0]:.1f}; Linux {platform.release().split('-')[0]}, "
        f"Python {platform.python_version()}, numpy {np.__version__}, xxhash {xxhash.VERSION}.",
        "",
        f"{arguments.mib} MiB of values per round, {arguments.rounds} rounds, "
        f'sync="{arguments.sync}", reads from the {"disk" if arguments.cold else "page cache"}, '
        "checksums on.",
    ]


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--directory", type=Path, help="on the disk to measure; default: temporary")
    parser.add_argument("--mib", type=int, default=512, help="of values in each round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--sync", choices=["none", "data"], default="none")
    parser.add_argument("--cold", action="store_true", help="read from the disk")
    return parser.parse_args()


if __name__ == "__main__":
    main()

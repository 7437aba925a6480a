"""Compare the file backend with a plain loop over the same values, as Markdown.

Run:
    python benchmarks/storage_files.py [--directory DIR] [--mib 512] [--rounds 5] [--sync data]
        [--cold]

The plain loop writes each value to a temporary name with `os.writev`, renames it, and reads it back
with `os.readv`: no checksum, no index, no budget. The backend adds and verifies checksums. Both
name their files by key in 256 existing directories, use the same buffers (16 blocks of a
`HostArrays`), and run on `--threads` threads. Reads come from the page cache; with `--cold`, the
files are dropped from the page cache first and reads come from the disk. With `--sync data`, both
call `fdatasync` before the rename; by default neither does.

A second ratio compares with a plain loop that also computes the digest, with the same xxhash call
as the backend, before each write and after each read.

The sides take turns every 64 MiB, so that other load on the machine affects all of them. A rate is
the median over all turns; a ratio is the median of the turns' ratios, with quartiles in brackets.
On one thread without sync, times are CPU times of that thread: they include neither the disk, which
writes later, nor other processes. Otherwise they are elapsed times; use a quiet machine for these.

Rows "storage" measure the setup of an engine, `StorageWorkers` with four threads, operations of 32
values and a poll every 0.1 ms, beside the plain loop on one thread.
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
from hashlib import sha256
from pathlib import Path
from statistics import median, quantiles
from typing import Protocol

import numpy as np
import numpy.typing as npt
import xxhash
from machine import describe_machine

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
    """Keys and buffers for values of one size."""

    def __init__(self, size: int, count: int) -> None:
        """Make count keys and fill the buffers."""
        content = np.random.default_rng(0).integers(0, 256, (NUM_BUFFERS, size), np.uint8)
        self.size = size
        self.keys = [sha256(b"%d" % number).digest() for number in range(count)]
        self.payloads = make_buffers(content)
        self.destinations = make_buffers(content)
        turn = TURN_BYTES // size
        self.turns = [range(first, min(first + turn, count)) for first in range(0, count, turn)]


class Side(Protocol):
    """A participant of the comparison."""

    def store(self, turn: range) -> float:
        """Write the values of a turn; return the seconds."""

    def load(self, turn: range) -> float:
        """Read the values of a turn; return the seconds."""

    def close(self) -> None:
        """Close files and threads."""


class Loop:
    """A side that stores and loads values one by one on several threads."""

    def __init__(
        self, values: Plain | Backend, num_threads: int, clock: Callable[[], float]
    ) -> None:
        """Start the threads; each of them reads the clock."""
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
    """The minimal file operations for a value, with or without its digest."""

    def __init__(self, directory: Path, sync: str, values: Values, *, digest: bool) -> None:
        """Make the directories."""
        for number in range(256):
            (directory / f"{number:02x}").mkdir(mode=0o700)
        self._directory = str(directory)
        self._durable = sync == "data"
        self._values = values
        self._digest = digest

    def store(self, number: int) -> None:
        """Write to a temporary name and rename."""
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
        """Read the file."""
        name = self._values.keys[number].hex()
        file = os.open(f"{self._directory}/{name[:2]}/{name}", os.O_RDONLY)
        os.readv(file, [self._values.destinations[number % NUM_BUFFERS]])
        os.close(file)
        if self._digest:
            xxhash.xxh3_128_digest(self._values.destinations[number % NUM_BUFFERS])

    def close(self) -> None:
        """Do nothing: no file stays open."""


class Backend:
    """The file backend with checksums."""

    def __init__(self, directory: Path, sync: str, values: Values) -> None:
        """Open the backend."""
        self._files = open_files(directory, sync)
        self._checksummed = ChecksummedBackend(self._files)
        self._values = values

    def store(self, number: int) -> None:
        """Add the checksum and write."""
        payload = [self._values.payloads[number % NUM_BUFFERS]]
        assert self._checksummed.store(self._values.keys[number], payload) == STORED

    def load(self, number: int) -> None:
        """Read and verify."""
        destination = [self._values.destinations[number % NUM_BUFFERS]]
        assert self._checksummed.load(self._values.keys[number], destination) == LOADED

    def close(self) -> None:
        """Release the directory."""
        self._files.close()


class Engine:
    """The setup of an engine: operations on the threads of `StorageWorkers`, and polling."""

    def __init__(self, directory: Path, sync: str, values: Values) -> None:
        """Open the backend and start the workers."""
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
    """Measure each size on one and on several threads and print the table."""
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
    """Print the rows of one size: plain loops on num_threads, and the backend or an engine."""
    values = Values(size, arguments.mib * 2**20 // size)
    elapsed = num_threads > 1 or engine or arguments.sync == "data" or arguments.cold
    clock = time.perf_counter if elapsed else time.thread_time
    times: dict[str, list[list[float]]] = {"store": [], "load": []}
    for round_number in range(arguments.rounds + 1):  # the first round warms up
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
                drop_from_page_cache(places)
            loads = take_turns(values, [side.load for side in sides])
            if round_number:
                times["store"] += stores
                times["load"] += loads
    threads = f"1, storage {STORAGE_THREADS}" if engine else str(num_threads)
    for what, turns in times.items():
        print(f"| {size // 1024} KiB | {threads} | {what} | {describe(turns)} |", flush=True)


def drop_from_page_cache(places: Sequence[Path]) -> None:
    """Write the files below these directories to the disk and drop them from the page cache."""
    os.sync()
    for path in (path for place in places for path in place.rglob("*") if path.is_file()):
        file = os.open(path, os.O_RDONLY)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def take_turns(values: Values, sides: Sequence[Callable[[range], float]]) -> list[list[float]]:
    """Return the seconds per MiB of each side in each turn; the first side alternates."""
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
    """Return four cells: rates of the plain loop and our side, and our ratios to both loops."""
    plain_s, _, our_s = (median(column) for column in zip(*turns, strict=True))
    cells = [f"{1 / plain_s:,.0f}", f"{1 / our_s:,.0f}"]
    for other in (0, 1):
        low, middle, high = quantiles([times[other] / times[2] for times in turns], n=4)
        cells.append(f"{middle:.2f} [{low:.2f} to {high:.2f}]")
    return " | ".join(cells)


def make_buffers(content: npt.NDArray[np.uint8]) -> list[memoryview]:
    """Return blocks of a host tier with this content."""
    num_blocks, size = content.shape
    host = HostArrays(1, num_blocks, 1, 1, size // 2, np.uint8)
    host.memory[1:] = content
    return [block.data for block in host.blocks(np.arange(1, num_blocks + 1, dtype=np.int32))]


def open_files(directory: Path, sync: str) -> FileBackend:
    """Open a backend and create its directories."""
    files = FileBackend(directory, max_bytes=2**40, sync="data" if sync == "data" else "none")
    for number in range(256):
        first = bytes([number]) + bytes(31)
        files.put(first, [memoryview(b"")])
        files.delete(first)
    return files


def describe_run(arguments: argparse.Namespace) -> list[str]:
    """Return the machine, the versions and the settings as Markdown."""
    return [
        describe_machine(
            f"Linux {platform.release().split('-')[0]}",
            f"numpy {np.__version__}",
            f"xxhash {xxhash.VERSION}",
        ),
        "",
        f"{arguments.mib} MiB of values per round, {arguments.rounds} rounds, "
        f'sync="{arguments.sync}", reads from the {"disk" if arguments.cold else "page cache"}, '
        "checksums on.",
    ]


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--directory", type=Path, help="directory on the disk to measure; default: temporary"
    )
    parser.add_argument("--mib", type=int, default=512, help="MiB of values in each round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--sync", choices=["none", "data"], default="none")
    parser.add_argument("--cold", action="store_true", help="read from the disk")
    return parser.parse_args()


if __name__ == "__main__":
    main()

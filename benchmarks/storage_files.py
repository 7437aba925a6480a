"""Print what the file backend costs beside a plain loop over the same values, as Markdown.

Run:
    python benchmarks/storage_files.py [--directory DIR] [--mib 512] [--rounds 7] [--sync data]

The plain loop writes each value to a temporary name with `os.writev`, renames it, and reads it back
with `os.readv`: no checksum, no index, no budget. The backend seals and verifies every value; its
256 directories are there before, as they are after its first minutes. Both run on as many threads
as `--threads` says, take turns, and use buffers that were touched before, 16 of each kind, as a
pool of blocks has. Reads come from the page cache. Nothing is synced unless `--sync data` says so;
then the plain loop calls `fdatasync` too, before the rename.

On one thread, and without a sync, times are CPU times of that thread: neither the disk, which
writes later, nor other processes are in them. Elsewhere they are elapsed times.

Rows of "storage" are what an engine has: `StorageWorkers` with its four threads, to which values
are given in operations of 32 and which is polled every 0.1 ms, beside the plain loop on one thread.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from functools import partial
from hashlib import sha256
from pathlib import Path
from statistics import median
from typing import TypeAlias

import numpy as np
import xxhash

from radixkv.kvcache.storage import FileBackend, OperationId, Sealed, Status, StorageWorkers

Loop: TypeAlias = Callable[..., tuple[float, float]]

SIZES = (256 * 1024, 2 * 1024 * 1024)
MAX_BYTES = 2**40
BATCH = 32
PAUSE_S = 0.0001
STORAGE_THREADS = 4


def main() -> None:
    """Measure each size on one and on several threads, and print the table."""
    arguments = parse_arguments()
    print("\n".join(describe_run(arguments)))
    print(
        "\n| Value | Threads | What | Plain loop, MiB/s | File backend, MiB/s | Ratio |\n"
        "| --- | --- | --- | --- | --- | --- |"
    )
    for size in SIZES:
        for num_threads in sorted({1, arguments.threads}):
            measure(arguments, size, num_threads, backend, str(num_threads))
        measure(arguments, size, 1, storage, f"1, storage {STORAGE_THREADS}")


def measure(
    arguments: argparse.Namespace, size: int, num_threads: int, ours: Loop, threads: str
) -> None:
    """Print the rows of one size: medians over the rounds, each ratio within its round."""
    count = arguments.mib * 2**20 // size
    source = np.random.default_rng(0).integers(0, 256, size, np.uint8)
    payloads = [memoryview(source.tobytes()) for _ in range(min(count, 16))]
    destinations = [memoryview(bytearray(size)) for _ in payloads]
    keys = [sha256(b"%d" % number).digest() for number in range(count)]
    figures: dict[str, list[tuple[float, float]]] = {"store": [], "load": []}
    one_thread = num_threads == 1 and ours is backend and arguments.sync != "data"
    clock = time.thread_time if one_thread else time.perf_counter
    for round_number in range(arguments.rounds + 1):  # the first warms up
        with ThreadPoolExecutor(num_threads) as pool:
            loops = [plain, ours] if round_number % 2 else [ours, plain]
            rates = {}
            for loop in loops:
                with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
                    one_round = partial(run, pool, num_threads, clock, count, size)
                    rates[loop] = loop(
                        Path(directory), arguments.sync, keys, payloads, destinations, one_round
                    )
                    shutil.rmtree(directory)
                    os.mkdir(directory)  # for the context to remove
        if round_number:
            for number, what in enumerate(figures):
                figures[what].append((rates[plain][number], rates[ours][number]))
    for what, pairs in figures.items():
        plain_rate, our_rate = (median(column) for column in zip(*pairs, strict=True))
        ratios = [b / a for a, b in pairs]
        print(
            f"| {size // 1024} KiB | {threads} | {what} | {plain_rate:,.0f} | {our_rate:,.0f} "
            f"| {median(ratios):.2f} [{min(ratios):.2f} to {max(ratios):.2f}] |",
            flush=True,
        )


def run(
    pool: ThreadPoolExecutor,
    num_threads: int,
    clock: Callable[[], float],
    count: int,
    size: int,
    step: Callable[[int], None],
) -> float:
    """Call step(number) for each number, on all threads; return MiB/s."""

    def share(thread: int) -> tuple[float, float]:
        start = clock()
        for number in range(thread, count, num_threads):
            step(number)
        return start, clock()

    starts, ends = zip(*pool.map(share, range(num_threads)), strict=True)
    return count * size / 2**20 / (max(ends) - min(starts))


def plain(
    directory: Path,
    sync: str,
    keys: Sequence[bytes],
    payloads: Sequence[memoryview],
    destinations: Sequence[memoryview],
    one_round: Callable[[Callable[[int], None]], float],
) -> tuple[float, float]:
    """Write and rename each value, then read each: MiB/s of both."""
    paths = [f"{directory}/{key.hex()}" for key in keys]

    def store(number: int) -> None:
        temporary = f"{directory}/.tmp-{number}"
        file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        os.writev(file, [payloads[number % len(payloads)]])
        if sync == "data":
            os.fdatasync(file)
        os.close(file)
        os.rename(temporary, paths[number])

    def load(number: int) -> None:
        file = os.open(paths[number], os.O_RDONLY)
        os.readv(file, [destinations[number % len(destinations)]])
        os.close(file)

    return one_round(store), one_round(load)


def backend(
    directory: Path,
    sync: str,
    keys: Sequence[bytes],
    payloads: Sequence[memoryview],
    destinations: Sequence[memoryview],
    one_round: Callable[[Callable[[int], None]], float],
) -> tuple[float, float]:
    """Store and load each value through the envelope: MiB/s of both."""
    files = open_files(directory, sync)
    sealed = Sealed(files)

    def store(number: int) -> None:
        status, _ = sealed.store(keys[number], [payloads[number % len(payloads)]])
        assert status is Status.STORED, status

    def load(number: int) -> None:
        status, _ = sealed.load(keys[number], [destinations[number % len(destinations)]])
        assert status is Status.LOADED, status

    try:
        return one_round(store), one_round(load)
    finally:
        files.close()


def storage(
    directory: Path,
    sync: str,
    keys: Sequence[bytes],
    payloads: Sequence[memoryview],
    destinations: Sequence[memoryview],
    one_round: Callable[[Callable[[int], None]], float],
) -> tuple[float, float]:
    """Store and load values in operations of BATCH through the driver's threads: MiB/s of both."""
    del one_round  # the threads are the storage's own
    num_mib = len(keys) * len(payloads[0]) / 2**20
    num_bytes = 2 * len(keys) * len(payloads[0])
    workers = StorageWorkers(
        open_files(directory, sync), num_threads=STORAGE_THREADS, max_bytes_in_flight=num_bytes
    )

    def rate(submit: Callable[..., OperationId], buffers: Sequence[memoryview]) -> float:
        blocks = [[buffers[number % len(buffers)]] for number in range(len(keys))]
        start = time.perf_counter()
        waiting = 0
        for first in range(0, len(keys), BATCH):
            part = slice(first, first + BATCH)
            submit(keys[part], blocks[part], timeout_s=600.0)
            waiting += 1
        while waiting:
            for completion in workers.poll():
                assert completion.prefix == len(completion.statuses), completion
                waiting -= 1
            time.sleep(PAUSE_S)
        return num_mib / (time.perf_counter() - start)

    try:
        return rate(workers.store, payloads), rate(workers.load, destinations)
    finally:
        workers.close()


def open_files(directory: Path, sync: str) -> FileBackend:
    """Open a backend, and make its directories."""
    files = FileBackend(directory, max_bytes=MAX_BYTES, sync="data" if sync == "data" else "none")
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
        f"{arguments.mib} MiB of values per round, median of {arguments.rounds} rounds, "
        f'sync="{arguments.sync}", checksums on.',
    ]


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--directory", type=Path, help="on the disk to measure; default: temporary")
    parser.add_argument("--mib", type=int, default=512, help="of values in each round")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--sync", choices=["none", "data"], default="none")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

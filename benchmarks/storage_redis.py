"""Compare the throughput of the Redis backend with a bare pipelined client, as Markdown.

Run:
    python benchmarks/storage_redis.py [--values N] [--rounds R]

The benchmark starts a redis-server on a Unix socket. All sides write and read the same values and
take turns in every round; a ratio is the median of the rounds' ratios. The bare client sends
batches of 32 commands on one connection, waits for the 32 answers, and keeps the values it reads.
Our sides write from two buffers per value and read into two, as for blocks:

- backend: one thread, one call per value, no checksums;
- storage: batches of 32 through `StorageWorkers` on four threads, with checksums and a check
  whether the block exists already.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from statistics import median

import redis
from machine import describe_machine

from radixkv.kvcache.storage import StorageOpId, StorageWorkers
from radixkv.kvcache.storage.redis.address import RedisAddress
from radixkv.kvcache.storage.redis.backend import RedisBackend

MIB = 1 << 20
BATCH = 32
SIZES = (256 << 10, 2 * MIB)
SIDES = ("bare", "backend", "storage")


class Run:
    """Values of one size, and the ways in which each side writes and reads them."""

    def __init__(self, path: str, num_bytes: int, num_values: int) -> None:
        """Make distinct values, and buffers to read into."""
        self.client = redis.Redis(unix_socket_path=path, protocol=2)
        self.backend = RedisBackend(RedisAddress(unix_path=path), timeout_s=60.0)
        self.storage_backend = RedisBackend(RedisAddress(unix_path=path), timeout_s=60.0)
        self.storage = StorageWorkers(
            self.storage_backend, max_bytes_in_flight=2 * BATCH * num_bytes
        )
        self.keys = [sha256(b"%d" % number).digest() for number in range(num_values)]
        self.values = [os.urandom(num_bytes) for _ in self.keys]
        half = num_bytes // 2
        self.blocks = [(value[:half], value[half:]) for value in self.values]
        self.into = [(bytearray(half), bytearray(num_bytes - half)) for _ in range(BATCH)]
        self.batches = [range(first, first + BATCH) for first in range(0, num_values, BATCH)]

    def put(self, side: str) -> float:
        """Return the seconds in which a side writes all values to an empty server."""
        self.client.flushall()
        return timed({"bare": self._put_bare, "backend": self._put, "storage": self._store}[side])

    def get(self, side: str) -> float:
        """Return the seconds in which a side reads the values that it wrote."""
        return timed({"bare": self._get_bare, "backend": self._get, "storage": self._load}[side])

    def close(self) -> None:
        """Close the connections."""
        self.client.close()
        self.backend.close()
        self.storage.close()

    def _put_bare(self) -> None:
        for batch in self.batches:
            pipeline = self.client.pipeline(transaction=False)
            for number in batch:
                pipeline.set(self.keys[number], self.values[number])
            pipeline.execute()

    def _get_bare(self) -> None:
        for batch in self.batches:
            pipeline = self.client.pipeline(transaction=False)
            for number in batch:
                pipeline.get(self.keys[number])
            found = pipeline.execute()
            assert all(len(value) == len(self.values[0]) for value in found)

    def _put(self) -> None:
        for key, block in zip(self.keys, self.blocks, strict=True):
            self.backend.put(key, [memoryview(part) for part in block])

    def _get(self) -> None:
        views = [memoryview(part) for part in self.into[0]]
        for key in self.keys:
            assert self.backend.get(key, views) == len(self.values[0])

    def _store(self) -> None:
        for batch in self.batches:
            keys = [self.keys[number] for number in batch]
            blocks = [self.blocks[number] for number in batch]
            self._wait(self.storage.store(keys, blocks, timeout_s=60.0))

    def _load(self) -> None:
        for batch in self.batches:
            keys = [self.keys[number] for number in batch]
            self._wait(self.storage.load(keys, self.into[: len(batch)], timeout_s=60.0))

    def _wait(self, operation: StorageOpId) -> None:
        while not (completions := self.storage.poll()):
            time.sleep(0.0002)  # as often as a fast engine steps
        assert completions[0].operation == operation
        assert completions[0].prefix == BATCH, completions[0]


def main() -> None:
    """Run the sides in turns and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--values", type=int, default=128, help="of each size; a multiple of 32")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    if arguments.values % BATCH or arguments.values < BATCH:
        parser.error(f"--values must be a multiple of {BATCH}")
    with server() as path:
        version = redis.Redis(unix_socket_path=path).info("server")["redis_version"]
        print(
            describe_machine(f"redis-server {version}", f"redis-py {redis.__version__}"),
            f"{arguments.values} values, {arguments.rounds} rounds\n",
            sep="\n\n",
        )
        print("| Values | Side | put MiB/s | ratio | get MiB/s | ratio |")
        print("| --- | --- | --- | --- | --- | --- |")
        for num_bytes in SIZES:
            run = Run(path, num_bytes, arguments.values)
            print("\n".join(measure(run, num_bytes, arguments.rounds)), flush=True)
            run.close()


def measure(run: Run, num_bytes: int, rounds: int) -> Iterator[str]:
    """Yield the rows of one size."""
    times: dict[tuple[str, str], list[float]] = {}
    for _ in range(rounds + 1):  # the first round warms up
        for side in SIDES:
            times.setdefault((side, "put"), []).append(run.put(side))
            times.setdefault((side, "get"), []).append(run.get(side))
    total_mib = len(run.keys) * num_bytes / MIB
    for side in SIDES:
        cells = [f"{num_bytes >> 10} KiB", side]
        for call in ("put", "get"):
            seconds, bare = times[side, call][1:], times["bare", call][1:]
            ratio = median(b / s for b, s in zip(bare, seconds, strict=True))
            cells += [f"{total_mib / median(seconds):,.0f}", f"{ratio:.2f}"]
        yield f"| {' | '.join(cells)} |"


def timed(call: Callable[[], None]) -> float:
    """Return the seconds of a call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


@contextmanager
def server() -> Iterator[str]:
    """Run a redis-server and yield the path of its socket."""
    program = shutil.which("redis-server")
    if program is None:
        raise SystemExit("redis-server is missing: apt-get install redis-server")
    with tempfile.TemporaryDirectory(prefix="radixkv-redis-") as directory:
        path = f"{directory}/redis.sock"
        settings = f'port 0\nunixsocket {path}\ndir {directory}\nsave ""\nappendonly no\n'
        with subprocess.Popen(
            [program, "-"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(settings)
            process.stdin.close()
            try:
                for line in process.stdout:
                    if "ready to accept connections" in line.lower():
                        break
                yield path
            finally:
                process.kill()


if __name__ == "__main__":
    main()

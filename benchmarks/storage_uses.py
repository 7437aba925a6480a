"""Print what it costs to tell storage of uses, as a Markdown table.

Run:
    python benchmarks/storage_uses.py [--blocks 750] [--rounds 21]

An admission hits a path of some blocks on the device, and then what storage is to be told is taken:
without storage; when the path is due, as so many others were admitted since it was told; and when
it is not, right after that. Then files are told of as many keys: once when they are new, which
writes their order down, and once more. Times are CPU times of one thread, medians over rounds.
"""

from __future__ import annotations

import argparse
import os
import platform
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

import numpy as np

from radixkv.kvcache import (
    CacheManager,
    HostConfig,
    Int32Array,
    Tiers,
)
from radixkv.kvcache.storage import FileBackend, StorageNamespace
from radixkv.kvcache.tiers.storage_recency import TOLD_FOR

BLOCK_SIZE = 16
NAMESPACE = StorageNamespace("none", "", "none", BLOCK_SIZE, layers=(0, 1), heads=(0, 1))
OTHER = np.full(BLOCK_SIZE, -1, np.int32)


def main() -> None:
    """Measure both, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=750, help="of the path")
    parser.add_argument("--rounds", type=int, default=21)
    arguments = parser.parse_args()
    prompt = np.arange(arguments.blocks * BLOCK_SIZE, dtype=np.int32)
    times: dict[str, list[float]] = {}
    for _ in range(arguments.rounds):
        for what, seconds in {**time_admissions(prompt), **time_files(prompt)}.items():
            times.setdefault(what, []).append(seconds)
    print(
        f"{datetime.now(UTC):%Y-%m-%d}, {platform.machine()}, {os.cpu_count()} cores, "
        f"load {os.getloadavg()[0]:.1f}; Python {platform.python_version()}\n\n"
        f"| {arguments.blocks} blocks | CPU time, us |\n| --- | ---: |"
    )
    for what, each_s in times.items():
        print(f"| {what} | {median(each_s) * 1e6:,.1f} |")


def time_admissions(prompt: Int32Array) -> dict[str, float]:
    """Return the seconds of an admission that hits all of a prompt."""
    times = {}
    for storage in (None, NAMESPACE):
        num_blocks = len(prompt) // BLOCK_SIZE + 1
        manager = CacheManager(num_blocks, BLOCK_SIZE, host=HostConfig(num_blocks), storage=storage)
        tiers = manager.tiers
        assert tiers is not None
        for tokens in (prompt, OTHER):
            lease = manager.admit(manager.match(tokens))
            manager.publish(lease, tokens)
            manager.release(lease)
        while operations := tiers.take_operations():
            for operation in operations:
                tiers.complete(operation.id, [True] * operation.num_blocks)
        for _ in range(TOLD_FOR):
            hit(manager, tiers, OTHER)
        first, second = hit(manager, tiers, prompt), hit(manager, tiers, prompt)
        if storage is None:
            times["admission, no storage"] = second
        else:
            times["admission, due"], times["admission, not due"] = first, second
    return times


def hit(manager: CacheManager, tiers: Tiers, tokens: Int32Array) -> float:
    """Admit what is cached, and return how long that and the telling took."""
    match = manager.match(tokens)
    start = time.thread_time()
    lease = manager.admit(match)
    tiers.take_used()
    seconds = time.thread_time() - start
    manager.release(lease)
    return seconds


def time_files(prompt: Int32Array) -> dict[str, float]:
    """Return the seconds in which files take in the order of a prompt's keys."""
    keys = NAMESPACE.block_keys(prompt)
    with tempfile.TemporaryDirectory() as directory:
        files = FileBackend(Path(directory), max_bytes=2**30)
        for key in keys:
            files.put(key, [memoryview(b"a value")])
        times = {"files, new": time_of(files.touch, keys), "files": time_of(files.touch, keys)}
        files.close()
    return times


def time_of(tell: Callable[[list[bytes]], None], keys: list[bytes]) -> float:
    """Return the seconds of one call."""
    start = time.thread_time()
    tell(keys)
    return time.thread_time() - start


if __name__ == "__main__":
    main()

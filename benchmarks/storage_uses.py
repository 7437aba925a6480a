"""Measure the CPU cost of recency reports to storage and print a Markdown table.

Run:
    python benchmarks/storage_uses.py [--blocks 750] [--rounds 21]

An admission hits a path of blocks on the device and takes the recency report for storage, in three
cases: without storage; with a report that is due because many other paths were admitted since the
last one; and right after that, when none is due. Then the file backend takes a report of as many
keys, once for new files, whose order it writes to disk, and once more. Times are CPU times of one
thread, medians over the rounds.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np
from machine import describe_machine

from radixkv.kvcache import CacheManager, HostConfig, Int32Array, Tiers
from radixkv.kvcache.storage import FileBackend, StorageNamespace
from radixkv.kvcache.tiers.storage_recency import REPORT_INTERVAL

BLOCK_SIZE = 16
NAMESPACE = StorageNamespace("none", "", "none", BLOCK_SIZE, layers=(0, 1), heads=(0, 1))
OTHER = np.full(BLOCK_SIZE, -1, np.int32)


def main() -> None:
    """Measure admissions and files, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=750, help="length of the path")
    parser.add_argument("--rounds", type=int, default=21)
    arguments = parser.parse_args()
    prompt = np.arange(arguments.blocks * BLOCK_SIZE, dtype=np.int32)
    times: dict[str, list[float]] = {}
    for _ in range(arguments.rounds):
        for what, seconds in {**time_admissions(prompt), **time_files(prompt)}.items():
            times.setdefault(what, []).append(seconds)
    print(f"{describe_machine()}\n\n| {arguments.blocks} blocks | CPU time, us |\n| --- | ---: |")
    for what, each_s in times.items():
        print(f"| {what} | {median(each_s) * 1e6:,.1f} |")


def time_admissions(prompt: Int32Array) -> dict[str, float]:
    """Return the seconds of an admission that hits a whole prompt."""
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
        for _ in range(REPORT_INTERVAL):
            hit(manager, tiers, OTHER)
        first, second = hit(manager, tiers, prompt), hit(manager, tiers, prompt)
        if storage is None:
            times["admission, no storage"] = second
        else:
            times["admission, due"], times["admission, not due"] = first, second
    return times


def hit(manager: CacheManager, tiers: Tiers, tokens: Int32Array) -> float:
    """Admit cached tokens; return the seconds of that and of taking the report."""
    match = manager.match(tokens)
    start = time.thread_time()
    lease = manager.admit(match)
    tiers.take_used()
    seconds = time.thread_time() - start
    manager.release(lease)
    return seconds


def time_files(prompt: Int32Array) -> dict[str, float]:
    """Return the seconds in which the file backend records the recency of a prompt's keys."""
    keys = NAMESPACE.block_keys(prompt)
    with tempfile.TemporaryDirectory() as directory:
        files = FileBackend(Path(directory), max_bytes=2**30)
        for key in keys:
            files.put(key, [memoryview(b"a value")])
        times = {"files, new": timed(files.touch, keys), "files": timed(files.touch, keys)}
        files.close()
    return times


def timed(touch: Callable[[list[bytes]], None], keys: list[bytes]) -> float:
    """Return the seconds of one call."""
    start = time.thread_time()
    touch(keys)
    return time.thread_time() - start


if __name__ == "__main__":
    main()

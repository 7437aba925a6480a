"""Count the reachable blocks of a full storage, with and without recency reports.

Run:
    python benchmarks/storage_order.py TRACE [--requests 2500] [--storage-blocks 500000]

The benchmark simulates the first half of the requests with a device of 20,000 blocks, a
write-through host tier of 50,000 and an LRU storage. It then counts the prompt blocks in storage,
and those of them that are unreachable because storage evicted an earlier block of the prefix.
Finally it simulates the second half as a new process with the same storage. In one row, storage
receives recency reports; in the other, it sees only reads and writes. The counts do not depend on
the machine. The output is a Markdown table.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

from radixkv.kvcache import HostConfig
from radixkv.scheduler.replay import Trace, TraceRequest, named_costs, read_trace
from radixkv.scheduler.replay.simulation.simulated_storage import (
    SimulatedStorage,
    simulated_namespace,
)
from radixkv.scheduler.replay.simulation.single_node import SimulationConfig, simulate
from radixkv.scheduler.replay.trace import tokens

CONFIG = SimulationConfig(num_blocks=20_000, host=HostConfig(50_000, "through"))
HEAD = ("Recency reports", "Prompt blocks", "Unreachable", "Tokens hit in storage, second half")


class UnreportedStorage(SimulatedStorage):
    """Storage that sees only reads and writes."""

    def touch(self, keys: Sequence[bytes]) -> None:
        """Ignore recency reports."""


def main() -> None:
    """Simulate both kinds of storage and print a row for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace", type=Path, metavar="TRACE", help="Mooncake, .jsonl")
    parser.add_argument("--requests", type=int, default=2_500, help="in both halves together")
    parser.add_argument("--storage-blocks", type=int, default=500_000)
    arguments = parser.parse_args()
    requests = read_trace(arguments.trace).requests[: arguments.requests]
    halves = requests[: len(requests) // 2], requests[len(requests) // 2 :]
    costs = named_costs("llama3-8b", "h200x8")
    print(f"| {' | '.join(HEAD)} |\n| --- {'| ---: ' * 3}|")
    for kind in (UnreportedStorage, SimulatedStorage):
        storage = kind(arguments.storage_blocks, costs)
        simulate(Trace(halves[0]), costs, CONFIG, storage=storage)
        stored, reachable = count_blocks(halves[0], storage)
        second = simulate(Trace(halves[1]), costs, CONFIG, storage=storage)
        reports = "no" if kind is UnreportedStorage else "yes"
        print(
            f"| {reports} | {stored:,} | {stored - reachable:,} | {second.storage_hit_tokens:,} |",
            flush=True,
        )


def count_blocks(requests: Sequence[TraceRequest], storage: SimulatedStorage) -> tuple[int, int]:
    """Count the prompt blocks in storage, and those whose whole prefix is there."""
    namespace = simulated_namespace(CONFIG.block_size)
    stored: set[bytes] = set()
    reachable: set[bytes] = set()
    for request in requests:
        keys = namespace.block_keys(tokens(request))
        stored.update(key for key in keys if key in storage)
        reachable.update(takewhile(storage.__contains__, keys))
    return len(stored), len(reachable)


if __name__ == "__main__":
    main()

"""Print what a full storage keeps that can be found, told of uses or not, as a Markdown table.

Run:
    python benchmarks/storage_order.py TRACE [--requests 2500] [--storage-blocks 500000]

The first half of the requests is simulated with a device of 20,000 blocks, a host tier of 50,000
that is written through, and a storage that forgets what was used longest ago. Then those blocks of
their prompts are counted that storage has, and of them those that nobody can find, as storage has
forgotten a block before them. Last, the other half is simulated in a new process with the storage
that is left. In one row storage is told what is used, in the other it sees only what is written and
read. The counts do not depend on the machine.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

from radixkv.kvcache import HostConfig
from radixkv.scheduler.replay import (
    Trace,
    TraceRequest,
    named_costs,
    read_trace,
)
from radixkv.scheduler.replay.simulation.simulated_storage import (
    SimulatedStorage,
    simulated_namespace,
)
from radixkv.scheduler.replay.simulation.single_node import SimulationConfig, simulate
from radixkv.scheduler.replay.trace import tokens

CONFIG = SimulationConfig(num_blocks=20_000, host=HostConfig(50_000, "through"))
HEAD = ("Told of uses", "Blocks of prompts", "Of them lost", "Tokens hit in storage, second half")


class UntoldStorage(SimulatedStorage):
    """Sees what is written and read."""

    def touch(self, keys: Sequence[bytes]) -> None:
        """Do not listen."""


def main() -> None:
    """Print a row for each kind of storage."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace", type=Path, metavar="TRACE", help="Mooncake, .jsonl")
    parser.add_argument("--requests", type=int, default=2_500, help="of the trace, in both halves")
    parser.add_argument("--storage-blocks", type=int, default=500_000)
    arguments = parser.parse_args()
    requests = read_trace(arguments.trace).requests[: arguments.requests]
    halves = requests[: len(requests) // 2], requests[len(requests) // 2 :]
    costs = named_costs("llama3-8b", "h200x8")
    print(f"| {' | '.join(HEAD)} |\n| --- {'| ---: ' * 3}|")
    for kind in (UntoldStorage, SimulatedStorage):
        storage = kind(arguments.storage_blocks, costs)
        simulate(Trace(halves[0]), costs, CONFIG, storage=storage)
        stored, found = count_blocks(halves[0], storage)
        second = simulate(Trace(halves[1]), costs, CONFIG, storage=storage)
        told = "no" if kind is UntoldStorage else "yes"
        print(
            f"| {told} | {stored:,} | {stored - found:,} | {second.storage_hit_tokens:,} |",
            flush=True,
        )


def count_blocks(requests: Sequence[TraceRequest], storage: SimulatedStorage) -> tuple[int, int]:
    """Count the blocks of prompts that storage has, and those that can be found."""
    names = simulated_namespace(CONFIG.block_size)
    stored: set[bytes] = set()
    found: set[bytes] = set()
    for request in requests:
        keys = names.block_keys(tokens(request))
        stored.update(key for key in keys if key in storage)
        found.update(takewhile(storage.__contains__, keys))
    return len(stored), len(found)


if __name__ == "__main__":
    main()

"""Compare the hits and moves of two cache tiers with the law of LRU, as a Markdown table.

Run:
    python benchmarks/two_tiers.py TRACE [TRACE ...]

Every row is one pass of a trace through the manager with an exclusive host tier, compared with the
law in `radixkv.scheduler.replay.hits.tier_law` for every request. A row that differs shows where,
and the exit status is then 1. The counts do not depend on the machine.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from radixkv.kvcache.tiers.host_tier import HostConfig
from radixkv.scheduler.replay import read_trace
from radixkv.scheduler.replay.hits.counts import run_manager
from radixkv.scheduler.replay.hits.oracles import prefix_paths
from radixkv.scheduler.replay.hits.tier_law import find_difference, two_tier_law

SIZES = ((1_000, 1_000), (2_000, 500), (5_000, 10_000), (1_000, 20_000), (10_000, 40_000))
HEAD = ("Trace", "Device + host blocks", "Device hits", "Host hits", "Demoted", "Dropped", "Law")


def main() -> int:
    """Print a row for each trace and pair of sizes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("traces", nargs="+", type=Path, metavar="TRACE", help="Mooncake, .jsonl")
    print(f"| {' | '.join(HEAD)} |\n| --- | --- {'| ---: ' * 4}| --- |")
    differs = False
    for path in parser.parse_args().traces:
        trace = read_trace(path)
        paths = prefix_paths(trace)
        for device, host in SIZES:
            run = run_manager(trace, device, host=HostConfig(host, "exclusive"))
            difference = find_difference(run, two_tier_law(paths, device, host))
            counts = (sum(run.hits), sum(run.host_hits), run.demoted_blocks, run.dropped_blocks)
            print(
                f"| {path.name} | {device:,} + {host:,} "
                f"| {' | '.join(f'{count:,}' for count in counts)} | {difference or 'equal'} |"
            )
            differs |= difference is not None
    return int(differs)


if __name__ == "__main__":
    sys.exit(main())

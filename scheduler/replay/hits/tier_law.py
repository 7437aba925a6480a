"""The law of two exclusive tiers, and the check of the manager's host tier against it.

A block is in one tier at a time: evicted from the device it is demoted, and a hit moves it back.
The two tiers are thus one LRU list cut in two. With g blocks on the device and h on the host::

    device hits                = hits of one LRU cache of g blocks
    device hits + host hits    = hits of one LRU cache of g + h blocks
    demotions                  = evictions of the first
    drops                      = evictions of the second

for every request. Both sides refuse a request that the device cannot hold. The right side comes
from `lru_oracle`, which knows neither trees nor tiers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ....kvcache.tiers.host_tier import HostConfig
from ..checks import Check
from ..progress import Progress, no_progress
from ..trace import Trace
from .counts import ManagerRun, run_manager
from .oracles import BlockPath, lru_oracle, prefix_paths

SIZES = ((1_000, 1_000), (1_000, 9_000), (5_000, 5_000))
"""Device and host sizes, in blocks of 512 tokens, at which a replay checks the law."""


@dataclass(frozen=True, slots=True)
class TwoTierCounts:
    """Hits per request and total moves that the law predicts for two exclusive tiers."""

    device_hits: list[int]
    host_hits: list[int]
    demoted_blocks: int
    dropped_blocks: int


def two_tier_law(paths: Sequence[BlockPath], device: int, host: int) -> TwoTierCounts:
    """Predict the counts of a device tier and an exclusive host tier of these sizes."""
    served = [path if len(path) <= device else () for path in paths]
    upper = lru_oracle(served, device)
    both = lru_oracle(served, device + host)
    num_blocks = sum(map(len, served))
    return TwoTierCounts(
        upper,
        [total - hit for total, hit in zip(both, upper, strict=True)],
        # Evictions: blocks inserted minus blocks still there; a full cache stays full.
        max(num_blocks - sum(upper) - device, 0),
        max(num_blocks - sum(both) - device - host, 0),
    )


def find_difference(run: ManagerRun, law: TwoTierCounts) -> str | None:
    """Describe the first difference between a pass of the manager and the law; None if equal."""
    for tier, hits, expected in (
        ("on the device", run.hits, law.device_hits),
        ("on the host", run.host_hits, law.host_hits),
    ):
        for index, (hit, wanted) in enumerate(zip(hits, expected, strict=True)):
            if hit != wanted:
                return f"request {index}: manager {hit} blocks {tier}, law {wanted}"
    for move, moved, wanted in (
        ("demoted", run.demoted_blocks, law.demoted_blocks),
        ("dropped", run.dropped_blocks, law.dropped_blocks),
    ):
        if moved != wanted:
            return f"manager {move} {moved:,} blocks, law {wanted:,}"
    return None


def check_two_tier_law(
    trace: Trace,
    sizes: Sequence[tuple[int, int]] = SIZES,
    progress: Progress = no_progress,
) -> Check:
    """Check the hits and moves of a manager with an exclusive host tier against the law."""
    name = "two tiers hit, demote and drop as LRU caches of their sizes do"
    paths = prefix_paths(trace)
    for done, (device, host) in enumerate(sizes):
        progress("two tiers", done * len(paths), len(sizes) * len(paths))
        run = run_manager(trace, device, host=HostConfig(host, "exclusive"))
        difference = find_difference(run, two_tier_law(paths, device, host))
        if difference is not None:
            return Check(name, False, f"{device:,} + {host:,} blocks: {difference}")
    progress("two tiers", len(sizes) * len(paths), len(sizes) * len(paths))
    return Check(name, True, f"{len(paths):,} requests at {len(sizes)} pairs of sizes")

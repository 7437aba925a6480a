"""How often each situation must come up, or a run proves nothing about it.

A generator that never evicts finds no bug in eviction, and says "ok". So each situation of interest
is counted, and has a floor: about half of what was measured when it was set.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

PER_STEPS: Final = 200_000

CACHE_FLOORS: Final = {
    "admitted": 22_000,
    "admitted with an old match": 4_500,
    "batch that needs blocks": 90,
    "completion heard twice": 1_900,
    "duplicate of a held copy": 550,
    "duplicate of an unheld": 270,
    "evicted next to a used block": 420,
    "evicted several": 3_000,
    "evicted the tail of a path": 1_500,
    "evicted under pressure": 3_500,
    "evicted when asked": 1_200,
    "failed step": 250,
    "full hit": 1_700,
    "grown into a new block": 4_000,
    "growth refused": 2_200,
    "hit": 3_100,
    "hit that ends before a published block": 1_900,
    "late completion": 1_200,
    "match": 13_000,
    "misuse": 4_900,
    "preempted": 4_200,
    "preempted in prefill": 2_600,
    "refused": 4_100,
    "released with a step in flight": 1_000,
    "reset with live leases": 1_000,
    "resumed": 3_500,
    "resumed with a hit": 1_700,
    "too large": 1_200,
}
"""Per 200,000 random steps on a manager that has every optional method, at depth ``full``."""


SCHEDULER_FLOORS: Final = {
    "aborted in decode": 1_500,
    "aborted in flight": 1_000,
    "aborted in prefill": 440,
    "aborted preempted": 35,
    "aborted waiting": 1_500,
    "all slots taken": 11_000,
    "chunk cut by the budget": 10_000,
    "drained with work": 1_600,
    "ended by length": 17_000,
    "ended by stop": 1_700,
    "flooded": 460,
    "hit": 9_500,
    "misuse refused": 3_200,
    "preempted in decode": 1_200,
    "preempted in prefill": 140,
    "preempted twice": 120,
    "preempted two at once": 40,
    "prefill beside decode": 11_000,
    "refused by the reservation": 14_000,
    "resumed with a hit": 800,
    "resumed without a hit": 600,
    "too large": 5_000,
    "waited for a leader": 260,
    "whole hit": 4_000,
}
"""Per 200,000 random steps on a scheduler that makes every promise."""

TIER_FLOORS: Final = {
    "admitted with an old match": 1_300,
    "admitted": 23_000,
    "batch that needs blocks": 35,
    "completion heard twice": 850,
    "demoted, and dropped": 490,
    "done: fetch": 450,
    "done: fork": 180,
    "done: in": 2_600,
    "done: lookup": 500,
    "done: out": 9_400,
    "done: store": 1_200,
    "dropped for room": 5_600,
    "duplicate of a held copy": 210,
    "evicted next to a used block": 780,
    "evicted several": 5_600,
    "evicted the tail of a path": 5_000,
    "evicted under pressure": 8_000,
    "evicted when asked": 1_400,
    "failed: fork": 35,
    "failed: in": 160,
    "failed: lookup": 1_900,
    "failed: out": 1_600,
    "failed: store": 370,
    "fenced later": 1_900,
    "fetched": 430,
    "forked": 800,
    "full hit": 6_700,
    "grown into a new block": 1_000,
    "growth refused": 220,
    "heard of twice": 1_100,
    "hit on the host": 2_800,
    "hit that ends before a published block": 6_900,
    "hit": 5_400,
    "late completion": 220,
    "loaded in part": 140,
    "loaded": 2_500,
    "match": 2_200,
    "misuse": 1_000,
    "not forked": 40,
    "not parked": 1_800,
    "parked before it is published": 380,
    "parked behind another copy": 310,
    "parked": 1_300,
    "parked, and failed": 970,
    "parking": 3_600,
    "preempted in prefill": 530,
    "preempted": 870,
    "prefetch cancelled": 350,
    "refused": 2_100,
    "released while loading": 270,
    "released with a step in flight": 320,
    "reset with live leases": 980,
    "reset with operations": 390,
    "result before it is taken": 240,
    "resumed in part": 760,
    "resumed with a hit": 2_100,
    "resumed": 2_300,
    "resumed, and all is there": 680,
    "second result": 100,
    "served by the law": 12_000,
    "tail loaded": 320,
    "too large": 280,
    "unparked while it is saved": 210,
    "unparked": 1_500,
}
"""Per 200,000 random steps on a manager with tiers."""


def too_rare(
    situations: Mapping[str, int], floors: Mapping[str, int], num_steps: int
) -> dict[str, tuple[int, float]]:
    """Return the situations that came up too rarely: how often, and how often they should.

    Args:
        situations: what a run counted.
        floors: per `PER_STEPS` steps.
        num_steps: the steps of the run.
    """
    wanted = {name: floor * num_steps / PER_STEPS for name, floor in floors.items()}
    return {
        name: (situations.get(name, 0), floor)
        for name, floor in wanted.items()
        if situations.get(name, 0) < floor
    }

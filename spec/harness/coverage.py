"""Minimum frequency of each situation, below which a run proves nothing about it.

A generator that never evicts finds no bug in eviction and reports success. Therefore each situation
of interest is counted and has a minimum, about half of the frequency measured when it was set.
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
    "two namespaces share tokens": 3_500,
}
"""Per 200,000 random steps on a manager with all optional methods, at depth ``full``."""


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

HANDOFF_FLOORS: Final = {
    "answered": 4_300,
    "arrived: Abort": 4_700,
    "arrived: Ack": 8_600,
    "arrived: Ask": 22_000,
    "arrived: CancelAttempt": 14_000,
    "arrived: Commit": 11_000,
    "arrived: DecodeFailed": 200,
    "arrived: DeliveryAck": 32_000,
    "arrived: Finished": 8_600,
    "arrived: Grant": 9_300,
    "arrived: NodeStatus": 27_000,
    "arrived: PrefillFailed": 5_800,
    "arrived: Refuse": 11_000,
    "arrived: Renew": 6_400,
    "arrived: RunPrefill": 12_000,
    "arrived: Send": 6_600,
    "arrived: Started": 6_100,
    "attempt": 9_300,
    "block sent": 12_000,
    "busy": 2_200,
    "copied": 4_000,
    "failed": 730,
    "late write": 600,
    "message of an old epoch": 59,
    "preempted": 100,
    "reset": 630,
    "started": 4_800,
    "token cached on D": 8_000,
    "token hit on P": 8_000,
}
"""Per 200,000 random steps on a hand-off; those that drain a world count as one. They are a third
of those measured: worlds differ much in what they favour."""

TIERED_SCHEDULER_FLOORS: Final = {
    "aborted in decode": 1_200,
    "aborted in flight": 1_200,
    "aborted in prefill": 550,
    "aborted preempted": 90,
    "aborted waiting": 2_200,
    "aborted: fetch begun": 110,
    "aborted: fetch ended": 16,
    "aborted: in begun": 65,
    "aborted: in queued": 16,
    "aborted: lookup begun": 930,
    "aborted: lookup ended": 120,
    "aborted: out begun": 46,
    "aborted: out ended": 9,
    "all slots taken": 5_000,
    "chunk cut by the budget": 3_600,
    "drained with work": 1_500,
    "ended by length": 11_000,
    "ended by stop": 1_300,
    "ended: fetch": 340,
    "ended: in": 330,
    "ended: lookup": 3_400,
    "ended: out": 5_200,
    "ended: store": 1_300,
    "failed: fetch": 120,
    "failed: in": 110,
    "failed: lookup": 1_100,
    "failed: out": 1_700,
    "failed: store": 440,
    "flooded": 330,
    "hit": 8_600,
    "misuse refused": 2_200,
    "preempted in decode": 830,
    "preempted in prefill": 92,
    "preempted twice": 100,
    "preempted two at once": 20,
    "prefill beside decode": 4_000,
    "refused by the reservation": 9_300,
    "reset with parked": 42,
    "reset: fetch begun": 100,
    "reset: fetch ended": 17,
    "reset: in begun": 71,
    "reset: in ended": 10,
    "reset: in queued": 11,
    "reset: lookup begun": 1_000,
    "reset: lookup ended": 130,
    "reset: out begun": 67,
    "reset: out ended": 10,
    "resumed with a hit": 1_100,
    "resumed without a hit": 880,
    "too large": 5_400,
    "waited for a copy": 17_000,
    "waited for a leader": 1_400,
    "waited for blocks": 1_200,
    "whole hit": 4_400,
}
"""Per 200,000 random steps on a scheduler over tiers that makes every promise."""

TIER_FLOORS: Final = {
    "admitted": 23_000,
    "admitted with an old match": 1_300,
    "batch that needs blocks": 35,
    "completion heard twice": 850,
    "demoted, and dropped": 700,
    "done: fetch": 1_100,
    "done: fork": 180,
    "done: in": 3_500,
    "done: lookup": 1_500,
    "done: out": 9_400,
    "done: store": 1_600,
    "dropped for room": 5_600,
    "duplicate of a held copy": 210,
    "evicted next to a used block": 990,
    "evicted over a full host": 160,
    "evicted several": 5_600,
    "evicted the tail of a path": 5_000,
    "evicted under pressure": 8_000,
    "evicted when asked": 2_500,
    "failed: fetch": 98,
    "failed: fork": 20,
    "failed: in": 190,
    "failed: lookup": 1_500,
    "failed: out": 1_200,
    "failed: store": 370,
    "fenced later": 1_900,
    "fetched": 1_000,
    "fetched nothing": 76,
    "forgotten by storage": 4_500,
    "forked": 850,
    "full hit": 6_900,
    "grown into a new block": 1_000,
    "growth refused": 1_300,
    "heard of twice": 1_100,
    "hit": 5_400,
    "hit on the host": 3_500,
    "hit that ends before a published block": 6_900,
    "late completion": 120,
    "loaded": 3_500,
    "loaded for nobody": 82,
    "loaded in part": 150,
    "loaded on, for nobody": 88,
    "match": 2_500,
    "misuse": 1_000,
    "not forked": 90,
    "not parked": 2_400,
    "parked": 2_400,
    "parked before it is published": 220,
    "parked behind another copy": 370,
    "parked, and failed": 650,
    "parking": 5_100,
    "preempted": 1_000,
    "preempted in prefill": 530,
    "prefetch cancelled": 350,
    "refused": 6_500,
    "released while loading": 460,
    "released with a step in flight": 550,
    "reset with live leases": 980,
    "reset with operations": 530,
    "result before it is taken": 240,
    "resumed": 2_500,
    "resumed in part": 1_300,
    "resumed with a hit": 3_200,
    "resumed, and all is there": 1_300,
    "second result": 75,
    "served by the law": 12_000,
    "storage is told of uses": 13_000,
    "tail and block in one load": 200,
    "tail loaded": 760,
    "tail loaded, and a block before it failed": 12,
    "too large": 200,
    "two namespaces share tokens": 9_000,
    "unparked": 2_300,
    "unparked while it is saved": 300,
    "wrong result": 150,
}
"""Per 200,000 random steps on a manager with tiers."""


def too_rare(
    situations: Mapping[str, int], floors: Mapping[str, int], num_steps: int
) -> dict[str, tuple[int, float]]:
    """Return the situations that occurred too rarely, with actual and minimum frequency.

    Args:
        situations: the counts of a run.
        floors: minimum counts per `PER_STEPS` steps.
        num_steps: number of steps of the run.
    """
    wanted = {name: floor * num_steps / PER_STEPS for name, floor in floors.items()}
    return {
        name: (situations.get(name, 0), floor)
        for name, floor in wanted.items()
        if situations.get(name, 0) < floor
    }

"""Default targets of ``radixkv fuzz``: factories of adapters of our own classes.

A trace file contains the import path of its target, so it can be replayed on another machine.
"""

from __future__ import annotations

from . import (
    cache_adapter,
    handoff_adapter,
    pool_adapter,
    scheduler_adapter,
    tiered_scheduler_adapter,
)
from .tiers import adapter as tier_adapter

cache = cache_adapter.make_factory()
handoff = handoff_adapter.make_factory()
pool = pool_adapter.make_factory()
scheduler = scheduler_adapter.make_factory()
tiered_scheduler = tiered_scheduler_adapter.make_factory()
tiers = tier_adapter.make_factory()
costs = tier_adapter.make_cost_factory()

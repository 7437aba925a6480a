"""The kinds of systems that can be tested, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Literal, TypeAlias

from ..adapters.cache_target import Depth
from .engine import Subject

What: TypeAlias = Literal["cache", "pool", "scheduler", "tiers"]

WHATS: Final[tuple[What, ...]] = ("cache", "pool", "scheduler", "tiers")


def make_subject(what: What, factory: Callable[..., Any], depth: Depth) -> Subject:
    """Return the subject for a kind of system and a factory of adapters.

    Args:
        what: the kind of system.
        factory: see `Factory`, `PoolFactory`, `SchedulerFactory` or `TierFactory`.
        depth: the depth at which a cache is checked; the other kinds have only one.
    """
    if what == "cache":
        from .cache.world import CacheSubject

        return CacheSubject(factory, depth)
    if what == "pool":
        from .pool_world import PoolSubject

        return PoolSubject(factory)
    if what == "tiers":
        from .tiers.world import TierSubject

        return TierSubject(factory)
    from .scheduler.world import SchedulerSubject

    return SchedulerSubject(factory)

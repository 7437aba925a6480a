"""The kinds of systems that can be tested, by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias, get_args

from ..adapters.cache import AdapterError
from ..adapters.cache_target import Depth
from .engine import Subject

What: TypeAlias = Literal[
    "cache", "costs", "handoff", "pool", "scheduler", "tiered_scheduler", "tiers"
]

WHATS: Final[tuple[What, ...]] = get_args(What)


@dataclass(frozen=True)
class SubjectOptions:
    """What a user says of a system under test.

    Attributes:
        block_sizes: block sizes of a cache to test; empty for those of its factory.
        pool_sizes: numbers of blocks, likewise.
        known: codes or names of rules that are known to be broken, and are not judged.
    """

    block_sizes: tuple[int, ...] = ()
    pool_sizes: tuple[int, ...] = ()
    known: tuple[str, ...] = ()


def make_subject(
    what: What,
    factory: Callable[..., Any],
    depth: Depth,
    options: SubjectOptions = SubjectOptions(),
) -> Subject:
    """Return the subject for a kind of system and a factory of adapters.

    Args:
        what: the kind of system.
        factory: see `Factory`, `CostFactory`, `HandoffFactory`, `PoolFactory`,
            `SchedulerFactory` or `TierFactory`.
        depth: the depth at which a cache is checked; the other kinds have only one.
        options: sizes, and known findings.

    Raises:
        AdapterError: there is no such size or rule, or the kind has no sizes.
    """
    for name, sizes in (("block_sizes", options.block_sizes), ("pool_sizes", options.pool_sizes)):
        if sizes and what != "cache":
            raise AdapterError(f"{name}: only caches have sizes to choose from, not {what}")
        if not all(size > 0 for size in sizes):
            raise AdapterError(f"{name} must be positive integers, got {list(sizes)}")
    subject = _make_subject(what, factory, depth, options)
    if not options.known:
        return subject
    from .findings.known import KnownSubject

    return KnownSubject(subject, options.known)


def _make_subject(
    what: What, factory: Callable[..., Any], depth: Depth, options: SubjectOptions
) -> Subject:
    if what == "cache":
        from .cache.world import CacheSubject

        return CacheSubject(factory, depth, options.block_sizes, options.pool_sizes)
    if what == "costs":
        from .cost_world import CostSubject

        return CostSubject(factory)
    if what == "pool":
        from .pool_world import PoolSubject

        return PoolSubject(factory)
    if what == "handoff":
        from .handoff.world import HandoffSubject

        return HandoffSubject(factory)
    if what == "tiers":
        from .tiers.world import TierSubject

        return TierSubject(factory)
    from .scheduler.world import SchedulerSubject

    return SchedulerSubject(factory, has_tiers=what == "tiered_scheduler")

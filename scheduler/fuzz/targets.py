"""Default targets of ``radixkv fuzz``: factories of adapters of our own classes.

A trace file contains the import path of its target, so it can be replayed on another machine.
"""

from __future__ import annotations

from typing import Any, Final

from ...spec.harness.subjects import What

DEFAULT_TARGETS: Final[dict[What, str]] = {
    what: f"{__name__}:{what}" for what in ("cache", "pool", "scheduler", "tiers")
}
"""Import path of our target of each kind."""


def cache(num_blocks: int, block_size: int) -> Any:
    """Make an adapter of our cache manager."""
    from .cache_adapter import make_factory

    return make_factory()(num_blocks, block_size)


def pool(num_blocks: int) -> Any:
    """Make an adapter of our block pool."""
    from .pool_adapter import make_factory

    return make_factory()(num_blocks)


def scheduler(config: dict[str, Any]) -> Any:
    """Make an adapter of our scheduler."""
    from .scheduler_adapter import make_factory

    return make_factory()(config)


def tiers(config: dict[str, Any]) -> Any:
    """Make an adapter of our cache manager with its tiers."""
    from .tier_adapter import make_factory

    return make_factory()(config)

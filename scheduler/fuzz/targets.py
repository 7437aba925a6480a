"""What ``radixkv fuzz`` tests if it is given no target: our own, by names that can be imported.

What is written to a trace file is such a name, so that the file can be replayed by whoever has it.
"""

from __future__ import annotations

from typing import Any, Final

from ...spec.harness.subjects import What

OWN: Final[dict[What, str]] = {
    what: f"{__name__}:{what}" for what in ("cache", "pool", "scheduler", "tiers")
}
"""Our target of each kind."""


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

"""What ``radixkv fuzz`` tests if it is given no target: our own, by names that can be imported."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...spec.subjects import What


def own_factory(what: What) -> Callable[..., Any]:
    """Return the factory of our adapter of a kind."""
    if what == "cache":
        from .cache_adapter import make_factory as make_cache

        return make_cache()
    if what == "pool":
        from .pool_adapter import make_factory as make_pool

        return make_pool()
    from .scheduler_adapter import make_factory as make_scheduler

    return make_scheduler()

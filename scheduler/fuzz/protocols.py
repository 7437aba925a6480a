"""The attributes of our adapters that the modules below them use."""

from __future__ import annotations

from types import ModuleType
from typing import Any, Protocol


class CacheUnderTest(Protocol):
    """A `CacheAdapter`, as the wrong calls see it."""

    kvcache: ModuleType
    manager: Any
    leases: dict[str, Any]
    ended: list[Any]


class TiersUnderTest(CacheUnderTest, Protocol):
    """A `TierAdapter`, as its wrong calls, event reports and snapshots see it."""

    tiers: Any
    matches: dict[str, tuple[Any, Any]]
    parked_requests: dict[str, Any]
    parking: dict[str, Any]
    publisher: str
    ends_as_asked: bool

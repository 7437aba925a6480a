"""Protocols of our adapters, for the modules that the adapters import."""

from __future__ import annotations

from types import ModuleType
from typing import Any, Protocol


class CacheUnderTest(Protocol):
    """The attributes of a `CacheAdapter` that wrong calls use."""

    kvcache: ModuleType
    manager: Any
    leases: dict[str, Any]
    ended: list[Any]
    steps_begun: int
    steps_ended: int


class TiersUnderTest(CacheUnderTest, Protocol):
    """The attributes of a `TierAdapter` that wrong calls, events and snapshots use."""

    tiers: Any
    matches: dict[str, tuple[Any, Any]]
    parked_requests: dict[str, Any]
    parking: dict[str, Any]
    publisher: str

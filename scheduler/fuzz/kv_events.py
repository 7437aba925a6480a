"""KV events of our cache manager, as the specification names them."""

from __future__ import annotations

from typing import Any, Final

from ...spec.model.events import Cleared, Event, Removed, Stored

KEPT_BATCHES: Final = 4
"""Batches that are kept for a replay."""


def as_event(event: Any) -> Event:
    """Return an event of `radixkv.kvcache`, or of a copy of it."""
    match type(event).__name__:
        case "BlockStored":
            return Stored(
                event.medium,
                event.block_hashes,
                event.parent_block_hash,
                event.token_ids.tolist(),
                event.block_size,
                event.namespace,
            )
        case "BlockRemoved":
            return Removed(event.medium, event.block_hashes)
        case _:
            return Cleared()

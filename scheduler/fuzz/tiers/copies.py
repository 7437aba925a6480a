"""The operations of our tiers, as the specification has them."""

from __future__ import annotations

from typing import Any, Final

from ....spec.adapters.tiers import Copy, CopyKind

KINDS: Final[dict[str, CopyKind]] = {
    "device to host": "out",
    "host to device": "in",
    "host to storage": "store",
    "storage to host": "fetch",
    "look up in storage": "lookup",
    "device to device": "fork",
}
"""Kinds of operations in the specification, by the value of ours."""


def take_copies(tiers: Any) -> list[Copy]:
    """Take the queued operations of our tiers, or of a copy of them."""
    return [
        Copy(
            int(each.id),
            KINDS[each.kind.value],
            tuple(each.sources.tolist()),
            tuple(each.destinations.tolist()),
            each.keys,
        )
        for each in tiers.take_operations()
    ]

"""Identifiers: epochs of a cache, operations of its tiers, and the size of a storage key."""

from __future__ import annotations

from typing import Final, NewType

Epoch = NewType("Epoch", int)
"""Number of resets of a cache; a lease or operation of an older epoch has ended."""

OpId = NewType("OpId", int)
"""Identifies an operation of a cache; never reused, not even after a reset."""

KEY_BYTES: Final = 32
"""Size of a storage key, a SHA-256 digest."""

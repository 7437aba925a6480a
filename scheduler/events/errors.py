"""Errors of KV events on the network."""

from __future__ import annotations

from ..errors import SchedulerError


class EventAddressError(SchedulerError, ValueError):
    """An endpoint of KV events is malformed, or cannot be bound or connected to."""


class EventFormatError(SchedulerError, ValueError):
    """A message is no batch of KV events."""

"""What a transport refuses when it is called or opened; what a peer can cause is an event.

::

    SchedulerError
    └── TransportError
        ├── TransportArgumentError     arrays that are not as described, or a ticket used twice
        ├── TransportUnavailableError  this engine cannot run here; the text says what is missing
        └── TransportClosedError       a call after close
"""

from __future__ import annotations

from ...errors import SchedulerError


class TransportError(SchedulerError):
    """Base of what transports refuse."""


class TransportArgumentError(TransportError, ValueError):
    """Arrays are not as their descriptor says, or a ticket is used for the second time."""


class TransportUnavailableError(TransportError):
    """An engine cannot run on this machine, or failed its self-test."""


class TransportClosedError(TransportError):
    """A transport was called after it was closed."""

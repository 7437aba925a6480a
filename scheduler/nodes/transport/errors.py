"""Errors of calls to a transport. Failures that a peer can cause are events instead.

::

    SchedulerError
    └── TransportError
        ├── TransportArgumentError     arrays that differ from their descriptor, or a reused part id
        ├── TransportUnavailableError  an engine that cannot run here; the text says why
        └── TransportClosedError       a call after close
"""

from __future__ import annotations

from ...errors import SchedulerError


class TransportError(SchedulerError):
    """Base class of the transports' errors."""


class TransportArgumentError(TransportError, ValueError):
    """Arrays differ from their descriptor, or a part id is used twice."""


class TransportUnavailableError(TransportError):
    """An engine cannot run on this machine, or its self-test failed."""


class TransportClosedError(TransportError):
    """A transport was called after it was closed."""

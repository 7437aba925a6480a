"""What the scheduler and the engine refuse.

::

    RadixKVError
    └── SchedulerError
        ├── RequestError        a request that is malformed, or a twin of a live one
        ├── ConfigError         sizes that cannot work together
        ├── RoutingError        no node to send a request to, or two of one name
    └── StepOrderError      schedule and update called out of turn

A request that could never fit gets `radixkv.kvcache.RequestTooLargeError`.
"""

from __future__ import annotations

from ..kvcache import RadixKVError


class SchedulerError(RadixKVError):
    """Base of what the scheduler and the engine refuse."""


class RequestError(SchedulerError, ValueError):
    """A request is malformed, or has the id of a live one."""


class ConfigError(SchedulerError, ValueError):
    """Sizes cannot work together."""


class RoutingError(SchedulerError):
    """There is no node to send a request to, or no such node, or two of one name."""


class StepOrderError(SchedulerError):
    """`schedule` and `update` were called out of turn."""

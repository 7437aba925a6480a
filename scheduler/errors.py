"""What the scheduler and the engine refuse.

::

    RadixKVError
    └── SchedulerError
        ├── RequestError        a request that is malformed, or a twin of a live one
        ├── ConfigError         options that cannot be, or sizes that cannot work together
        ├── RoutingError        no node to send a request to, or two of one name
        ├── StepOrderError      schedule and update called out of turn
        ├── EngineClosedError   an engine with a host tier is used after close
        ├── RefusedError        a decode node has no room for a request now
        ├── NodesFailedError    prefill and decode nodes did not do what they were asked
        │   ├── NodesMissingError   too few of them serve
        │   ├── NodeProcessError    the process of one has ended by itself
        │   └── HandoffFailedError  a request came to nothing on those that it was tried on
        └── HandoffsOpenError   the cache is reset while hand-offs hold blocks

A request that could never fit gets `radixkv.kvcache.RequestTooLargeError`.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from ..kvcache import RadixKVError

RefusalReason: TypeAlias = Literal[
    "out of blocks",
    "out of slots",
    "others wait",
    "draining",
    "too large",
    "block size",
    "malformed",
    "version",
]
"""Why a decode node takes a request not over; see `radixkv.scheduler.handoff.Refuse`."""


class SchedulerError(RadixKVError):
    """Base of what the scheduler and the engine refuse."""


class RequestError(SchedulerError, ValueError):
    """A request is malformed, or has the id of a live one."""


class ConfigError(SchedulerError, ValueError):
    """An option cannot be, or sizes cannot work together."""


class RoutingError(SchedulerError):
    """There is no node to send a request to, or no such node, or two of one name."""


class StepOrderError(SchedulerError):
    """`schedule` and `update` were called out of turn."""


class EngineClosedError(SchedulerError):
    """An engine with a host tier was used after it was closed."""


class RefusedError(SchedulerError):
    """A decode node takes a request not now; nothing was changed."""

    def __init__(self, reason: RefusalReason, needed: int, available: int) -> None:
        super().__init__(f"{reason}: {needed} needed, {available} available")
        self.reason: RefusalReason = reason
        self.needed = needed
        self.available = available


class NodesFailedError(SchedulerError):
    """Prefill and decode nodes did not do what they were asked; the same may work another time."""


class NodesMissingError(NodesFailedError):
    """Too few nodes serve: they did not come, or have gone and did not come back."""


class NodeProcessError(NodesFailedError):
    """The process of a node has ended by itself."""


class HandoffFailedError(NodesFailedError):
    """A request came to nothing on all nodes that it was tried on."""


class HandoffsOpenError(SchedulerError):
    """Hand-offs hold blocks that the cache is to forget: drain first; nothing was changed."""

    def __init__(self, num_open: int) -> None:
        super().__init__(f"{num_open} hand-offs hold blocks: drain, and wait until none does")
        self.num_open = num_open

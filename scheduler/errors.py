"""Errors of the schedulers, the engine and the nodes.

::

    RadixKVError
    └── SchedulerError
        ├── RequestError
        ├── ConfigError
        ├── RoutingError
        ├── StepOrderError
        ├── EngineClosedError
        ├── EngineFailedError
        ├── StreamError
        ├── RefusedError
        ├── GroupError
        │   └── CallError
        ├── NodesFailedError
        │   ├── NodesMissingError
        │   ├── NodeProcessError
        │   └── HandoffFailedError
        └── HandoffsOpenError

A request that could never fit raises `radixkv.kvcache.RequestTooLargeError`.
"""

from __future__ import annotations

from collections.abc import Mapping
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
"""Why a decode node refuses a request; see `radixkv.scheduler.handoff.Refuse`."""


class SchedulerError(RadixKVError):
    """Base of the errors of the schedulers, the engine and the nodes."""


class RequestError(SchedulerError, ValueError):
    """A request is malformed, or has the id of an active request."""


class ConfigError(SchedulerError, ValueError):
    """An option is invalid, or sizes do not fit together."""


class RoutingError(SchedulerError):
    """No node can take a request, a node is unknown, or two nodes have the same name."""


class StepOrderError(SchedulerError):
    """`MixedScheduler.schedule` and `MixedScheduler.update` were called in the wrong order."""


class EngineClosedError(SchedulerError):
    """An engine with a host tier, or an `AsyncEngine`, was used after it was closed."""


class EngineFailedError(SchedulerError):
    """The thread of an `AsyncEngine` has ended with an error, which is the cause of this one."""


class StreamError(SchedulerError, RuntimeError):
    """A stream of outputs was used by two tasks at once, or from two event loops."""


class RefusedError(SchedulerError):
    """A decode node refuses a request for now; nothing was changed."""

    def __init__(self, reason: RefusalReason, needed: int, available: int) -> None:
        super().__init__(f"{reason}: {needed} needed, {available} available")
        self.reason: RefusalReason = reason
        self.needed = needed
        self.available = available


class GroupError(SchedulerError):
    """Processes that share a model cannot go on together: one is lost or late, or differs."""


class CallError(GroupError):
    """A process was to execute, or has executed, another call than process 0 has sent."""


class NodesFailedError(SchedulerError):
    """Prefill and decode nodes failed to serve a request; a retry may succeed."""


class NodesMissingError(NodesFailedError):
    """Too few nodes are connected."""


class NodeProcessError(NodesFailedError):
    """The process of a node has exited by itself."""


class HandoffFailedError(NodesFailedError):
    """Requests failed on all nodes that they were tried on.

    Attributes:
        failures: reasons by request id, if several requests were to be completed.
    """

    def __init__(self, message: str, failures: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.failures = dict(failures or {})


class HandoffsOpenError(SchedulerError):
    """Hand-offs hold blocks of the cache that is to be reset; nothing was changed.

    Call ``drain`` first.
    """

    def __init__(self, num_open: int) -> None:
        super().__init__(f"{num_open} hand-offs hold blocks: drain, and wait until none does")
        self.num_open = num_open

"""What commands do with prefill and decode nodes, wherever those are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, Protocol

from ...kvcache.storage import Storage
from ..errors import HandoffFailedError
from ..nodes import NodeStats
from ..request import Request
from .tier_setup import describe_storage


class _Nodes(Protocol):
    """What completes requests."""

    @property
    def failures(self) -> dict[str, str]: ...
    def add_request(self, request: Request) -> None: ...
    def step(self) -> list[Request]: ...
    @property
    def has_work(self) -> bool: ...


def run_requests(
    nodes: _Nodes, requests: Sequence[Request], check: Callable[[], None] = lambda: None
) -> None:
    """Run all requests to their ends, with a look at something else now and then.

    Raises:
        HandoffFailedError: if one comes to nothing.
    """
    for request in requests:
        nodes.add_request(request)
    while nodes.has_work:
        nodes.step()
        check()
    for request_id, reason in nodes.failures.items():
        raise HandoffFailedError(f"prompt {request_id}: {reason}")


def describe(stats: NodeStats, storage: Storage | None = None) -> dict[str, Any]:
    """Return the counts of a node for JSON, with names for its faults."""
    described = asdict(stats)
    faults = stats.transport.faults
    described["transport"]["faults"] = {fault.value: count for fault, count in faults.items()}
    if storage is not None:
        described["storage"] = describe_storage(storage.stats())
    return described

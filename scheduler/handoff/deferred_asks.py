"""ASKs that a decode node answers later, when blocks in flight, or from storage, have arrived."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ...kvcache import Int32Array
from ..request import Request
from .messages import Ask, AttemptKey, NodeId

MAX_DEFERRED: Final = 64
"""Most ASKs that D defers; each holds its prompt."""


@dataclass(slots=True)
class DeferredAsk:
    """An ASK with its sender.

    Attributes:
        heard_at: time of its last copy.
        request: its request, once D has begun to fetch blocks of it from storage.
        fetches_at: when D has begun.
        is_fetching: whether it waits for these blocks.
    """

    peer: NodeId
    ask: Ask
    heard_at: float
    request: Request | None = None
    fetches_at: float = 0.0
    is_fetching: bool = False

    @property
    def key(self) -> AttemptKey:
        """The attempt."""
        return self.ask.header.key


class DeferredAsks:
    """The deferred ASKs in order of arrival, at most one per request."""

    def __init__(self) -> None:
        self._by_request: dict[str, DeferredAsk] = {}

    def has_room(self, request_id: str) -> bool:
        """Whether an ASK of a request can be deferred, or stay so."""
        return request_id in self._by_request or len(self._by_request) < MAX_DEFERRED

    def add(self, deferred: DeferredAsk) -> None:
        """Defer an ASK; it takes the place of an older one of its request."""
        self._by_request[deferred.key.request_id] = deferred

    def of(self, request_id: str) -> DeferredAsk | None:
        """Return the deferred ASK of a request."""
        return self._by_request.get(request_id)

    def remove(self, request_id: str) -> None:
        """Forget the deferred ASK of a request, if there is one."""
        self._by_request.pop(request_id, None)

    def all(self) -> list[DeferredAsk]:
        """Return all deferred ASKs."""
        return list(self._by_request.values())


def num_shared_blocks(one: Int32Array, other: Int32Array, block_size: int) -> int:
    """Count the whole blocks that two prompts share from their start.

    Returns 0 if they are less than half of the longer prompt: waiting for them would mean waiting
    mostly for blocks of no use.
    """
    length = min(len(one), len(other))
    same = one[:length] == other[:length]
    num_same = length if same.all() else int(same.argmin())
    num_shared = num_same // block_size
    return num_shared if 2 * num_shared * block_size >= max(len(one), len(other)) else 0

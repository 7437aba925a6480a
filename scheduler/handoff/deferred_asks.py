"""ASKs that a decode node answers later: what they would send is on its way for another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ...kvcache import Int32Array
from .messages import (
    Ask,
    AttemptKey,
    NodeId,
)

MAX_DEFERRED: Final = 64
"""D holds no more ASKs, each with its prompt."""


@dataclass(slots=True)
class DeferredAsk:
    """An ASK, from whom, and when it was said last."""

    peer: NodeId
    ask: Ask
    heard_at: float

    @property
    def key(self) -> AttemptKey:
        """Names the attempt."""
        return self.ask.header.key


class DeferredAsks:
    """One of each request at most, in the order they came; who asks no more is forgotten."""

    def __init__(self) -> None:
        self._by_request: dict[str, DeferredAsk] = {}

    @property
    def has_room(self) -> bool:
        """Whether one more can be held."""
        return len(self._by_request) < MAX_DEFERRED

    def hold(self, held: DeferredAsk) -> None:
        """Hold an ASK, in the place of an older one of its request."""
        self._by_request[held.key.request_id] = held

    def of(self, request_id: str) -> DeferredAsk | None:
        """Return that of a request."""
        return self._by_request.get(request_id)

    def end(self, peer: NodeId, key: AttemptKey) -> None:
        """Forget an attempt, as its prefill node has given it up."""
        held = self.of(key.request_id)
        if held is not None and (held.peer, held.key) == (peer, key):
            self.drop(key.request_id)

    def drop(self, request_id: str) -> None:
        """Forget that of a request, if there is one."""
        self._by_request.pop(request_id, None)

    def all(self) -> list[DeferredAsk]:
        """Return all."""
        return list(self._by_request.values())


def num_shared_blocks(one: Int32Array, other: Int32Array, block_size: int) -> int:
    """Count the whole blocks at the header of two prompts that are the same.

    0 if they are less than half of the longer prompt: one that waits for them would wait for much
    that is of no use to it.
    """
    length = min(len(one), len(other))
    same = one[:length] == other[:length]
    num_same = length if same.all() else int(same.argmin())
    num_shared = num_same // block_size
    return num_shared if 2 * num_shared * block_size >= max(len(one), len(other)) else 0

"""`serve_nodes`: prefill and decode nodes with the interface of an `AsyncEngine`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Final, Protocol, cast

from ..engine import Engine
from ..handoff.gateway_messages import MAX_NEW_TOKENS
from ..request import Request
from ..text import TextTokenizer
from .async_engine import AsyncEngine

_POLL_S: Final = 0.02
"""How often nodes are heard without open requests; less than their silence by far."""


class Nodes(Protocol):
    """What `RemoteNodes` and `Disaggregated` have in common."""

    @property
    def failures(self) -> dict[str, str]:
        """Reasons of failed requests by id."""

    @property
    def advanced(self) -> Sequence[Request]:
        """Requests that got tokens in the last step."""

    @property
    def has_work(self) -> bool:
        """Whether any request has not ended."""

    def add_request(self, request: Request) -> None:
        """Add a request."""

    def abort(self, request_id: str) -> bool:
        """End a request in any state; return False if no open request has this id."""

    def step(self) -> list[Request]:
        """Process what has happened; return the requests that ended."""


def serve_nodes(
    nodes: Nodes,
    close: Callable[[], object],
    tokenizer: TextTokenizer | None = None,
    *,
    eos_token_ids: Collection[int] = (),
    supervise: Callable[[], object] | None = None,
) -> AsyncEngine:
    """Return an `AsyncEngine` whose requests are served by nodes.

    Tokens come as the decode nodes generate them if the nodes were made with ``stream``, otherwise
    all together. A request that fails on all nodes raises `HandoffFailedError`; so does one of
    which another attempt, after the loss of a node, generates other tokens than were told.
    There is no `Engine`: observers have no use here, and what `AsyncEngine.call` passes to a
    function is not one.

    Args:
        nodes: the nodes, which only the thread of the result may use from now on.
        close: called on that thread at its end.
        tokenizer, eos_token_ids: see `AsyncEngine`.
        supervise: called on that thread before each step, also without requests.
    """
    front = cast(Engine, _Front(nodes, close, supervise))  # has what the thread uses of an engine
    return AsyncEngine(
        front,
        tokenizer,
        eos_token_ids=eos_token_ids,
        poll_s=_POLL_S,
        failures=nodes.failures,
        max_new_tokens=MAX_NEW_TOKENS,
    )


class _Front:
    """Nodes as the thread of an engine uses them."""

    def __init__(
        self, nodes: Nodes, close: Callable[[], object], supervise: Callable[[], object] | None
    ) -> None:
        self._nodes = nodes
        self._close = close
        self._supervise = supervise
        self.add_request = nodes.add_request
        self.abort = nodes.abort

    def step(self) -> list[Request]:
        """Process what has happened; return the requests that ended."""
        if self._supervise is not None:
            self._supervise()
        return self._nodes.step()

    @property
    def scheduler(self) -> _Front:
        """Itself: it has the running requests."""
        return self

    @property
    def running(self) -> Sequence[Request]:
        """Requests with new tokens."""
        return self._nodes.advanced

    @property
    def advanced(self) -> Sequence[Request]:
        """Requests with new tokens."""
        return self._nodes.advanced

    @property
    def has_work(self) -> bool:
        """Whether any request has not ended."""
        return self._nodes.has_work

    def close(self, timeout_s: float) -> bool:
        """Close what belongs to the nodes; their processes end in their own time."""
        self._close()
        return True

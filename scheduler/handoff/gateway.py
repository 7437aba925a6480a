"""Where requests come in: which nodes an attempt goes to, and what becomes of each request."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import count
from math import inf

from ...kvcache import RequestTooLargeError
from ..errors import RequestError, RoutingError
from ..request import Request, RequestStatus
from .messages import (
    AttemptKey,
    Hits,
    NodeId,
)
from .retries import (
    Answer,
    Begin,
    Cancel,
    RequestRetrier,
)
from .router import Route, Router


@dataclass(frozen=True, slots=True)
class RunAttempt:
    """Have a prefill node begin an attempt, and hand it over to a decode node.

    Attributes:
        request: what was asked for, under the key's name.
    """

    key: AttemptKey
    request: Request
    route: Route


def hits_of(request: Request) -> Hits:
    """Return what hit of a request that has been computed."""
    return Hits(request.num_hit_tokens, request.num_host_hit_tokens, request.num_storage_hit_tokens)


class Gateway:
    """A gateway with its router: requests and reports of nodes in, what nodes are to do out.

    It does no I/O. Carry out `take_actions` after every call.

    Attributes:
        failures: why requests came to nothing, by id; those have the status ABORTED. A request
            with the id of an earlier one takes its place.
    """

    def __init__(
        self,
        block_size: int,
        *,
        max_attempts: int = 3,
        backoff_s: float = 0.05,
        request_s: float = inf,
        epoch: int = 0,
    ) -> None:
        """Make a gateway without nodes.

        Args:
            block_size: of all nodes.
            max_attempts, backoff_s, request_s: of `RequestRetrier`; no limit of time by default.
            epoch: another in each life of a gateway whose nodes live on: what they still do for an
                earlier one is no answer for this.
        """
        self.failures: dict[str, str] = {}
        self._retrier = RequestRetrier(
            max_attempts=max_attempts, backoff_s=backoff_s, request_s=request_s
        )
        self._router = Router(block_size, prefill={}, decode={})
        self._epoch = epoch
        self._serials = count()
        self._live: dict[str, Request] = {}  # by a name that is never used again
        self._names: dict[str, str] = {}  # of those, by request id
        self._routes: dict[AttemptKey, Route] = {}
        self._refused_by: dict[str, NodeId] = {}  # which decode node had no room last
        self._actions: list[RunAttempt | Cancel] = []
        self._ended: list[Request] = []

    @property
    def num_open(self) -> int:
        """Requests without an answer, or whose end has not been handed out."""
        return len(self._live) + len(self._ended)

    @property
    def loads(self) -> dict[NodeId, int]:
        """The blocks that are thought to be under way on each node; see `Router`."""
        return self._router.loads()

    def take_actions(self) -> list[RunAttempt | Cancel]:
        """Hand out what nodes are to do since the last call, in order."""
        self._follow()
        actions, self._actions = self._actions, []
        return actions

    def take_ended(self) -> list[Request]:
        """Hand out the requests that have ended since the last call, but for those aborted."""
        self._follow()
        ended, self._ended = self._ended, []
        return ended

    # What clients say

    def add_request(self, request: Request, now: float) -> None:
        """Take a request in.

        Raises:
            RequestError: for one that was added before, or the id of a live request.
        """
        request_id = request.request_id
        if request_id in self._names:
            raise RequestError(f"request {request_id!r} is live already")
        if request.status is not RequestStatus.WAITING or request.output_tokens:
            raise RequestError(f"request {request_id!r} was added before")
        name = self._names[request_id] = f"{request_id} #{self._epoch:x}.{next(self._serials)}"
        self._live[name] = request
        self.failures.pop(request_id, None)
        self._retrier.tick(now)
        self._retrier.submit(name)

    def abort(self, request_id: str) -> bool:
        """End a request in any state; False if no live one has this id."""
        name = self._names.get(request_id)
        if name is None:
            return False
        request = self._live[name]
        self._retrier.cancel(name, "aborted")
        self._follow()
        self._ended.remove(request)  # who aborts it knows
        return True

    # What is known of nodes

    def add_prefill(self, peer: NodeId, num_blocks: int) -> None:
        """Send requests to a prefill node, too; see `Router.add_prefill`."""
        self._router.add_prefill(peer, num_blocks)

    def add_decode(self, peer: NodeId, num_blocks: int) -> None:
        """Send requests to a decode node, too."""
        self._router.add_decode(peer, num_blocks)

    def lose(self, peer: NodeId) -> None:
        """A node is gone: what it had, others compute again.

        Raises:
            RoutingError: if it is not there.
        """
        self._router.remove(peer)
        for key, route in list(self._routes.items()):
            if route.prefill == peer:
                self._retrier.prefill_lost([key])
            elif route.decode == peer:
                self._retrier.decode_lost([key])
        self._follow()

    def forget_cached(self, keep: Collection[bytes]) -> None:
        """All nodes have forgotten their KV, but in the namespaces that are kept."""
        self._router.forget_cached(keep)

    # What nodes, and the clock, say

    def started(self, key: AttemptKey) -> None:
        """D decodes an attempt."""
        self._router.computed(key)
        self._retrier.started(key)

    def finished(
        self, key: AttemptKey, tokens: Sequence[int], hits: Hits, num_preemptions: int
    ) -> None:
        """D has generated all of an attempt's tokens; the counts go to the request."""
        request = self._live.get(key.request_id)
        if request is not None:
            request.num_hit_tokens = hits.device
            request.num_host_hit_tokens = hits.host
            request.num_storage_hit_tokens = hits.storage
            request.num_preemptions = num_preemptions
            written = [*request.prompt.tolist(), *tokens[:-1]]
            self._router.finished(key, written, request.namespace)
        self._retrier.finished(key, tuple(tokens))

    def prefill_failed(
        self, key: AttemptKey, reason: str, *, is_final: bool = False, is_busy: bool = False
    ) -> None:
        """P has given an attempt up; one that found no room is tried on another decode node."""
        if is_busy and key in self._routes:
            self._refused_by[key.request_id] = self._routes[key].decode
        self._retrier.prefill_failed(key, reason, is_final=is_final, is_busy=is_busy)

    def decode_failed(self, key: AttemptKey, reason: str) -> None:
        """D has stopped an attempt that it had started."""
        self._retrier.decode_failed(key, reason)

    def tick(self, now: float) -> None:
        """Let time pass."""
        self._retrier.tick(now)

    # What follows

    def _follow(self) -> None:
        """Do what the gateway wants done."""
        while actions := self._retrier.take_actions():
            for action in actions:
                match action:
                    case Begin(key):
                        self._begin(key)
                    case Cancel(key):
                        self._end(key)
                        self._actions.append(action)
                    case Answer(name, tokens, reason):
                        for key in [each for each in self._routes if each.request_id == name]:
                            self._end(key)
                        self._refused_by.pop(name, None)
                        request = self._live.pop(name)
                        # Nodes say whom they mean by the name that they know.
                        self._answer(request, tokens, reason.replace(name, request.request_id))

    def _end(self, key: AttemptKey) -> None:
        self._routes.pop(key, None)
        self._router.finished(key)

    def _begin(self, key: AttemptKey) -> None:
        asked = self._live[key.request_id]
        request = Request(
            key.request_id,
            asked.prompt,
            asked.max_new_tokens,
            priority=asked.priority,
            sampling=asked.sampling,
            stop_token_ids=tuple(asked.stop_token_ids),
            namespace=asked.namespace,
        )
        try:
            busy = [self._refused_by[key.request_id]] if key.request_id in self._refused_by else []
            route = self._router.route(key, request.prompt, request.namespace, avoid=busy)
        except RequestTooLargeError as large:
            self._retrier.prefill_failed(key, str(large), is_final=True)
        except RoutingError as no_node:  # one may come
            self._retrier.prefill_failed(key, str(no_node), is_busy=True)
        else:
            self._routes[key] = route
            self._actions.append(RunAttempt(key, request, route))

    def _answer(self, request: Request, tokens: Sequence[int] | None, reason: str) -> None:
        """End a request as one engine would."""
        del self._names[request.request_id]
        if tokens is None:
            self.failures[request.request_id] = reason
            request.status, request.finish_reason = RequestStatus.ABORTED, "abort"
        else:
            request.status = RequestStatus.FINISHED
            for token in tokens:
                request.finish_reason = request.append(token)
        self._ended.append(request)

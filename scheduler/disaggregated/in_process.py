"""Prefill and decode nodes in one process, with the interface of one engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import count
from typing import Final

from ...kvcache import RequestTooLargeError
from ..errors import RequestError
from ..handoff import (
    Answer,
    Begin,
    Cancel,
    Failed,
    Finished,
    FrontDesk,
    Key,
    PeerId,
    Started,
    Stopped,
)
from ..request import Request, RequestStatus
from ..router import Route, Router
from .decode_engine import DecodeEngine
from .node_engine import NodeStats
from .prefill_engine import PrefillEngine

_PAUSE_S: Final = 0.0005
"""For nodes that all wait for a copy, or for time to pass."""


class Disaggregated:
    """Serves requests with prefill nodes and decode nodes, as `Engine` does with one.

    A `Router` says to which nodes a request goes. One thread may use it.

    Attributes:
        prefill, decode: the nodes, by name.
        failures: why requests came to nothing, by id; those have the status ABORTED.
    """

    def __init__(
        self,
        prefill: Sequence[PrefillEngine],
        decode: Sequence[DecodeEngine],
        *,
        max_attempts: int = 3,
        backoff_s: float = 0.05,
        request_s: float = 600.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Join nodes, whose transports reach each other.

        Args:
            prefill, decode: nodes that nobody else drives, at least one of each.
            max_attempts, backoff_s, request_s: of `FrontDesk`.
            clock: never goes back, in seconds.
        """
        self.prefill = {f"prefill-{number}": node for number, node in enumerate(prefill)}
        self.decode = {f"decode-{number}": node for number, node in enumerate(decode)}
        self.failures: dict[str, str] = {}
        self._clock = clock
        self._front = FrontDesk(max_attempts=max_attempts, backoff_s=backoff_s, request_s=request_s)
        self._serials = count()
        self._live: dict[str, Request] = {}  # by a name that is never used again
        self._routes: dict[Key, Route] = {}
        self._router = Router(
            prefill[0].manager.block_size,
            prefill={peer: node.manager.num_blocks for peer, node in self.prefill.items()},
            decode={peer: node.manager.num_blocks for peer, node in self.decode.items()},
        )
        self._ended: list[Request] = []

    def add_request(self, request: Request) -> None:
        """Take a request in.

        Raises:
            RequestError: for a token outside the vocabulary, a request longer than a node's
                max_model_len, one that was added before, or the id of a live request.
        """
        request_id = request.request_id
        if any(each.request_id == request_id for each in self._live.values()):
            raise RequestError(f"request {request_id!r} is live already")
        if request.status is not RequestStatus.WAITING or request.output_tokens:
            raise RequestError(f"request {request_id!r} was added before")
        for node in self._nodes():
            node.check_request(request)
        name = f"{request_id} #{next(self._serials)}"
        self._live[name] = request
        self._front.tick(self._clock())
        self._front.submit(name)

    def abort(self, request_id: str) -> bool:
        """End a request in any state; False if no live one has this id."""
        for name, request in self._live.items():
            if request.request_id == request_id:
                self._front.cancel(name, "aborted")
                self._follow()
                return True
        return False

    @property
    def has_work(self) -> bool:
        """Whether any request has yet to end, or a node holds blocks for one."""
        return bool(self._live) or any(node.scheduler.num_open for node in self._nodes())

    def step(self) -> list[Request]:
        """Let each node run one step at most; return the requests that ended."""
        now = self._clock()
        self._front.tick(now)
        self._follow()
        was_busy = False
        for peer in (*self.prefill, *self.decode):
            was_busy |= self._node(peer).poll(now)
            self._pass_on(peer)
        if not was_busy and self.has_work:
            time.sleep(_PAUSE_S)
        ended, self._ended = self._ended, []
        return ended

    def run(self) -> list[Request]:
        """Run until there is no work; return the requests that ended, in order of their ends."""
        ended = []
        while self.has_work:
            ended += self.step()
        return ended

    def replace(self, peer: PeerId, node: PrefillEngine | DecodeEngine) -> None:
        """Put another node in the place of one that has ended; its epoch is higher.

        What the old one had, others compute again.
        """
        self._pass_on(peer)
        self._router.remove(peer)
        if isinstance(node, PrefillEngine):
            self.prefill[peer] = node
            self._router.add_prefill(peer, node.manager.num_blocks)
        else:
            self.decode[peer] = node
            self._router.add_decode(peer, node.manager.num_blocks)
        for key, route in list(self._routes.items()):
            if route.prefill == peer:
                self._front.prefill_failed(key, f"{peer} was lost")
            elif route.decode == peer:
                self._front.decode_failed(key, f"{peer} was lost")
        self._follow()

    def close(self, *, timeout_s: float = 30.0) -> bool:
        """Stop transports and threads; see `Engine.close`."""
        return all([node.close(timeout_s=timeout_s) for node in self._nodes()])

    def stats(self) -> dict[PeerId, NodeStats]:
        """Return what each node has done so far."""
        return {peer: self._node(peer).stats() for peer in (*self.prefill, *self.decode)}

    def _nodes(self) -> list[PrefillEngine | DecodeEngine]:
        return [*self.prefill.values(), *self.decode.values()]

    def _node(self, peer: PeerId) -> PrefillEngine | DecodeEngine:
        return self.prefill[peer] if peer in self.prefill else self.decode[peer]

    def _pass_on(self, peer: PeerId) -> None:
        """Deliver what a node wants to say."""
        node = self._node(peer)
        for letter in node.take_letters():
            self._node(letter.peer).receive(letter._replace(peer=peer))
        for report in node.take_reports():
            match report:
                case Failed(key, reason, is_final, is_busy):
                    self._front.prefill_failed(key, reason, is_final=is_final, is_busy=is_busy)
                case Started(key):
                    self._router.computed(key)
                    self._front.started(key)
                case Finished(key, request):
                    self._router.finished(key, request.tokens[:-1], request.namespace)
                    self._copy_counts(request)
                    self._front.finished(key, tuple(request.output_tokens))
                case Stopped(key, reason):
                    self._front.decode_failed(key, reason)
        self._follow()

    def _follow(self) -> None:
        """Do what the front desk wants done."""
        for action in self._front.take_actions():
            match action:
                case Begin(key):
                    self._begin(key)
                case Cancel(key):
                    self._end(key)
                    for peer in (*self.prefill, *self.decode):  # it may have been known before
                        self._node(peer).give_up(key, "cancelled")
                case Answer(name, tokens, reason):
                    for key in [each for each in self._routes if each[0] == name]:
                        self._end(key)
                    self._answer(self._live.pop(name), tokens, reason)

    def _end(self, key: Key) -> None:
        self._routes.pop(key, None)
        self._router.finished(key)

    def _begin(self, key: Key) -> None:
        name, attempt = key
        asked = self._live[name]
        request = Request(
            name,
            asked.prompt,
            asked.max_new_tokens,
            priority=asked.priority,
            sampling=asked.sampling,
            stop_token_ids=tuple(asked.stop_token_ids),
            namespace=asked.namespace,
        )
        try:
            route = self._routes[key] = self._router.route(key, request.prompt, request.namespace)
            self.prefill[route.prefill].begin(request, route.decode, attempt)
        except RequestTooLargeError as large:
            self._front.prefill_failed(key, str(large), is_final=True)
            self._follow()

    def _copy_counts(self, request: Request) -> None:
        asked = self._live.get(request.request_id)
        if asked is not None:
            asked.num_hit_tokens = request.num_hit_tokens
            asked.num_host_hit_tokens = request.num_host_hit_tokens
            asked.num_storage_hit_tokens = request.num_storage_hit_tokens
            asked.num_preemptions = request.num_preemptions

    def _answer(self, request: Request, tokens: Sequence[int] | None, reason: str) -> None:
        """End a request as one engine would."""
        if tokens is None:
            self.failures[request.request_id] = reason
            request.status, request.finish_reason = RequestStatus.ABORTED, "abort"
        else:
            request.status = RequestStatus.FINISHED
            for token in tokens:
                request.finish_reason = request.append(token)
        self._ended.append(request)

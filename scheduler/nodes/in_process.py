"""Prefill and decode nodes in one process, with the interface of one engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from math import inf
from typing import Final

from ...kvcache import RequestTooLargeError
from ...kvcache.cleanup import give_back
from ..errors import ConfigError, RequestError
from ..gateway.gateway import Gateway, RunAttempt
from ..gateway.remote_node import free_blocks, short_name
from ..gateway.retries import Cancel
from ..gateway.router import CacheSize
from ..handoff import (
    AttemptKey,
    DecodeFailed,
    Finished,
    Hits,
    NodeId,
    Preempted,
    PrefillFailed,
    Started,
)
from ..models import Params
from ..request import Request, RequestStatus
from .decode_node import DecodeEngine
from .node import NodeStats
from .prefill_node import PrefillEngine

_PAUSE_S: Final = 0.0005
"""Pause when no node has anything to do but wait."""

_TURNS_PER_SILENCE: Final = 4
"""Turns of all nodes, at least, before the silence of a peer counts: the others have no turn while
one of them runs a long step."""


class Disaggregated:
    """Serves requests with prefill and decode nodes; its interface is that of `Engine`.

    A `Router` assigns requests to nodes. For use by one thread.

    Attributes:
        prefill, decode: the nodes, by name.
    """

    def __init__(
        self,
        prefill: Sequence[PrefillEngine],
        decode: Sequence[DecodeEngine],
        *,
        max_attempts: int = 3,
        backoff_s: float = 0.05,
        request_s: float = inf,
        stream: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Connect nodes whose transports reach each other.

        Args:
            prefill, decode: at least one node each, driven only by this object.
            max_attempts, backoff_s, request_s: see `RequestRetrier`; no time limit by default.
            stream: whether requests get their tokens as they come, for `advanced`.
            clock: a monotonic clock, in seconds.

        Raises:
            ConfigError: for nodes of different models or dtypes, with both.
        """
        self._is_streaming = stream
        self._decoding: dict[AttemptKey, Request] = {}  # as the decode nodes have them
        self._preempted: dict[AttemptKey, Request] = {}  # those that may move
        self._advanced: Sequence[Request] = ()
        self.prefill = {f"prefill-{number}": node for number, node in enumerate(prefill)}
        self.decode = {f"decode-{number}": node for number, node in enumerate(decode)}
        for peer in (*self.prefill, *self.decode):
            self._check_model(peer, self._node(peer))
        self._clock = clock
        self._now = self._time_of_nodes = clock()
        self._is_resetting = False
        self._gateway = Gateway(
            max_attempts=max_attempts,
            backoff_s=backoff_s,
            request_s=request_s,
        )
        for peer in (*self.prefill, *self.decode):
            self._register(peer)

    @property
    def failures(self) -> dict[str, str]:
        """Reasons of failed requests by id; these requests have the status ABORTED."""
        return self._gateway.failures

    @property
    def num_moved(self) -> int:
        """Number of times that a preempted request has moved to another decode node."""
        return self._gateway.num_moved

    @property
    def advanced(self) -> Sequence[Request]:
        """Requests that got tokens in the last step; none without ``stream``."""
        return self._advanced

    def add_request(self, request: Request) -> None:
        """Add a request.

        Raises:
            RequestError: for a token outside the vocabulary, a request longer than a node's
                max_model_len, a request that was added before, or the id of an open request.
            EngineClosedError: after close, with a host tier.
        """
        for node in self._nodes():
            node.check_request(request)
        self._gateway.add_request(request, self._clock())

    def abort(self, request_id: str) -> bool:
        """End a request in any state; return False if no open request has this id."""
        was_open = self._gateway.abort(request_id)
        self._act()
        return was_open

    @property
    def has_work(self) -> bool:
        """Whether any request is open, or a node holds blocks for one."""
        return bool(self._gateway.num_open) or any(
            node.scheduler.num_open for node in self._nodes()
        )

    def step(self) -> list[Request]:
        """Let each node run at most one step; return the requests that have ended."""
        self._advance()
        for key, request in list(self._decoding.items()):
            num_heard = self._gateway.num_heard(key)
            if num_heard is None:
                del self._decoding[key]
            elif num_heard < len(request.output_tokens):
                records = request.output_logprobs[num_heard:]
                self._gateway.progressed(key, request.output_tokens[num_heard:], records)
        self._advanced = self._gateway.take_advanced()
        return self._gateway.take_ended()

    def _advance(self) -> None:
        now = self._clock()
        longest_s = min(node.timing.silence_s for node in self._nodes()) / _TURNS_PER_SILENCE
        self._time_of_nodes += min(now - self._now, longest_s)
        self._now = now
        self._gateway.tick(now)
        self._act()
        was_busy = False
        for peer in (*self.prefill, *self.decode):
            node = self._node(peer)
            was_busy |= node.poll(self._time_of_nodes) | node.step()
            self._deliver(peer)
        self._offer_preempted()
        if not was_busy and self.has_work:
            time.sleep(_PAUSE_S)

    def run(self) -> list[Request]:
        """Run until there is no work; return the requests in the order in which they ended."""
        ended = []
        while self.has_work:
            ended += self.step()
        return ended

    def reset_cache(
        self,
        keep: Collection[bytes] = (),
        *,
        params: Params | None = None,
        weights_revision: str = "",
    ) -> None:
        """Forget the KV of all nodes, and optionally switch to other weights.

        Hand-offs in flight are aborted and repeated later, which does not count as an attempt. The
        call runs decode steps until no node holds blocks of a hand-off, at the latest until their
        deadlines. Then running requests continue with the new weights. If that is interrupted,
        nothing is reset, and the hand-offs are repeated; an interrupt after it may leave some nodes
        with the old KV and weights, and the others with the new.

        Args:
            keep: namespaces whose published KV stays.
            params: new weights of the same shapes; None keeps the current ones.
            weights_revision: name of the new weights, for nodes and storage; see
                `Engine.reset_cache`.

        Raises:
            ConfigError: for weights of other shapes, or without a new name. Nothing changes.
        """
        nodes = self._nodes()
        for node in nodes:
            node.check_reset(params, weights_revision)
        self._is_resetting = True
        try:
            try:
                for node in nodes:
                    node.scheduler.drain("the cache is reset")
                while any(node.num_open_handoffs for node in nodes):
                    self._advance()
            except BaseException:
                give_back(*[node.scheduler.resume for node in nodes])
                raise
            for node in nodes:
                node.reset_cache(keep, params=params, weights_revision=weights_revision)
            self._gateway.forget_cached(keep)
        finally:
            self._is_resetting = False

    def replace(self, peer: NodeId, node: PrefillEngine | DecodeEngine) -> None:
        """Replace a node that has ended by one with a higher epoch.

        Requests of the old node are computed again.

        Raises:
            ConfigError: for a node of another model or dtype. Nothing changes.
        """
        self._check_model(peer, node)
        self._deliver(peer)
        if isinstance(node, PrefillEngine):
            self.prefill[peer] = node
        else:
            self.decode[peer] = node
        self._gateway.remove_node(peer)
        self._register(peer)
        self._act()

    def close(self, *, timeout_s: float = 30.0) -> bool:
        """Stop transports and threads; see `Engine.close`."""
        return all([node.close(timeout_s=timeout_s) for node in self._nodes()])

    def stats(self) -> dict[NodeId, NodeStats]:
        """Return the statistics of each node."""
        return {peer: self._node(peer).stats() for peer in (*self.prefill, *self.decode)}

    def _nodes(self) -> list[PrefillEngine | DecodeEngine]:
        return [*self.prefill.values(), *self.decode.values()]

    def _node(self, peer: NodeId) -> PrefillEngine | DecodeEngine:
        return self.prefill[peer] if peer in self.prefill else self.decode[peer]

    def _check_model(self, peer: NodeId, node: PrefillEngine | DecodeEngine) -> None:
        """Reject a node that cannot hand over to, or take over from, the others."""
        for other in (*self.prefill, *self.decode):
            names = [short_name(each.model_name) for each in (node, self._node(other))]
            if other != peer and names[0] != names[1]:
                raise ConfigError(
                    f"all nodes need the same model and dtype: that of {peer} is {names[0]}, but "
                    f"that of {other} is {names[1]}"
                )

    def _register(self, peer: NodeId) -> None:
        manager = self._node(peer).manager
        size = CacheSize(manager.num_blocks, manager.block_size)
        if peer in self.prefill:
            self._gateway.add_prefill(peer, size)
        else:
            self._gateway.add_decode(peer, size)

    def _deliver(self, peer: NodeId) -> None:
        """Deliver a node's messages to other nodes, and its reports to the gateway."""
        node = self._node(peer)
        for message in node.take_messages():
            self._node(message.peer).receive(message._replace(peer=peer))
        for report in node.take_reports():
            match report:
                case PrefillFailed(key, reason, is_final, is_busy, is_lost):
                    is_busy |= self._is_resetting
                    self._gateway.prefill_failed(
                        key, reason, is_final=is_final, is_busy=is_busy, is_lost=is_lost
                    )
                case Started(key, attempt):
                    self._gateway.started(key)
                    if self._is_streaming:
                        self._decoding[key] = attempt
                case Preempted(key, request):
                    self._preempted[key] = request
                case Finished(key, request):
                    counts = Hits.of(request), request.num_preemptions
                    tokens, records = request.output_tokens, request.output_logprobs
                    self._gateway.finished(key, tokens, *counts, records)
                case DecodeFailed(key, reason):
                    self._gateway.decode_failed(key, reason)
        self._act()

    def _offer_preempted(self) -> None:
        """Let preempted requests move to decode nodes that have room."""
        for peer, node in self.decode.items() if self._preempted else ():
            self._gateway.set_free(peer, free_blocks(node.manager.num_blocks, node.load()))
        for key, request in list(self._preempted.items()):
            is_open = self._gateway.num_heard(key) is not None  # else its node was replaced
            if not is_open or request.status is not RequestStatus.PREEMPTED:
                del self._preempted[key]
                continue
            counts = Hits.of(request), request.num_preemptions
            tokens, records = request.output_tokens, request.output_logprobs
            self._gateway.preempted(key, tokens, *counts, records)
            self._act()

    def _act(self) -> None:
        """Carry out the gateway's actions."""
        while actions := self._gateway.take_actions():
            for action in actions:
                match action:
                    case RunAttempt(key, request, route):
                        try:
                            self.prefill[route.prefill].begin(request, route.decode, key.attempt)
                        except (RequestError, RequestTooLargeError) as error:
                            self._gateway.prefill_failed(key, str(error), is_final=True)
                    case Cancel(key):
                        for node in self._nodes():  # an earlier node of this name may have known it
                            node.give_up(key, "cancelled")

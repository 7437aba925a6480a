"""Prefill and decode nodes in one process, with the interface of one engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from math import inf
from typing import Final

from ...kvcache import RequestTooLargeError
from ..handoff import (
    Failed,
    Finished,
    NodeId,
    Started,
    Stopped,
)
from ..handoff.gateway import (
    Gateway,
    RunAttempt,
    hits_of,
)
from ..handoff.retries import Cancel
from ..models import Params
from ..request import Request
from .decode_node import DecodeEngine
from .node import NodeStats
from .prefill_node import PrefillEngine

_PAUSE_S: Final = 0.0005
"""For nodes that all wait for a copy, or for time to pass."""


class Disaggregated:
    """Serves requests with prefill nodes and decode nodes, as `Engine` does with one.

    A `Router` says to which nodes a request goes. One thread may use it.

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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Join nodes, whose transports reach each other.

        Args:
            prefill, decode: nodes that nobody else drives, at least one of each.
            max_attempts, backoff_s, request_s: of `RequestRetrier`; no limit of time by default.
            clock: never goes back, in seconds.
        """
        self.prefill = {f"prefill-{number}": node for number, node in enumerate(prefill)}
        self.decode = {f"decode-{number}": node for number, node in enumerate(decode)}
        self._clock = clock
        self._is_resetting = False
        self._gateway = Gateway(
            prefill[0].manager.block_size,
            max_attempts=max_attempts,
            backoff_s=backoff_s,
            request_s=request_s,
        )
        for peer in (*self.prefill, *self.decode):
            self._join(peer)

    @property
    def failures(self) -> dict[str, str]:
        """Why requests came to nothing, by id; those have the status ABORTED."""
        return self._gateway.failures

    def add_request(self, request: Request) -> None:
        """Take a request in.

        Raises:
            RequestError: for a token outside the vocabulary, a request longer than a node's
                max_model_len, one that was added before, or the id of a live request.
            EngineClosedError: after close, with a host tier.
        """
        for node in self._nodes():
            node.check_request(request)
        self._gateway.add_request(request, self._clock())

    def abort(self, request_id: str) -> bool:
        """End a request in any state; False if no live one has this id."""
        is_live = self._gateway.abort(request_id)
        self._follow()
        return is_live

    @property
    def has_work(self) -> bool:
        """Whether any request has yet to end, or a node holds blocks for one."""
        return bool(self._gateway.num_open) or any(
            node.scheduler.num_open for node in self._nodes()
        )

    def step(self) -> list[Request]:
        """Let each node run one step at most; return the requests that ended since the last."""
        self._advance()
        return self._gateway.take_ended()

    def _advance(self) -> None:
        now = self._clock()
        self._gateway.tick(now)
        self._follow()
        was_busy = False
        for peer in (*self.prefill, *self.decode):
            was_busy |= self._node(peer).poll(now)
            self._pass_on(peer)
        if not was_busy and self.has_work:
            time.sleep(_PAUSE_S)

    def run(self) -> list[Request]:
        """Run until there is no work; return the requests that ended, in order of their ends."""
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
        """Forget the KV of all nodes, and go on with other weights, if some are given.

        What is being handed over is given up, and handed over anew; that counts as no attempt. It
        runs steps, for what decodes, until no node holds blocks of a hand-off: at the latest when
        their deadlines end. Then what decodes goes on by the new weights.

        Args:
            keep: namespaces whose published KV stays.
            params: other weights of the same shapes; None: those of now.
            weights_revision: what they are called, by nodes and in storage; see
                `Engine.reset_cache`.

        Raises:
            ConfigError: for weights of other shapes, or without a name or under that of those of
                now. Nothing is changed.
        """
        nodes = self._nodes()
        for node in nodes:
            node.check_reset(params, weights_revision)
        self._is_resetting = True
        for node in nodes:
            node.scheduler.drain("the cache is reset")
        while any(node.num_handed_over for node in nodes):
            self._advance()
        for node in nodes:
            node.reset_cache(keep, params=params, weights_revision=weights_revision)
        self._gateway.forget_cached(keep)
        self._is_resetting = False

    def replace(self, peer: NodeId, node: PrefillEngine | DecodeEngine) -> None:
        """Put another node in the place of one that has ended; its epoch is higher.

        What the old one had, others compute again.
        """
        self._pass_on(peer)
        if isinstance(node, PrefillEngine):
            self.prefill[peer] = node
        else:
            self.decode[peer] = node
        self._gateway.lose(peer)
        self._join(peer)
        self._follow()

    def close(self, *, timeout_s: float = 30.0) -> bool:
        """Stop transports and threads; see `Engine.close`."""
        return all([node.close(timeout_s=timeout_s) for node in self._nodes()])

    def stats(self) -> dict[NodeId, NodeStats]:
        """Return what each node has done so far."""
        return {peer: self._node(peer).stats() for peer in (*self.prefill, *self.decode)}

    def _nodes(self) -> list[PrefillEngine | DecodeEngine]:
        return [*self.prefill.values(), *self.decode.values()]

    def _node(self, peer: NodeId) -> PrefillEngine | DecodeEngine:
        return self.prefill[peer] if peer in self.prefill else self.decode[peer]

    def _join(self, peer: NodeId) -> None:
        num_blocks = self._node(peer).manager.num_blocks
        if peer in self.prefill:
            self._gateway.add_prefill(peer, num_blocks)
        else:
            self._gateway.add_decode(peer, num_blocks)

    def _pass_on(self, peer: NodeId) -> None:
        """Deliver what a node wants to say."""
        node = self._node(peer)
        for letter in node.take_letters():
            self._node(letter.peer).receive(letter._replace(peer=peer))
        for report in node.take_reports():
            match report:
                case Failed(key, reason, is_final, is_busy):
                    is_busy |= self._is_resetting
                    self._gateway.prefill_failed(key, reason, is_final=is_final, is_busy=is_busy)
                case Started(key):
                    self._gateway.started(key)
                case Finished(key, request):
                    counts = hits_of(request), request.num_preemptions
                    self._gateway.finished(key, request.output_tokens, *counts)
                case Stopped(key, reason):
                    self._gateway.decode_failed(key, reason)
        self._follow()

    def _follow(self) -> None:
        """Do what the gateway wants done."""
        while actions := self._gateway.take_actions():
            for action in actions:
                match action:
                    case RunAttempt(key, request, route):
                        try:
                            self.prefill[route.prefill].begin(request, route.decode, key.attempt)
                        except RequestTooLargeError as large:
                            self._gateway.prefill_failed(key, str(large), is_final=True)
                    case Cancel(key):
                        for node in self._nodes():  # it may have been known before
                            node.give_up(key, "cancelled")

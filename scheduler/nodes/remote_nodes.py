"""A gateway for nodes in other processes, with the interface of one engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from math import inf
from typing import Final

from ..errors import NodesMissingError
from ..handoff import NodeId
from ..handoff.network_gateway import (
    Connect,
    Disconnect,
    NetworkGateway,
    SendToNode,
)
from ..handoff.remote_node import RemoteNode
from ..request import Request
from .channel import (
    EncodeError,
    RefusedConnection,
    ZmqChannel,
)

_WAIT_S: Final = 0.02


class RemoteNodes:
    """Serves requests with prefill and decode nodes in other processes, as `Engine` does with one.

    It carries out what a `NetworkGateway` wants done, over a channel. One thread may use it.
    """

    def __init__(
        self,
        channel: ZmqChannel,
        *,
        block_size: int,
        model: str | None = None,
        silence_s: float = 5.0,
        max_attempts: int = 3,
        backoff_s: float = 0.05,
        request_s: float = inf,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Take the gateway's end of a channel.

        Args:
            channel: named `gateway_messages.GATEWAY`; nodes connect to its address.
            block_size: tokens per block; a node with another is refused.
            model: `ModelConfig.name`; a node with another is refused. Without it, nodes must have
                that of the first.
            silence_s: a node not heard of for so long is gone, and one that has not taken a request
                in by then fails an attempt; it is asked five times.
            max_attempts, backoff_s, request_s: of `RequestRetrier`; no limit of time by default.
            clock: never goes back, in seconds.
        """
        self._channel = channel
        self._clock = clock
        self._gateway = NetworkGateway(
            block_size,
            model=model,
            silence_s=silence_s,
            max_attempts=max_attempts,
            backoff_s=backoff_s,
            request_s=request_s,
            epoch=channel.epoch,
        )

    @property
    def nodes(self) -> Mapping[NodeId, RemoteNode]:
        """Those that were heard of and have not gone, by name."""
        return self._gateway.nodes

    @property
    def gone(self) -> Mapping[NodeId, RemoteNode]:
        """Those that have gone and not come back, by name."""
        return self._gateway.gone

    @property
    def failures(self) -> dict[str, str]:
        """Why requests came to nothing, by id; those have the status ABORTED."""
        return self._gateway.failures

    @property
    def unheard(self) -> str:
        """What came and was not taken in, in words; empty if there was none."""
        stats, said = self._channel.stats(), ""
        for what, counts in (
            ("dropped messages", stats.dropped),
            ("refused connections", stats.refused),
        ):
            counted = [f"{number} {reason.value}" for reason, number in counts.most_common()]
            said += f"; {what}: {', '.join(counted)}" if counted else ""
        return said

    @property
    def strangers(self) -> bool:
        """Whether somebody with another secret, or none, has tried to connect."""
        return not self._channel.stats().refused.keys() <= {RefusedConnection.BROKEN}

    @property
    def other_versions(self) -> frozenset[int]:
        """Versions of the channel that nodes have which cannot be heard because of it."""
        return self._channel.stats().other_versions

    @property
    def num_open(self) -> int:
        """Requests that have yet to end."""
        return self._gateway.num_open

    @property
    def has_work(self) -> bool:
        """Whether any request has yet to end."""
        return self.num_open > 0

    def count(self, role: str) -> int:
        """Count the nodes of a role that serve."""
        return self._gateway.count(role)

    def check(self, timeout_s: float) -> None:
        """Refuse to go on if no node of a role is left, and none has come for some time.

        Args:
            timeout_s: since the last of them was heard of; silence_s at least.

        Raises:
            NodesMissingError: with their names, and what came and was not taken in.
        """
        try:
            self._gateway.check(timeout_s, self._clock())
        except NodesMissingError as error:
            raise NodesMissingError(f"{error}{self.unheard}") from None

    def add_request(self, request: Request) -> None:
        """Take a request in; it waits while there are no nodes.

        Raises:
            RequestError: for one that was added before, or the id of a live request.
        """
        self._gateway.add_request(request, self._clock())

    def abort(self, request_id: str) -> bool:
        """End a request in any state; False if no live one has this id."""
        is_live = self._gateway.abort(request_id)
        self._send()
        return is_live

    def step(self) -> list[Request]:
        """Take in what nodes say, waiting a moment for it; return the requests that ended."""
        self._channel.wait(_WAIT_S)
        now = self._clock()
        for packet in self._channel.receive():
            self._gateway.receive(packet.sender, packet.epoch, packet.message, now)
            self._send()
        self._gateway.tick(now)
        self._send()
        return self._gateway.take_ended()

    def run(self) -> list[Request]:
        """Run until every request has ended; return those that did, in order of their ends."""
        ended = []
        while self.has_work:
            ended += self.step()
        return ended

    def _send(self) -> None:
        """Do what the gateway wants done."""
        while actions := self._gateway.take_actions():
            for action in actions:
                match action:
                    case SendToNode(peer, message):
                        try:
                            if not self._channel.send(peer, message):
                                self._gateway.unsent(peer, message)
                        except EncodeError as error:
                            self._gateway.unsent(peer, message, str(error))
                    case Connect(peer, address):
                        self._channel.connect(peer, address)
                    case Disconnect(peer):
                        self._channel.disconnect(peer)

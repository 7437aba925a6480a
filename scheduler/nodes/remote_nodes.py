"""The gateway to nodes in other processes, with the interface of one engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import Final

from ..errors import NodesMissingError
from ..gateway.network_gateway import Connect, Disconnect, NetworkGateway, SendToNode
from ..gateway.remote_node import RemoteNode
from ..handoff import NodeId
from ..request import Request
from .channel import EncodeError, RefusedConnection, ZmqChannel

_WAIT_S: Final = 0.02


class RemoteNodes:
    """Serves requests with nodes in other processes; its interface is that of `Engine`.

    It carries out the actions of a `NetworkGateway` over a channel. For use by one thread.
    """

    def __init__(
        self,
        channel: ZmqChannel,
        *,
        model: str | None = None,
        silence_s: float = 5.0,
        max_attempts: int = 3,
        backoff_s: float = 0.05,
        request_s: float = inf,
        lost_s: float = 600.0,
        stream: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Take over the gateway's end of a channel.

        Args:
            channel: a channel named ``gateway_messages.GATEWAY``; nodes connect to its address.
            model: ``ModelConfig.name``; nodes with another are refused. None: the first node
            decides.
            silence_s: time after which a silent node counts as gone, and an attempt fails that its
                node has not acknowledged; the request is sent five times until then.
            max_attempts, backoff_s, request_s, lost_s: see ``Gateway``.
            stream: whether decode nodes send the tokens of requests as they come, for `advanced`.
            clock: a monotonic clock, in seconds.
        """
        self._advanced: Sequence[Request] = ()
        self._channel = channel
        self._clock = clock
        self._gateway = NetworkGateway(
            model=model,
            silence_s=silence_s,
            max_attempts=max_attempts,
            backoff_s=backoff_s,
            request_s=request_s,
            lost_s=lost_s,
            epoch=channel.epoch,
            stream=stream,
        )

    @property
    def nodes(self) -> Mapping[NodeId, RemoteNode]:
        """Nodes that are alive, by name."""
        return self._gateway.nodes

    @property
    def gone(self) -> Mapping[NodeId, RemoteNode]:
        """Nodes that have gone and not come back, by name."""
        return self._gateway.gone

    @property
    def failures(self) -> dict[str, str]:
        """Reasons of failed requests by id; these requests have the status ABORTED."""
        return self._gateway.failures

    @property
    def drop_summary(self) -> str:
        """Dropped messages and refused connections as text; empty if there are none."""
        stats, text = self._channel.stats(), ""
        for what, counts in (
            ("dropped messages", stats.dropped),
            ("refused connections", stats.refused),
        ):
            counted = [f"{number} {reason.value}" for reason, number in counts.most_common()]
            text += f"; {what}: {', '.join(counted)}" if counted else ""
        return text

    @property
    def has_refused_secrets(self) -> bool:
        """Whether a peer with another secret, or without one, has tried to connect."""
        harmless = {RefusedConnection.BROKEN, RefusedConnection.TOO_MANY}
        return not self._channel.stats().refused.keys() <= harmless

    @property
    def other_versions(self) -> frozenset[int]:
        """Channel versions of nodes whose messages are dropped for their version."""
        return self._channel.stats().other_versions

    @property
    def num_moved(self) -> int:
        """Number of times that a preempted request has moved to another decode node."""
        return self._gateway.num_moved

    @property
    def num_attempts_lost(self) -> int:
        """Number of attempts that were lost with a node or a connection, and tried again."""
        return self._gateway.num_attempts_lost

    @property
    def num_nodes_lost(self) -> int:
        """Number of times that a node was gone, also if it has come back."""
        return self._gateway.num_nodes_lost

    @property
    def num_open(self) -> int:
        """Number of requests that have not ended."""
        return self._gateway.num_open

    @property
    def has_work(self) -> bool:
        """Whether any request has not ended."""
        return self.num_open > 0

    @property
    def advanced(self) -> Sequence[Request]:
        """Requests that got tokens in the last step; none without ``stream``."""
        return self._advanced

    def count(self, role: str) -> int:
        """Return the number of serving nodes of a role."""
        return self._gateway.count(role)

    def drain(self, peer: NodeId) -> None:
        """Give a node no more attempts; see `NetworkGateway.drain`."""
        self._gateway.drain(peer)

    def num_attempts(self, peer: NodeId) -> int:
        """Return the number of attempts in progress on a node; 0 if it does not serve."""
        return self._gateway.num_attempts(peer)

    def check(self, timeout_s: float) -> None:
        """Raise an error if a role has had no node for some time.

        Args:
            timeout_s: time since the last message of such a node; at least silence_s.

        Raises:
            NodesMissingError: with the names of the nodes and `drop_summary`.
        """
        try:
            self._gateway.check(timeout_s, self._clock())
        except NodesMissingError as error:
            raise NodesMissingError(f"{error}{self.drop_summary}") from None

    def add_request(self, request: Request) -> None:
        """Add a request, which waits while there are no nodes.

        Raises:
            RequestError: for a request that was added before, or the id of an open request.
        """
        self._gateway.add_request(request, self._clock())

    def abort(self, request_id: str) -> bool:
        """End a request in any state; return False if no open request has this id."""
        was_open = self._gateway.abort(request_id)
        self._act()
        return was_open

    def step(self) -> list[Request]:
        """Wait briefly for messages and process them; return the requests that ended."""
        self._channel.wait(_WAIT_S)
        now = self._clock()
        for packet in self._channel.receive():
            self._gateway.receive(packet.sender, packet.epoch, packet.message, now)
            self._act()
        self._gateway.tick(now)
        self._act()
        self._advanced = self._gateway.take_advanced()
        return self._gateway.take_ended()

    def run(self) -> list[Request]:
        """Run until every request has ended; return them in the order in which they ended."""
        ended = []
        while self.has_work:
            ended += self.step()
        return ended

    def _act(self) -> None:
        """Carry out the gateway's actions."""
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

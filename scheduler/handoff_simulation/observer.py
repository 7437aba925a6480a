"""An observer of all messages between the gateway and its nodes, and the invariants on them."""

from __future__ import annotations

from typing import TypeAlias

from ..handoff.gateway_messages import (
    AttemptMessage,
    DeliveryAck,
    GatewayMessage,
    PrefillFailed,
    RunPrefill,
)
from ..handoff.messages import AttemptKey, Message, NodeId
from .invariants import ALL_ATTEMPTS, BEGUN_ONCE, NO_RESEND, SimulationError
from .nodes import SimulationConfig

Sender: TypeAlias = tuple[NodeId, int]
"""A node or the gateway, and its epoch."""


def client_id(key: AttemptKey) -> str:
    """Return the client's id for the request of an attempt; the gateway adds a suffix to it."""
    return key.request_id.partition(" ")[0]


class Observer:
    """Records messages, acknowledgements and failures, and checks them."""

    def __init__(self, config: SimulationConfig) -> None:
        self._config = config
        self._begun: dict[AttemptKey, Sender] = {}
        self._sent: set[tuple[Sender, DeliveryAck]] = set()
        self._acknowledged: set[tuple[Sender, DeliveryAck]] = set()
        self._attempts: dict[str, set[AttemptKey]] = {}
        self._deadlines: dict[str, int] = {}
        self._hopeless: set[str] = set()

    def submitted(self, request_id: str, num_tokens: int, now: int) -> None:
        """Record a request to a gateway that does not know it."""
        config = self._config
        self._attempts[request_id] = set()
        self._deadlines[request_id] = now + config.request_s
        self._hopeless.discard(request_id)
        if num_tokens > config.block_size * min(config.prefill_blocks, config.decode_blocks):
            self._hopeless.add(request_id)

    def begun(self, node: Sender, key: AttemptKey) -> None:
        """Record that a prefill node begins an attempt.

        Raises:
            SimulationError: if it was begun before.
        """
        if key in self._begun:
            raise SimulationError(BEGUN_ONCE, f"{node} begins {key}, as {self._begun[key]} did")
        self._begun[key] = node

    def sent(self, sender: Sender, message: Message | GatewayMessage) -> None:
        """Record a message from or to the gateway.

        Raises:
            SimulationError: if its sender knows that it was delivered.
        """
        match message:
            case RunPrefill(key):
                self._attempts[client_id(key)].add(key)
            case PrefillFailed(key, is_final=True):
                self._hopeless.add(client_id(key))
        if isinstance(message, AttemptMessage):
            entry = sender, DeliveryAck.of(message)
            if entry in self._acknowledged:
                raise SimulationError(NO_RESEND, f"{sender} sends again {message}")
            self._sent.add(entry)

    def acknowledged(self, sender: Sender, ack: DeliveryAck) -> None:
        """Record the acknowledgement of one of the sender's own messages."""
        if (sender, ack) in self._sent:
            self._acknowledged.add((sender, ack))

    def failed(self, request_id: str, reason: str, now: int) -> None:
        """Record the failure of a request.

        Raises:
            SimulationError: if another attempt was possible.
        """
        num_attempts = len(self._attempts[request_id])
        if request_id in self._hopeless or now >= self._deadlines[request_id]:
            return
        if num_attempts < self._config.max_attempts:
            what = f"{request_id} fails after {num_attempts} attempts: {reason}"
            raise SimulationError(ALL_ATTEMPTS, what)

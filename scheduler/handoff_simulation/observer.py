"""What an onlooker knows of the gateway and its nodes, and what must hold between them."""

from __future__ import annotations

from typing import TypeAlias

from ..handoff.gateway_messages import (
    AttemptMessage,
    DeliveryAck,
    GatewayMessage,
    PrefillFailed,
    RunPrefill,
)
from ..handoff.messages import (
    AttemptKey,
    Message,
    NodeId,
)
from .invariants import (
    ALL_ATTEMPTS,
    BEGUN_ONCE,
    HEARD,
    SimulationError,
)
from .nodes import SimulationConfig

Life: TypeAlias = tuple[NodeId, int]
"""A node, or the gateway, and its epoch."""


def client_id(key: AttemptKey) -> str:
    """Return what the client calls the request of an attempt: the gateway adds to it."""
    return key.request_id.partition(" ")[0]


class Watch:
    """All messages between the gateway and its nodes, and their acknowledgements."""

    def __init__(self, config: SimulationConfig) -> None:
        self._config = config
        self._begun: dict[AttemptKey, Life] = {}
        self._said: set[tuple[Life, DeliveryAck]] = set()
        self._heard: set[tuple[Life, DeliveryAck]] = set()
        self._attempts: dict[str, set[AttemptKey]] = {}
        self._deadlines: dict[str, int] = {}
        self._hopeless: set[str] = set()

    def asks(self, request_id: str, num_tokens: int, now: int) -> None:
        """Take in that a client asks a gateway, which knows nothing of the request."""
        config = self._config
        self._attempts[request_id] = set()
        self._deadlines[request_id] = now + config.request_s
        self._hopeless.discard(request_id)
        if num_tokens > config.block_size * min(config.prefill_blocks, config.decode_blocks):
            self._hopeless.add(request_id)

    def begins(self, life: Life, key: AttemptKey) -> None:
        """Take in that a prefill node begins an attempt.

        Raises:
            SimulationError: if it did so before.
        """
        if key in self._begun:
            raise SimulationError(BEGUN_ONCE, f"{life} begins {key}, as {self._begun[key]} did")
        self._begun[key] = life

    def says(self, life: Life, message: Message | GatewayMessage) -> None:
        """Take in what is said to or by the gateway.

        Raises:
            SimulationError: if who says so knows that it was heard.
        """
        match message:
            case RunPrefill(key):
                self._attempts[client_id(key)].add(key)
            case PrefillFailed(key, is_final=True):
                self._hopeless.add(client_id(key))
        if isinstance(message, AttemptMessage):
            said = life, DeliveryAck.of(message)
            if said in self._heard:
                raise SimulationError(HEARD, f"{life} says again {message}")
            self._said.add(said)

    def hears(self, life: Life, heard: DeliveryAck) -> None:
        """Take in that somebody is told that a message was heard; if it is its own, it counts."""
        if (life, heard) in self._said:
            self._heard.add((life, heard))

    def fails(self, request_id: str, reason: str, now: int) -> None:
        """Take in that a client is told that its request has failed.

        Raises:
            SimulationError: if there were attempts left, time, and hope.
        """
        num_attempts = len(self._attempts[request_id])
        if request_id in self._hopeless or now >= self._deadlines[request_id]:
            return
        if num_attempts < self._config.max_attempts:
            what = f"{request_id} fails after {num_attempts} attempts: {reason}"
            raise SimulationError(ALL_ATTEMPTS, what)

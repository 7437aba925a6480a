"""What an onlooker knows of the desk and its nodes, and what must hold between them."""

from __future__ import annotations

from typing import TypeAlias

from ..handoff.gateway_messages import (
    ClientMessage,
    Heard,
    OfAttempt,
    PrefillFailed,
    RunPrefill,
)
from ..handoff.messages import (
    Key,
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
"""A node, or the desk, and its epoch."""


def client_id(key: Key) -> str:
    """Return what the client calls the request of an attempt: the desk adds to it."""
    return key.request_id.partition(" ")[0]


class Watch:
    """Everything that the desk and its nodes have said to each other, and what was heard of it."""

    def __init__(self, config: SimulationConfig) -> None:
        self._config = config
        self._begun: dict[Key, Life] = {}
        self._said: set[tuple[Life, Heard]] = set()
        self._heard: set[tuple[Life, Heard]] = set()
        self._attempts: dict[str, set[Key]] = {}
        self._deadlines: dict[str, int] = {}
        self._hopeless: set[str] = set()

    def asks(self, request_id: str, num_tokens: int, now: int) -> None:
        """Take in that a client asks a desk, which knows nothing of the request."""
        config = self._config
        self._attempts[request_id] = set()
        self._deadlines[request_id] = now + config.request_s
        self._hopeless.discard(request_id)
        if num_tokens > config.block_size * min(config.prefill_blocks, config.decode_blocks):
            self._hopeless.add(request_id)

    def begins(self, life: Life, key: Key) -> None:
        """Take in that a prefill node begins an attempt.

        Raises:
            SimulationError: if it did so before.
        """
        if key in self._begun:
            raise SimulationError(BEGUN_ONCE, f"{life} begins {key}, as {self._begun[key]} did")
        self._begun[key] = life

    def says(self, life: Life, message: Message | ClientMessage) -> None:
        """Take in what is said to or by the desk.

        Raises:
            SimulationError: if who says so knows that it was heard.
        """
        match message:
            case RunPrefill(key):
                self._attempts[client_id(key)].add(key)
            case PrefillFailed(key, is_final=True):
                self._hopeless.add(client_id(key))
        if isinstance(message, OfAttempt):
            said = life, Heard.of(message)
            if said in self._heard:
                raise SimulationError(HEARD, f"{life} says again {message}")
            self._said.add(said)

    def hears(self, life: Life, heard: Heard) -> None:
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

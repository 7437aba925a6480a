"""Where the nodes of a fleet find the server, and users say how many nodes they want.

It needs no Ray: `Fleet` makes it a named actor.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Final

from ..options.fleet import FleetSize

REGISTRY: Final = "fleet"
"""Name of the actor `FleetRegistry` in the namespace of the fleet."""


@dataclass(frozen=True)
class Deployment:
    """What a node needs to join, and that nobody else may see.

    It travels only as argument and result of calls between actors: Ray keeps the arguments of a
    constructor and the environment of an actor, and shows the latter.

    Attributes:
        gateway: address of the gateway.
        secret: what all nodes share.
        storage: value of --storage, which may contain a password; None without.
    """

    gateway: str
    secret: str = field(repr=False)
    storage: str | None = field(repr=False)


class FleetRegistry:
    """Where nodes find the server, and users say how many nodes they want."""

    def __init__(self) -> None:
        self._changed = asyncio.Condition()
        self._deployment: Deployment | None = None
        self._size: FleetSize | None = None

    def __repr__(self) -> str:
        return REGISTRY

    async def lead(self, deployment: Deployment, size: FleetSize) -> FleetSize:
        """Tell nodes where the server is; return as soon as a user wants another size.

        The server calls it anew whenever it has ended, so that a registry that Ray has started
        again knows as much as the one before. A user may want another size between two calls: only
        a registry that knows none takes the server's.
        """
        async with self._changed:
            self._deployment, self._size = deployment, self._size or size
            self._changed.notify_all()
            await self._changed.wait_for(lambda: self._size != size)
            assert self._size is not None
            return self._size

    async def join(self) -> Deployment:
        """Return what a node needs, as soon as the server has told."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._deployment is not None)
            assert self._deployment is not None
            return self._deployment

    async def scale(self, prefill: int | None = None, decode: int | None = None) -> FleetSize:
        """Let the server start or drain nodes; return the size that is now wanted.

        Args:
            prefill, decode: number of nodes; None leaves it.

        Raises:
            ValueError: for a number below 1.
        """
        async with self._changed:
            await self._changed.wait_for(lambda: self._size is not None)
            assert self._size is not None
            wanted = self._size._replace(
                prefill=self._size.prefill if prefill is None else prefill,
                decode=self._size.decode if decode is None else decode,
            )
            if min(wanted) < 1:
                raise ValueError(f"each role needs 1 node or more, got {wanted}")
            self._size = wanted
            self._changed.notify_all()
            return wanted

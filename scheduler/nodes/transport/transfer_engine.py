"""Interface of the engines that move bytes between processes; `threaded` makes each a transport.

All calls come from one thread, and none waits for a peer.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Final

from .base import Fault
from .descriptors import Descriptor, PayloadArray, digest_arrays

MAX_FILES: Final = 400
"""File descriptors that an engine may take for itself."""

_SEAL_BYTES: Final = 8


class PullError(Exception):
    """A pull failed, with a fault and a reason."""

    def __init__(self, fault: Fault, reason: str) -> None:
        super().__init__(reason)
        self.fault = fault
        self.reason = reason


class TooLargeError(Exception):
    """A part is larger than the whole staging memory."""

    def __init__(self, num_bytes: int, capacity: int) -> None:
        super().__init__(
            f"it has {num_bytes} bytes, and staging memory has {capacity} (staging_bytes)"
        )


class EngineOffer(ABC):
    """Arrays that an engine serves.

    Attributes:
        route: what another node's engine needs to find the arrays.
    """

    route: bytes

    @abstractmethod
    def is_ready(self) -> bool:
        """Whether others can read the arrays by now. An error means that they never can."""

    @abstractmethod
    def was_read(self) -> bool:
        """Whether D's engine has confirmed the read; engines that cannot tell return False."""

    @abstractmethod
    def withdraw(self, was_read: bool) -> None:
        """Stop serving the arrays. Called once."""

    @abstractmethod
    def is_withdrawn(self) -> bool:
        """Whether the memory is free, and a read that begins now fails or gets other bytes."""


class EnginePull(ABC):
    """A transfer into staging memory. Its user ends it once, with `free` or `abandon`.

    Attributes:
        arrays: the destination, valid until `free`; see `advance` for how many have arrived.
        digest_key: key of the digests.
    """

    arrays: tuple[PayloadArray, ...]
    digest_key: bytes

    @abstractmethod
    def advance(self) -> int:
        """Continue the transfer, and return how many of the first arrays have arrived.

        It may return after each piece.

        Raises:
            PullError: if the transfer failed.
        """

    def digests(self, start: int, stop: int) -> Sequence[bytes]:
        """Return the digests of arrays that have arrived; see `digest_arrays`."""
        return digest_arrays(self.arrays[start:stop], self.digest_key, start)

    @abstractmethod
    def free(self) -> None:
        """Free the memory of a transfer that has ended, and confirm the read to P's engine."""

    @abstractmethod
    def abandon(self) -> None:
        """End the transfer; its memory stays quarantined until nothing can write it."""


class TransferEngine(ABC):
    """Serves arrays of this node, and reads arrays of others.

    Attributes:
        name: name of the engine; both nodes must use the same.
        copies_offers: see `Transport`.
        room: what a pull may have to wait for.
    """

    name: str
    copies_offers: bool
    room: str

    @abstractmethod
    def offer(self, arrays: Sequence[PayloadArray]) -> EngineOffer | None:
        """Serve computed arrays; None if there is no room at the moment.

        Raises:
            TooLargeError: if there will never be room.
        """

    @abstractmethod
    def pull(self, route: bytes, descriptor: Descriptor, digest_key: bytes) -> EnginePull | None:
        """Begin a read; None if there is no room at the moment.

        Args:
            route: route of a peer's offer, not trusted.
            descriptor: layout of the arrays.
            digest_key: key for `EnginePull.digests`.

        Raises:
            PullError: if the read fails at once.
            TooLargeError: if there will never be room.
        """

    @abstractmethod
    def maintain(self) -> None:
        """Do the periodic work, such as freeing quarantined memory of transfers that ended."""

    @property
    @abstractmethod
    def maintain_every_s(self) -> float | None:
        """Current period of `maintain`; None if there is nothing to do."""

    @property
    @abstractmethod
    def quarantined_bytes(self) -> int:
        """Size of the memory that abandoned pulls may still write."""

    @abstractmethod
    def close(self) -> None:
        """Stop. Memory that a transfer may still write is never freed."""


def seal(route: bytes) -> bytes:
    """Return a route with a digest, so that no engine sees one with a flipped bit."""
    return _digest(route) + route


def unseal(sealed: bytes) -> bytes:
    """Return the route.

    Raises:
        PullError: for a route that is not as its engine made it.
    """
    digest, route = sealed[:_SEAL_BYTES], sealed[_SEAL_BYTES:]
    if digest != _digest(route):
        raise PullError(Fault.MISMATCH, "the route is damaged")
    return route


def _digest(route: bytes) -> bytes:
    return hashlib.blake2b(route, digest_size=_SEAL_BYTES).digest()

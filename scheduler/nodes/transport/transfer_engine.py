"""Interface of the engines that move bytes between processes; `threaded` makes each a transport.

All calls come from one thread, and none waits for a peer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from .base import Fault
from .descriptors import Descriptor, PayloadArray, digest_arrays


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
    """

    arrays: tuple[PayloadArray, ...]

    @abstractmethod
    def advance(self) -> int:
        """Continue the transfer, and return how many of the first arrays have arrived.

        It may return after each piece.

        Raises:
            PullError: if the transfer failed.
        """

    def digests(self, start: int, stop: int) -> Sequence[bytes]:
        """Return the digests of arrays that have arrived; see `digest_arrays`."""
        return digest_arrays(self.arrays[start:stop])

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
    """

    name: str
    copies_offers: bool

    @abstractmethod
    def offer(self, arrays: Sequence[PayloadArray]) -> EngineOffer | None:
        """Serve computed arrays; None if there is no room at the moment.

        Raises:
            TooLargeError: if there will never be room.
        """

    @abstractmethod
    def pull(self, route: bytes, descriptor: Descriptor) -> EnginePull | None:
        """Begin a read; None if there is no room at the moment.

        Args:
            route: route of a peer's offer, not trusted.
            descriptor: layout of the arrays.

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

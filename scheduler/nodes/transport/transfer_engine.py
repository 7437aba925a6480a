"""What an engine that moves bytes between processes must do; `threaded.py` does the rest for all.

All calls come from one thread, and none waits for a peer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from .base import Fault
from .descriptors import (
    Descriptor,
    PayloadArray,
    digest_arrays,
)


class PullError(Exception):
    """A pull has come to nothing: the fault, and the engine's words."""

    def __init__(self, fault: Fault, reason: str) -> None:
        super().__init__(reason)
        self.fault = fault
        self.reason = reason


class TooLargeError(Exception):
    """A part does not fit staging memory, even when that is empty."""

    def __init__(self, num_bytes: int, capacity: int) -> None:
        super().__init__(
            f"it has {num_bytes} bytes, and staging memory has {capacity} (staging_bytes)"
        )


class EngineOffer(ABC):
    """Some arrays that the engine serves.

    Attributes:
        route: what another node's engine needs to find them.
    """

    route: bytes

    @abstractmethod
    def was_read(self) -> bool:
        """Whether D's engine has said that it has read them; it need not be able to."""

    @abstractmethod
    def withdraw(self, was_read: bool) -> None:
        """Stop serving them; once."""

    @abstractmethod
    def is_withdrawn(self) -> bool:
        """Whether their memory is free, and a read that begins now fails, or gets other bytes."""


class EnginePull(ABC):
    """A transfer into staging memory; ends by `free` or `abandon`, one of them, once.

    Attributes:
        arrays: what is received, until `free`; those that have arrived, to begin with.
    """

    arrays: tuple[PayloadArray, ...]

    @abstractmethod
    def advance(self) -> int:
        """Have it go on; return how many of the arrays, from the first, have arrived for good.

        It may return after each piece.

        Raises:
            PullError: if it has failed.
        """

    def digests(self, start: int, stop: int) -> Sequence[bytes]:
        """Return the digests of some arrays that have arrived, as by `digest_arrays`."""
        return digest_arrays(self.arrays[start:stop])

    @abstractmethod
    def free(self) -> None:
        """Give its memory back, when all has arrived or nothing more will; tell P's engine."""

    @abstractmethod
    def abandon(self) -> None:
        """Have it ended; its memory stays out of use until nothing is written there any more."""


class Engine(ABC):
    """Serves arrays of this node, and reads those of others.

    Attributes:
        name: both nodes must use the same.
        copies_offers: see `Transport`.
    """

    name: str
    copies_offers: bool

    @abstractmethod
    def offer(self, arrays: Sequence[PayloadArray]) -> EngineOffer | None:
        """Serve arrays, which are computed; None if there is no room at the moment.

        Raises:
            TooLargeError: if there never will be.
        """

    @abstractmethod
    def pull(self, route: bytes, descriptor: Descriptor) -> EnginePull | None:
        """Begin to read; None if there is no room at the moment.

        Args:
            route: what a peer says, so anything.
            descriptor: exactly what there is.

        Raises:
            PullError: if it fails at once.
        """

    @abstractmethod
    def tend(self) -> None:
        """Take memory out of quarantine where transfers have ended, and what else is due."""

    @property
    @abstractmethod
    def tend_s(self) -> float | None:
        """Return how often it must be tended at the moment; None: not at all."""

    @property
    @abstractmethod
    def quarantined_bytes(self) -> int:
        """Return how much staging memory an abandoned pull may still write to."""

    @abstractmethod
    def close(self) -> None:
        """Stop. Memory that may still be written to is never freed."""

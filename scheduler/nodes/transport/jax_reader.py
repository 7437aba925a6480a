"""Pulls by `jax.experimental.transfer`: connections to a peer, and arrays that arrive or do not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp

from .base import Fault
from .descriptors import ArraySpec, is_computed
from .transfer_engine import EnginePull, PullError

_LOST_WORDS: Final = ("onnection", "recv")  # of the errors when a peer has ended


class JaxReader:
    """Reads one peer, over a server that reads nobody else.

    A connection serves one pull at a time, so that breaking it ends no other; one whose pull went
    well serves the next, because new ones are slow at first.
    """

    def __init__(self, server: Any, address: str, device: jax.Device) -> None:
        """Make it over a server of its own, for the peer's address."""
        self._server = server
        self._address = address
        self._sharding = jax.sharding.SingleDeviceSharding(device)
        self._idle: list[Any] = []

    def begin(
        self, number: int, specs: Sequence[ArraySpec], abandoned: Callable[[JaxPull], None]
    ) -> JaxPull:
        """Pull what is offered by a number.

        Args:
            number, specs: of the offer.
            abandoned: is told if the pull is.

        Raises:
            PullError: if it fails at once.
        """
        wanted = [
            jax.ShapeDtypeStruct(spec.shape, jnp.dtype(spec.dtype), sharding=self._sharding)  # type: ignore[no-untyped-call]  # JAX's
            for spec in specs
        ]
        try:
            connection = self._idle.pop() if self._idle else self._server.connect(self._address)
            arrays = tuple(connection.pull(number, wanted))
        except Exception as error:
            raise PullError(Fault.FAILED, first_line(error)) from error
        return JaxPull(self, connection, arrays, abandoned)

    def take_back(self, connection: Any) -> None:
        """Use a connection again, whose pull went well."""
        self._idle.append(connection)


class JaxPull(EnginePull):
    """Arrays that arrive some time, or never.

    Attributes:
        reader: over which they come.
        num_bytes: of all of them.
    """

    arrays: tuple[jax.Array, ...]

    def __init__(
        self,
        reader: JaxReader,
        connection: Any,
        arrays: tuple[jax.Array, ...],
        abandoned: Callable[[JaxPull], None],
    ) -> None:
        self.reader = reader
        self.arrays = arrays
        self.num_bytes = sum(array.nbytes for array in arrays)
        self._connection = connection
        self._abandoned = abandoned
        self._num_arrived = 0

    def advance(self) -> int:
        """See `EnginePull.advance`."""
        try:
            for array in self.arrays[self._num_arrived :]:
                if not is_computed(array):
                    break
                array.block_until_ready()
                self._num_arrived += 1
        except jax.errors.JaxRuntimeError as error:
            lost = any(word in str(error) for word in _LOST_WORDS)
            raise PullError(Fault.PEER_LOST if lost else Fault.FAILED, first_line(error)) from None
        return self._num_arrived

    def has_ended(self) -> bool:
        """Whether all has arrived, or will not."""
        return all(is_computed(array) for array in self.arrays)

    def free(self) -> None:
        """See `EnginePull.free`."""
        self.arrays = ()
        self.reader.take_back(self._connection)

    def abandon(self) -> None:
        """See `EnginePull.abandon`: break the connection."""
        self._connection._poison_connection()
        self._abandoned(self)


def first_line(error: BaseException) -> str:
    """Return what an error says, in short."""
    return (str(error).splitlines() or [type(error).__name__])[0][:200]

"""Calls that every process of a group executes: what they are, and how a difference is found.

::

    process 0                                      every other process
    CallSender.send ── number, digest, frames ───► CallReceiver.receive ──► executes the call
    CallSender.acknowledge ◄──── number, digest ── CallReceiver.acknowledge
    `late` is empty: the results may be used

One process plans; a call is what it dispatches to the devices: a program, and the host's arrays for
it. The digest of a call covers all calls before it. A receiver executes a call only if it is the
next one, and its digest is that of the same calls; the sender uses results only if each receiver
has sent the same digest back. So a call that is lost, repeated, out of order or altered is found
before its results are used.

No clock, socket or pickle is here.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from math import prod
from typing import Any, Final, NamedTuple, Protocol

import jax.numpy as jnp
import numpy as np

from ..errors import CallError

_DIGEST_BYTES: Final = 16
_NUMBER_BYTES: Final = 8
_DTYPES: Final = frozenset({"int32", "float32", "bfloat16", "float16", "bool"})


class Call(NamedTuple):
    """A dispatch to the devices.

    Attributes:
        name: which; see `FollowingRunner`.
        flags: integers that choose the program, such as its shape.
        arrays: arrays of the host, which the program takes.
    """

    name: str
    flags: tuple[int, ...] = ()
    arrays: tuple[np.ndarray, ...] = ()


class Group(Protocol):
    """The processes that share a model, as the engine of one of them uses them.

    Every method raises a `GroupError` if the processes cannot go on together.

    Attributes:
        process_id: 0 for the process that plans.
        num_processes: how many there are.
    """

    process_id: int
    num_processes: int

    def join(self, options: Mapping[str, str]) -> None:
        """Wait for all processes, and check that they have the same options."""

    def share(self, numbers: Sequence[int]) -> list[list[int]]:
        """Return the numbers of all processes, by process, in each; all call it, before `join`."""

    def check(self) -> None:
        """Look for processes that are lost or have failed; only process 0 does."""

    def tell(self, name: str, flags: Sequence[int] = (), *arrays: np.ndarray) -> None:
        """Send a call to the other processes; only process 0 does."""

    def wait(self, arrays: Any) -> None:
        """Wait until arrays are computed, and all processes have reported the calls so far."""

    def calls(self) -> Iterator[Call]:
        """Yield the calls of process 0, until it closes; each is reported when it is executed."""


def encode_call(call: Call) -> list[bytes]:
    """Return a call as frames: a header in JSON, and the bytes of each array."""
    kinds = [(each.dtype.name, each.shape) for each in call.arrays]
    header = json.dumps([call.name, list(map(int, call.flags)), kinds])
    return [header.encode(), *(each.tobytes() for each in call.arrays)]


def decode_call(frames: Sequence[bytes]) -> Call:
    """Return the call of frames.

    Raises:
        CallError: if these frames are none.
    """
    try:
        name, flags, kinds = json.loads(frames[0])
        arrays = tuple(
            _decode_array(dtype, shape, frame)
            for (dtype, shape), frame in zip(kinds, frames[1:], strict=True)
        )
        return Call(str(name), tuple(map(int, flags)), arrays)
    except (ValueError, TypeError, IndexError) as error:
        raise CallError(f"{len(frames)} frames are not a call: {error}") from error


def _decode_array(dtype: str, shape: list[int], frame: bytes) -> np.ndarray:
    if dtype not in _DTYPES:
        raise ValueError(f"no array of a call has dtype {dtype!r}")
    size, kind = prod(shape), jnp.dtype(dtype)
    if len(frame) != size * kind.itemsize:
        raise ValueError(f"{dtype}{shape} does not have {len(frame)} bytes")
    # bfloat16 is no dtype of NumPy's own buffers.
    return np.frombuffer(frame, np.uint8).view(kind).reshape(shape)


def chain_digest(before: bytes, frames: Iterable[bytes]) -> bytes:
    """Return the digest of a call and of all calls before it."""
    digest = blake2b(before, digest_size=_DIGEST_BYTES)
    for frame in frames:
        digest.update(len(frame).to_bytes(_NUMBER_BYTES, "little"))
        digest.update(frame)
    return digest.digest()


def bytes_to_array(data: bytes) -> np.ndarray:
    """Return bytes as an array of a call, such as a name or a digest."""
    return np.frombuffer(data, np.uint8).astype(np.int32)


def array_to_bytes(array: np.ndarray) -> bytes:
    """Return the bytes of `bytes_to_array`."""
    return array.astype(np.uint8).tobytes()


def check_weights(call: Call, digest: bytes) -> None:
    """Compare the weights of this process with those of process 0.

    Args:
        call: has the digest of process 0's weights.
        digest: of the weights of this process.

    Raises:
        CallError: if they differ.
    """
    due = array_to_bytes(call.arrays[0])
    if digest != due:
        raise CallError(f"new weights differ: process 0 has {due.hex()}, this one {digest.hex()}")


class CallSender:
    """Numbers the calls of the process that plans, and compares what the others report.

    Attributes:
        number: number of the last call; the first one is 1.
    """

    def __init__(self, start: bytes, receivers: Iterable[int]) -> None:
        """Begin with a digest that all processes have, and no calls.

        Args:
            start: such as a digest of all options.
            receivers: ids of the other processes.
        """
        self.number = 0
        self._digest = start
        self._reported = dict.fromkeys(receivers, 0)
        self._digests: dict[int, bytes] = {}  # of calls that some receiver has yet to report

    def send(self, call: Call) -> list[bytes]:
        """Return the frames of a call to send to each receiver."""
        frames = encode_call(call)
        self.number += 1
        self._digest = chain_digest(self._digest, frames)
        if self._reported:  # else no report would ever remove it
            self._digests[self.number] = self._digest
        return [_number(self.number), self._digest, *frames]

    def acknowledge(self, receiver: int, frames: Sequence[bytes]) -> None:
        """Take the report of a receiver.

        Raises:
            CallError: if it is not that of the receiver's next call, or its digest differs.
        """
        due = self._reported[receiver] + 1
        number = int.from_bytes(frames[0], "little")
        if number != due or due > self.number or len(frames) != 2:
            raise CallError(
                f"process {receiver} reports call {number} where call {due} of {self.number} is due"
            )
        if frames[1] != self._digests[due]:
            raise CallError(
                f"process {receiver} reports call {due} with another digest: it has executed other "
                "calls than process 0 has sent"
            )
        self._reported[receiver] = due
        if all(due <= each for each in self._reported.values()):
            del self._digests[due]

    @property
    def late(self) -> list[int]:
        """Receivers that have yet to report calls."""
        return [each for each, number in self._reported.items() if number < self.number]


class CallReceiver:
    """Takes each call once, in order.

    Attributes:
        number: number of the last call that was received.
    """

    def __init__(self, start: bytes) -> None:
        """Begin with the digest with which the sender begins."""
        self.number = 0
        self._digest = start

    def receive(self, frames: Sequence[bytes]) -> Call:
        """Return the call of frames from the sender, to execute and then to acknowledge.

        Raises:
            CallError: if it is not the next one, or is altered; it must not be executed.
        """
        number = int.from_bytes(frames[0], "little")
        if number != self.number + 1:
            raise CallError(
                f"call {number} came where call {self.number + 1} was due: calls are lost, "
                "repeated or out of order"
            )
        digest = chain_digest(self._digest, frames[2:])
        if digest != frames[1]:
            raise CallError(
                f"call {number} has another digest than process 0 sent with it: it is altered, or "
                "the calls before differ"
            )
        call = decode_call(frames[2:])
        self.number, self._digest = number, digest
        return call

    def acknowledge(self) -> list[bytes]:
        """Return the report of the last call, which was executed."""
        return [_number(self.number), self._digest]


def _number(number: int) -> bytes:
    return number.to_bytes(_NUMBER_BYTES, "little")


def describe_difference(process: int, given: Any, expected: Any) -> str | None:
    """Return how the options of a process differ from those of process 0; None if they do not."""
    for name in (*expected, *given):
        if given.get(name) != expected.get(name):
            return (
                f"process {process} has {name} {given.get(name)}, "
                f"process 0 {expected.get(name)}: all need the same"
            )
    return None

"""Subscriber of KV events: messages of a publisher of any engine, and replays of missed ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Final, NamedTuple, Self

import zmq

from .errors import EventAddressError, EventFormatError
from .wire import END_OF_REPLAY, SEQ_BYTES

REPLAY_TIMEOUT_S: Final = 10.0
"""Time without an answer after which a replay has failed."""


class Message(NamedTuple):
    """A batch as it came: its number, and its bytes."""

    seq: int
    payload: bytes


class EventSubscriber(AbstractContextManager["EventSubscriber"]):
    """Receives the messages of one publisher."""

    def __init__(self, endpoint: str, replay_endpoint: str | None = None, topic: str = "") -> None:
        """Connect to a publisher; it may begin later.

        Args:
            endpoint: its PUB socket, such as ``tcp://127.0.0.1:5557``.
            replay_endpoint: its ROUTER socket for replays, or None.
            topic: receive only messages whose topic begins so.

        Raises:
            EventAddressError: if an address is malformed.
        """
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._replay_endpoint = replay_endpoint
        try:
            self._socket = self._context.socket(zmq.SUB)
            self._socket.setsockopt(zmq.RCVHWM, 0)
            self._socket.setsockopt_string(zmq.SUBSCRIBE, topic)
            self._connect(self._socket, endpoint)
            if replay_endpoint is not None:
                with self._context.socket(zmq.DEALER) as socket:
                    self._connect(socket, replay_endpoint)
        except BaseException:
            self.close()
            raise

    def _connect(self, socket: zmq.Socket[bytes], endpoint: str) -> None:
        socket.setsockopt(zmq.LINGER, 0)
        try:
            socket.connect(endpoint)
        except zmq.ZMQError as error:
            raise EventAddressError(f"{endpoint!r} cannot be connected to: {error}") from None

    def receive(self, timeout_s: float) -> Message | None:
        """Return the next message; None if there is none in time.

        Raises:
            EventFormatError: if it has not the frames of a batch.
        """
        if not self._socket.poll(int(timeout_s * 1_000)):
            return None
        return _message(self._socket.recv_multipart())

    def replay(self, seq: int) -> Iterator[Message]:
        """Yield the batches that the publisher still has from number seq on; none without replays.

        Raises:
            EventFormatError: if an answer is none.
            TimeoutError: if the publisher does not answer.
        """
        if self._replay_endpoint is None:
            return
        with self._context.socket(zmq.DEALER) as socket:
            socket.setsockopt(zmq.RCVHWM, 0)
            self._connect(socket, self._replay_endpoint)
            socket.send_multipart((b"", seq.to_bytes(SEQ_BYTES, "big")))
            while socket.poll(int(REPLAY_TIMEOUT_S * 1_000)):
                frames = socket.recv_multipart()[1:]
                if END_OF_REPLAY in frames[-2:]:
                    return
                yield _message(frames)
        raise TimeoutError(f"{self._replay_endpoint} did not answer in {REPLAY_TIMEOUT_S:g} s")

    def close(self) -> None:
        """Close the sockets."""
        self._context.destroy(linger=0)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __enter__(self) -> Self:
        return self


def _message(frames: list[bytes]) -> Message:
    """Return the message in frames; replays of older engines have no topic."""
    if len(frames) not in (2, 3) or len(frames[-2]) != SEQ_BYTES:
        sizes = [len(frame) for frame in frames]
        raise EventFormatError(f"a message has frames of {sizes} bytes, not topic, 8 and a batch")
    return Message(int.from_bytes(frames[-2], "big"), frames[-1])

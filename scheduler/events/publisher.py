"""Publisher of KV events over ZeroMQ: PUB for all batches, ROUTER to replay the last ones.

::

    thread of the engine        publisher thread          replay thread
    publish(batch) ──queue──►   encode, send on PUB
                                and keep ───────────────► answers on ROUTER

The thread of the engine never waits. If the queue is full, or a batch cannot be sent, it is
dropped; its number is missing then, so that consumers see the gap.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Final

import zmq

from ...kvcache import EventBatch, ReplayBuffer
from ...kvcache.tokens import as_count
from .errors import EventAddressError
from .wire import END_OF_REPLAY, SEQ_BYTES, encode_batch

_LOGGER = logging.getLogger(__name__)

_HIGH_WATER_MARK: Final = 100_000
"""Messages that ZeroMQ keeps for a slow subscriber before it drops some."""
_LINGER_MS: Final = 1_000
"""Time to send what is left after `close`."""


class EventPublisher:
    """Publishes batches of KV events from a thread of its own.

    Attributes:
        endpoint: where it publishes, with the port that was bound.
        replay_endpoint: where it answers requests for a replay, or None.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        replay_endpoint: str | None = None,
        topic: str = "",
        num_kept: int = 10_000,
        max_waiting: int = 100_000,
    ) -> None:
        """Bind the sockets, and start the threads.

        Args:
            endpoint: address to bind, such as ``tcp://127.0.0.1:5557``; port 0 takes any.
                ``tcp://*:5557`` is reached from the network: events contain token ids.
            replay_endpoint: address to bind for replays.
            topic: first frame of each message.
            num_kept: number of batches that are kept for replays.
            max_waiting: number of batches that wait to be sent before one is dropped.

        Raises:
            EventAddressError: if an address cannot be bound.
            CountError: if num_kept is negative.
        """
        self._num_full = self._num_failed = 0  # one for each thread
        self._is_closed = False
        self._topic = topic.encode()
        self._kept: ReplayBuffer[bytes] = ReplayBuffer(as_count("num_kept", num_kept))
        self._lock = Lock()  # of what is kept
        self._max_waiting = max_waiting
        self._queue: SimpleQueue[tuple[float, EventBatch] | None] = SimpleQueue()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._threads: list[tuple[Thread, zmq.Socket[bytes]]] = []
        self.replay_endpoint: str | None = None
        try:
            publish = self._add_thread("kv-events", self._publish_all, zmq.PUB)
            self.endpoint = _bind(publish, endpoint, _HIGH_WATER_MARK)
            if replay_endpoint is not None:
                router = self._add_thread("kv-events-replay", self._answer_all, zmq.ROUTER)
                # A client may lag by half of its own mark, which is the same.
                self.replay_endpoint = _bind(router, replay_endpoint, 2 * (num_kept + 1))
            for thread, _ in self._threads:
                thread.start()
        except BaseException:
            self.close()
            raise

    def _add_thread(
        self, name: str, target: Callable[[zmq.Socket[bytes]], None], kind: int
    ) -> zmq.Socket[bytes]:
        """Make a thread, which `close` waits for, and the socket that it owns once it runs."""
        socket = self._context.socket(kind)
        thread = Thread(target=target, args=(socket,), name=name, daemon=True)
        self._threads.append((thread, socket))
        return socket

    @property
    def num_dropped(self) -> int:
        """Number of batches that were not sent.

        The queue was full, the publisher was closed, or to send has failed.
        """
        return self._num_full + self._num_failed

    def publish(self, batch: EventBatch) -> None:
        """Publish a batch. It never waits; call it from one thread. After `close` it drops it."""
        if self._is_closed or self._queue.qsize() >= self._max_waiting:
            self._num_full += 1
            return
        self._queue.put((time.time(), batch))

    def close(self) -> None:
        """Send what is left, and end the threads. If it was interrupted, call it again."""
        self._is_closed = True
        for thread, socket in self._threads:
            if thread.ident is None:  # it has not started: nobody else closes its socket
                socket.close(linger=0)
        started = [thread for thread, _ in self._threads if thread.ident is not None]
        self._queue.put(None)
        for thread in started[:1]:
            thread.join()
        self._context.term()  # wakes the replay thread, and waits for its socket
        for thread in started:
            thread.join()

    # On threads of its own

    def _publish_all(self, socket: zmq.Socket[bytes]) -> None:
        with socket:
            while (item := self._queue.get()) is not None:
                try:
                    self._send(socket, *item)
                except Exception:  # of this batch alone, which counts as dropped
                    self._num_failed += 1

    def _send(self, socket: zmq.Socket[bytes], ts: float, batch: EventBatch) -> None:
        payload = encode_batch(ts, batch.events)
        with self._lock:
            self._kept.add(batch.seq, payload)
        socket.send_multipart((self._topic, _seq_bytes(batch.seq), payload))

    def _answer_all(self, socket: zmq.Socket[bytes]) -> None:
        with socket:
            while True:
                try:
                    frames = socket.recv_multipart()
                    self._answer(socket, frames)
                except zmq.ContextTerminated:
                    return
                except Exception as error:  # of this request alone: its client times out
                    _LOGGER.warning("a replay of KV events was not answered: %r", error)

    def _answer(self, socket: zmq.Socket[bytes], frames: list[bytes]) -> None:
        if len(frames) != 3 or len(frames[2]) != SEQ_BYTES:
            return  # no request: whoever sent it gets no answer
        client, _, start = frames
        with self._lock:
            kept = self._kept.since(int.from_bytes(start, "big"))
        for seq, payload in kept:
            socket.send_multipart((client, b"", self._topic, _seq_bytes(seq), payload))
        socket.send_multipart((client, b"", b"", END_OF_REPLAY, b""))


def _bind(socket: zmq.Socket[bytes], endpoint: str, high_water_mark: int) -> str:
    """Bind a socket, and return its address with the port that was bound."""
    socket.setsockopt(zmq.LINGER, _LINGER_MS)
    socket.setsockopt(zmq.SNDHWM, high_water_mark)
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        raise EventAddressError(f"KV events cannot be bound to {endpoint!r}: {error}") from None
    return str(socket.getsockopt_string(zmq.LAST_ENDPOINT))


def _seq_bytes(seq: int) -> bytes:
    return seq.to_bytes(SEQ_BYTES, "big")

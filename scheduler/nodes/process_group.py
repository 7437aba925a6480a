"""Processes that share a model: process 0 sends its calls to the others, over ZeroMQ.

::

    process 0: ROUTER, bound                       each other process: DEALER, connected
                  ◄── share: numbers
    shared: those of all ──►
                  ◄── join: options
    start, or refuse: why ──►
    call: number, digest, frames ──►               executes it
                  ◄── done: number, digest
    stop: why ──►
                  ◄── failed: why, at any time

Connections of ZeroMQ have heartbeats, so that a process that ends, or whose machine is cut off, is
noticed without a call. JAX's own coordination service ends processes that hang in a collective; see
`init_processes`.
"""

from __future__ import annotations

import atexit
import json
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from hashlib import blake2b
from typing import Any, Final, NoReturn

import jax
import numpy as np
import zmq
from jax.experimental import multihost_utils
from zmq.utils.monitor import recv_monitor_message

from ..engine.calls import Call, CallReceiver, CallSender, describe_difference
from ..errors import GroupError
from .channel.address import check_bind, host_of
from .channel.curve import PROTOCOL_FAILURES, CurveKeys
from .channel.errors import ChannelAddressError
from .channel.gate import Gate
from .channel.secret import Secret

DEFAULT_TIMEOUT_S: Final = 120.0
_HEARTBEAT_MS: Final = 2000
_PATIENCE_MS: Final = 10_000
"""Without a word for so long, a connection is dead."""
_LINGER_MS: Final = 1000
_PROBE_S: Final = 0.5
"""Interval at which a wait looks for processes that are lost."""
_AFTER_ERROR_S: Final = 10.0
"""After an error of a computation, time in which a process that is lost is looked for."""
_ADDRESS_BYTES: Final = 64


def init_processes(
    coordinator: str, num_processes: int, process_id: int, *, heartbeat_s: int = 30
) -> None:
    """Connect the processes by ``jax.distributed``; call it before JAX knows its devices.

    Args:
        coordinator: ``host:port`` at which process 0 starts JAX's coordination service, and no
            other address. It has no authentication: keep it in a network that you trust.
        num_processes: how many processes there are.
        process_id: which this is.
        heartbeat_s: after so long without a word from a process, JAX ends the others, even in a
            collective that hangs. JAX's own default is 100.

    Raises:
        GroupError: if they do not all connect within 5 minutes, or the address cannot be had.
    """
    jax.config.update(  # type: ignore[no-untyped-call]  # JAX's
        "jax_cpu_collectives_implementation", "gloo"
    )
    try:
        jax.distributed.initialize(
            coordinator,
            num_processes,
            process_id,
            heartbeat_timeout_seconds=heartbeat_s,
            coordinator_bind_address=coordinator,  # JAX's default is every address of the machine
        )
    except jax.errors.JaxRuntimeError as error:
        text = " ".join(str(error).split())
        raise GroupError(f"the processes did not connect at {coordinator}: {text}") from None


class ProcessGroup:
    """The processes of ``jax.distributed``, for an `Engine` in each. Use it from one thread.

    Close it in process 0: that ends `Engine.follow` in the others. At the exit of a process it is
    closed, too.

    Attributes:
        process_id: 0 for the process that plans.
        num_processes: how many there are.
        address: of process 0, ``host:port``.
    """

    def __init__(
        self,
        bind: str = "127.0.0.1:0",
        *,
        secret: Secret | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        """Bind in process 0, and connect the others to it; all call this at the same time.

        Args:
            bind: address of process 0 that the others can reach, with a numeric host; port 0 takes
                any free one. Only process 0 reads it.
            secret: shared by all; required for an address other than loopback.
            timeout_s: longest wait for a process that is to join, or to report a call; the first
                use of a program, which compiles it, must fit in.

        Raises:
            ChannelAddressError: for a public address without a secret, or one that cannot be bound.
            SecretError: if there is a secret, and ZeroMQ has no CURVE.
            GroupError: in the other processes, if process 0 cannot bind.
        """
        self.process_id, self.num_processes = jax.process_index(), jax.process_count()
        self._timeout_s = timeout_s
        self._sender: CallSender | None = None
        self._receiver: CallReceiver | None = None
        self._failure: str | None = None
        self._is_lost = False  # process 0, of which messages may be left
        self._gate: Gate | None = None
        self._context = zmq.Context()
        try:
            keys = None if secret is None else CurveKeys(secret)
            self._socket = self._context.socket(zmq.DEALER if self.process_id else zmq.ROUTER)
            self._set_options()
            self.address = ""
            try:
                if self.process_id == 0:
                    self.address = self._bind(bind, keys)
            finally:  # the others wait for it
                self.address = _from_process_0(self.address)
            if self.process_id:
                self._connect(keys)
        except BaseException:
            self._destroy(linger_ms=0)
            raise
        atexit.register(self.close)

    def _bind(self, address: str, keys: CurveKeys | None) -> str:
        check_bind(address, has_secret=keys is not None)
        try:
            if keys is None:
                self._socket.set(zmq.IPV6, int(host_of(address).version == 6))
                self._socket.bind(f"tcp://{address}")
                return self._socket.get_string(zmq.LAST_ENDPOINT).removeprefix("tcp://")
            most = 2 * self.num_processes  # also connections that are about to end
            self._gate = Gate.bind(self._socket, keys, None, address, max_connections=most)
            return self._gate.address
        except (OSError, zmq.ZMQError) as error:
            raise ChannelAddressError(f"cannot bind {address}: {error.strerror}") from None

    def _connect(self, keys: CurveKeys | None) -> None:
        if not self.address:
            raise GroupError("process 0 could not open its address")
        if keys is not None:
            keys.guard(self._socket, is_server=False)
        events = zmq.EVENT_DISCONNECTED | PROTOCOL_FAILURES
        self._monitor = self._socket.get_monitor_socket(events)
        self._socket.set(zmq.IPV6, int(host_of(self.address).version == 6))
        self._socket.connect(f"tcp://{self.address}")

    def _set_options(self) -> None:
        socket = self._socket
        socket.set(zmq.LINGER, _LINGER_MS)
        socket.set(zmq.SNDHWM, 0)  # no call may be dropped; `wait` bounds how many are open
        socket.set(zmq.RCVHWM, 0)
        socket.set(zmq.HANDSHAKE_IVL, _PATIENCE_MS)
        socket.set(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
        socket.set(zmq.HEARTBEAT_TIMEOUT, _PATIENCE_MS)
        if self.process_id == 0:
            socket.set(zmq.ROUTER_MANDATORY, 1)  # tells that a process is lost
        else:
            socket.set(zmq.ROUTING_ID, _identity(self.process_id))

    def share(self, numbers: Sequence[int]) -> list[list[int]]:
        """Return the numbers of all processes, by process, in each; all call it, before `join`.

        Raises:
            GroupError: if a process does not come within timeout_s, is lost, or has failed.
        """
        if self.process_id:
            [answer] = self._ask(b"share", json.dumps(list(numbers)), b"shared")
            shared: list[list[int]] = json.loads(answer)
            return shared
        shared = [list(numbers) for _ in range(self.num_processes)]
        for process, text in self._asked(b"share"):
            shared[process] = json.loads(text)
        for process in range(1, self.num_processes):
            self._send(process, [b"shared", json.dumps(shared).encode()])
        return shared

    def join(self, options: Mapping[str, str]) -> None:
        """Wait for all processes, and check that they have the same options.

        Raises:
            GroupError: if a process does not come within timeout_s, is lost, has failed, or has
                other options, with the name of the first one that differs.
        """
        start = blake2b(json.dumps(dict(options)).encode(), digest_size=16).digest()
        if self.process_id:
            self._ask(b"join", json.dumps(dict(options)), b"start")
            self._receiver = CallReceiver(start)
            return
        for process, text in self._asked(b"join"):
            difference = describe_difference(process, json.loads(text), dict(options))
            if difference is not None:
                self._send(process, [b"refuse", difference.encode()])
                self._fail(difference)
        others = range(1, self.num_processes)
        for process in others:
            self._send(process, [b"start"])
        self._sender = CallSender(start, others)

    # Process 0

    def _asked(self, kind: bytes) -> Iterator[tuple[int, bytes]]:
        """Yield what each of the other processes asks, as they come."""
        missing = set(range(1, self.num_processes))
        end = time.monotonic() + self._timeout_s
        while missing:
            if not self._socket.poll(max(0, round((end - time.monotonic()) * 1000))):
                names = ", ".join(map(str, sorted(missing)))
                self._fail(f"process {names} did not join in {self._timeout_s:g} s")
            process, received, frames = self._receive_report()
            if received == b"failed":
                self._fail(f"process {process}: {_text(frames)}")
            if received == kind:
                missing.discard(process)
                yield process, frames[0]

    def tell(self, name: str, flags: Sequence[int] = (), *arrays: np.ndarray) -> None:
        """Send a call to the other processes.

        Raises:
            GroupError: if a process is lost, or has executed another call.
        """
        self._check()
        assert self._sender is not None, "join was not called"
        frames = self._sender.send(Call(name, tuple(flags), arrays))
        for process in range(1, self.num_processes):
            self._send(process, [b"call", *frames])

    def check(self) -> None:
        """Look for processes that are lost or have failed, without a call.

        Raises:
            GroupError: if there is one.
        """
        self._check()
        self._take_reports()
        self._probe()

    def wait(self, arrays: Any) -> None:
        """Wait until arrays are computed, and all processes have reported the calls so far.

        Raises:
            GroupError: if a process is lost, is late, or has executed another call.
        """
        self._check()
        assert self._sender is not None, "join was not called"
        computed = _Computed(arrays)
        end = time.monotonic() + self._timeout_s
        while not computed.wait(_PROBE_S):
            self._take_reports()
            self._probe()
            if time.monotonic() > end:
                self._fail(f"a step was not computed in {self._timeout_s:g} s")
        if computed.error is not None:
            self._explain(computed.error)
        while self._sender.late:
            self._socket.poll(round(_PROBE_S * 1000))
            self._take_reports()
            if self._sender.late and time.monotonic() > end:
                late = ", ".join(map(str, self._sender.late))
                self._fail(f"process {late} did not report a call in {self._timeout_s:g} s")
            if self._sender.late:
                self._probe()

    def _take_reports(self) -> None:
        assert self._sender is not None
        while self._socket.poll(0):
            process, kind, frames = self._receive_report()
            if kind != b"done":
                self._fail(f"process {process}: {_text(frames)}")
            try:
                self._sender.acknowledge(process, frames)
            except GroupError as error:
                self._fail(str(error))

    def _receive_report(self) -> tuple[int, bytes, list[bytes]]:
        sender, kind, *frames = self._socket.recv_multipart()
        process = int(sender) if sender.isdigit() else -1
        if not 0 < process < self.num_processes or not frames:
            self._fail(f"a message came from {sender!r}, which is none of {self.num_processes}")
        return process, kind, frames

    def _probe(self) -> None:
        """Look for processes that are lost."""
        for process in range(1, self.num_processes):
            self._send(process, [b"beat"])

    def _send(self, process: int, frames: list[bytes]) -> None:
        try:
            self._socket.send_multipart([_identity(process), *frames], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            self._fail(f"process {process} is lost: {error.strerror}")

    def _explain(self, error: Exception) -> NoReturn:
        """Raise the error of a computation, or what it comes from: a process that is lost."""
        end = time.monotonic() + _AFTER_ERROR_S
        while time.monotonic() < end:
            self._take_reports()
            self._probe()
            self._socket.poll(100)
        self._fail(f"a step failed: {' '.join(str(error).split())}")

    # The other processes

    def _ask(self, kind: bytes, text: str, answer: bytes) -> list[bytes]:
        """Send a message to process 0, and return the frames of its answer."""
        self._tell_0(kind, text.encode())
        answered, *frames = self._receive_from_0(self._timeout_s)
        if answered != answer:
            self._fail(_text(frames))
        return frames

    def _tell_0(self, *frames: bytes) -> None:
        """Send a message to process 0. If there is no connection, the next wait says why."""
        with suppress(zmq.Again):  # ZeroMQ has given the connection up, and would wait for ever
            self._socket.send_multipart(frames, zmq.NOBLOCK)

    def calls(self) -> Iterator[Call]:
        """Yield the calls of process 0 until it stops; each is reported when the next is asked for.

        Raises:
            GroupError: if process 0 is lost, has failed, or sends what cannot follow.
        """
        assert self._receiver is not None, "join was not called"
        while True:
            kind, *frames = self._receive_from_0(None)
            if kind == b"stop":
                if text := _text(frames):
                    self._failure = text
                    raise GroupError(text)
                return
            try:
                call = self._receiver.receive(frames)
            except GroupError as error:
                self._fail(str(error))
            yield call
            self._tell_0(b"done", *self._receiver.acknowledge())

    def _receive_from_0(self, timeout_s: float | None) -> list[bytes]:
        """Return the next message that is not a heartbeat."""
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)
        end = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left_ms = None if end is None else max(0, round((end - time.monotonic()) * 1000))
            ready = dict(poller.poll(0 if self._is_lost else left_ms))
            if self._socket in ready:  # first: what was sent before the connection ended
                frames: list[bytes] = self._socket.recv_multipart()
                if frames != [b"beat"]:
                    return frames
            elif self._is_lost:
                self._fail(f"process 0 at {self.address} is lost")
            elif self._monitor in ready:
                event = int(recv_monitor_message(self._monitor)["event"])
                if event & PROTOCOL_FAILURES:
                    self._fail(f"process 0 at {self.address} has another secret, or none")
                self._is_lost = True
            else:
                self._fail(f"process 0 at {self.address} did not answer in {timeout_s:g} s")

    # All

    def _check(self) -> None:
        if self._failure is not None:
            raise GroupError(self._failure)

    def _fail(self, text: str) -> NoReturn:
        """Tell the others why this process ends, and raise it."""
        first = self._failure is None
        self._failure = text
        if first:
            self._stop(text)
        raise GroupError(text)

    def _stop(self, text: str) -> None:
        """Send the last message."""
        if self.process_id:
            self._tell_0(b"failed", text.encode())
            return
        for process in range(1, self.num_processes):
            try:
                frames = [_identity(process), b"stop", text.encode()]
                self._socket.send_multipart(frames, zmq.NOBLOCK)
            except zmq.ZMQError:
                continue  # this one is lost already

    def close(self) -> None:
        """End `calls` in the other processes, and close the sockets. Twice does nothing."""
        if not self._context.closed:
            atexit.unregister(self.close)
            if self._failure is None and self.process_id == 0:
                self._stop("")
            if self.process_id:
                self._socket.disable_monitor()
            self._destroy(linger_ms=_LINGER_MS)

    def _destroy(self, *, linger_ms: int) -> None:
        self._context.destroy(linger=linger_ms)
        if self._gate is not None:  # last, because the last messages go through it
            self._gate.close(drain_s=linger_ms / 1000)

    def __enter__(self) -> ProcessGroup:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Close; an error ends the other processes with its text."""
        if error is not None and self._failure is None:
            text = str(error) or type(error).__name__
            # Process 0 adds the number of another one.
            self._failure = text if self.process_id else f"process 0 has failed: {text}"
            self._stop(self._failure)
        self.close()


class _Computed:
    """Waits for arrays in a thread, because nothing ends a wait for a collective that hangs."""

    def __init__(self, arrays: Any) -> None:
        self.error: Exception | None = None
        self._done = threading.Event()
        leaves = jax.tree.leaves(arrays)
        if all(leaf.is_ready() for leaf in leaves):
            self._wait(leaves)
        else:
            threading.Thread(target=self._wait, args=(leaves,), daemon=True).start()

    def _wait(self, arrays: Any) -> None:
        try:
            jax.block_until_ready(arrays)  # type: ignore[no-untyped-call]  # JAX's
        except Exception as error:  # its type differs by backend
            self.error = error
        self._done.set()

    def wait(self, timeout_s: float) -> bool:
        """Return whether they are computed, or have failed."""
        return self._done.wait(timeout_s)


def _identity(process: int) -> bytes:
    return str(process).encode()


def _text(frames: Sequence[bytes]) -> str:
    return b" ".join(frames).decode(errors="replace")


def _from_process_0(text: str) -> str:
    """Return the text of process 0 in all processes, by a collective of JAX."""
    padded = np.zeros(_ADDRESS_BYTES, np.uint8)
    given = text.encode()
    padded[: len(given)] = np.frombuffer(given, np.uint8)
    sent: Any = multihost_utils.broadcast_one_to_all(padded)
    return bytes(np.asarray(sent, np.uint8)).rstrip(b"\0").decode()

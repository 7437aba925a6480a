"""Subjects of nodes: their loops over real engines, the transports, and the channel."""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import count
from threading import Thread
from typing import Any, Final
from unittest.mock import patch

import jax
import numpy as np

from radixkv.scheduler import Request
from radixkv.scheduler.gateway import cache_index
from radixkv.scheduler.gateway.cache_index import CacheReporter
from radixkv.scheduler.handoff import AttemptKey, PartId
from radixkv.scheduler.handoff.gateway_messages import GATEWAY
from radixkv.scheduler.nodes import DecodeEngine, PrefillEngine
from radixkv.scheduler.nodes.channel import Packet, ZmqChannel
from radixkv.scheduler.nodes.channel.codec import FrameReader, encode_frame
from radixkv.scheduler.nodes.channel.gate import Gate
from radixkv.scheduler.nodes.event_loop import NodeEventLoop
from radixkv.scheduler.nodes.remote_nodes import RemoteNodes
from radixkv.scheduler.nodes.transport import InProcessExchange, InProcessTransport, describe
from radixkv.scheduler.nodes.transport.base import Offered, PullFailed, Received, Withdrawn
from radixkv.scheduler.nodes.transport.threaded import ThreadedTransport
from radixkv.scheduler.nodes.transport.transfer_engine import (
    EngineOffer,
    EnginePull,
    TransferEngine,
)

from ..end_to_end.cluster import programs_of
from ..scheduler.nodes.channel.test_zmq_channel import ack
from ..scheduler.nodes.fake_channel import SILENCE_S, TIMING, FakeChannel
from .engine_subjects import MAX_MODEL_LEN, NUM_BLOCKS, SIZES, prompt_of, smallest_engine
from .measure import Operations
from .subjects import BLOCK, Subject, fill

TURN_S: Final = 0.25


class FramedChannel(FakeChannel):
    """A channel in memory that encodes and decodes, as the real one does.

    It passes a SEND as it is: parts within a process have no digests, which the codec demands.
    """

    def __init__(self, ends: dict[str, FakeChannel], name: str, clock: Any) -> None:
        super().__init__(ends, name, lambda *_: False)
        self._frames: deque[bytes | Packet] = deque()
        self._reader = FrameReader(name, clock)
        self._sequence = 0

    def send(self, peer: str, message: Any, pull_info: Any = None) -> bool:
        self._sequence += 1
        packet = Packet(self.name, peer, self.epoch, self._sequence, message, pull_info)
        to = self._ends.get(peer)
        if isinstance(to, FramedChannel):
            to._frames.append(encode_frame(packet) if pull_info is None else packet)
        return True

    def receive(self) -> list[Packet]:
        frames, self._frames = self._frames, deque()
        return [self._reader.read(each) if isinstance(each, bytes) else each for each in frames]

    def wait(self, timeout_s: float) -> bool:
        return bool(self._frames)


class Deployment:
    """A gateway, a prefill node and a decode node, in turns of a virtual clock."""

    def __init__(self, num_blocks: int) -> None:
        self.now = 0.0
        ends: dict[str, FakeChannel] = {}
        new_channel = partial(FramedChannel, ends, clock=self._clock)
        gateway = new_channel(GATEWAY)
        self.nodes = RemoteNodes(gateway, silence_s=SILENCE_S, stream=True, clock=self._clock)
        exchange, model = InProcessExchange(), smallest_engine()._runner.model
        sizes = {**SIZES, "num_blocks": num_blocks, "max_model_len": MAX_MODEL_LEN}
        sizes |= {"epoch": 1, "now": 0.0, "timing": TIMING, "block_size": BLOCK}
        self.engines: list[PrefillEngine | DecodeEngine] = []
        self.loops: list[NodeEventLoop] = []
        for name, kind in (("p", PrefillEngine), ("d", DecodeEngine)):
            with patch.object(cache_index, "_NUM_KEPT", 4):  # full at once
                cache = CacheReporter()
            options: dict[str, Any] = {"on_events": cache.take_in, **sizes}
            with programs_of(smallest_engine()):
                engine: Any = kind(model, InProcessTransport(exchange), **options)
            self.engines.append(engine)
            self.loops.append(
                NodeEventLoop(
                    engine,
                    new_channel(name),
                    gateway=gateway.address,
                    transport="jax",
                    timing=TIMING,
                    cache=cache,
                    clock=self._clock,
                )
            )
        while self.nodes.count("prefill") + self.nodes.count("decode") < 2:
            self.turn()

    def _clock(self) -> float:
        return self.now

    def settle(self) -> None:
        """Let the devices end what they compute."""
        for engine in self.engines:
            jax.block_until_ready((engine._runner.arrays.keys, engine._runner._batch.state))

    def turn(self) -> list[Request]:
        """Let everything run once."""
        self.now += TURN_S
        for loop in self.loops:
            self.settle()
            loop.run_once()
        self.settle()
        return self.nodes.step()

    def serve(self, num_requests: int, first: int = 0) -> None:
        """Serve requests; some are aborted."""
        for number in range(first, first + num_requests):
            self.nodes.add_request(Request(f"r{number}", prompt_of(number), 3))
        if num_requests > 2:
            self.turn()
            self.nodes.abort(f"r{first}")
            self.nodes.abort(f"r{first + num_requests - 1}")
        while self.nodes.has_work or any(engine.scheduler.num_open for engine in self.engines):
            self.turn()
        assert not self.nodes.failures

    def abort_decoding(self, number: int) -> None:
        """Abort a request that decodes, and wait until the nodes have forgotten it."""
        request = Request(f"gone {number}", prompt_of(number), 20)
        self.nodes.add_request(request)
        while len(request.output_tokens) < 2:
            self.turn()
        assert self.nodes.abort(request.request_id)
        while self.nodes.has_work or any(engine.scheduler.num_open for engine in self.engines):
            self.turn()

    def forget(self) -> None:
        """Let so much time pass that nothing is remembered, while all are heard."""
        for _ in range(round(2 * TIMING.remember_s / (SILENCE_S - 1))):
            self.now += SILENCE_S - 1 - TURN_S
            self.turn()

    def calls(self) -> Operations:
        """A request from its arrival to its end, and one that is aborted, in turns."""
        nodes, prompt = self.nodes, prompt_of(0)
        yield "add_request", lambda: nodes.add_request(Request("mine", prompt, 3))
        yield from self._turns(14)
        assert not nodes.has_work and not nodes.failures
        nodes.add_request(Request("gone", prompt, 3))
        yield from self._turns(3)
        yield "abort", lambda: nodes.abort("gone")
        yield from self._turns(3)
        for engine in self.engines:
            yield "load", engine.load
            yield "stats", engine.stats

    def _turns(self, number: int) -> Operations:
        for _ in range(number):
            self.now += TURN_S
            for name, loop in zip(("prefill", "decode"), self.loops, strict=True):
                self.settle()
                yield f"run_once of {name}", loop.run_once
            self.settle()
            yield "step of the gateway", self.nodes.step


def idle_nodes(num_idle: int) -> Operations:
    """Nodes with idle blocks."""
    deployment = Deployment(num_idle + 20)
    for engine in deployment.engines:
        fill(engine.manager, num_idle)
    deployment.now = 0.0
    for _ in range(10):
        deployment.turn()  # the gateway learns of the blocks
    deployment.now = 100.0
    yield from deployment.calls()


def nodes_after_requests(num_ended: int) -> Operations:
    """Nodes that have served requests and forgotten them."""
    deployment = Deployment(40)
    deployment.serve(num_ended)
    deployment.forget()
    for engine in deployment.engines:
        engine.reset_cache()
    deployment.turn()
    deployment.now = 1_000.0
    yield from deployment.calls()


def node_drains() -> Iterator[object]:
    """Nodes whose requests end and are aborted, and peers that come and go."""
    deployment = Deployment(8)  # full after the first drain
    gateway = deployment.nodes._channel
    number = 0
    while True:
        deployment.serve(4, number)
        deployment.abort_decoding(number)
        number += 4
        stranger = FramedChannel({}, f"pod-{number}", deployment._clock)
        stranger._ends.update({loop._channel.name: loop._channel for loop in deployment.loops})  # type: ignore[misc]  # both fake
        for loop in deployment.loops:
            status = replace(loop._status, address="127.0.0.1:9")
            stranger.send(loop._channel.name, status)
        deployment.forget()
        deployment.nodes.drop_summary  # noqa: B018
        yield deployment, gateway


# Transports


class LoopEngine(TransferEngine):
    """A transfer engine within one process, which lets the thread's loop run once.

    Attributes:
        transport: whose loop ends after its turn.
    """

    name = "loop"
    copies_offers = True
    room = "room"
    quarantined_bytes = 0

    def __init__(self) -> None:
        self.served: dict[bytes, tuple[Any, ...]] = {}
        self.transport: ThreadedTransport | None = None
        self._numbers = count()

    def offer(self, arrays: Sequence[Any]) -> LoopOffer:
        return LoopOffer(self, next(self._numbers).to_bytes(8), arrays)

    def pull(self, route: bytes, descriptor: object, digest_key: bytes) -> LoopPull:
        return LoopPull(self.served[route], digest_key)

    def maintain(self) -> None:
        """Do nothing."""

    @property
    def maintain_every_s(self) -> float | None:
        if self.transport is not None:
            self.transport._is_closed = True
        return None

    def close(self) -> None:
        """Do nothing."""


class LoopOffer(EngineOffer):
    def __init__(self, engine: LoopEngine, route: bytes, arrays: Sequence[Any]) -> None:
        self.route, self._engine = route, engine
        engine.served[route] = tuple(arrays)

    def is_ready(self) -> bool:
        return True

    def was_read(self) -> bool:
        return False

    def withdraw(self, was_read: bool) -> None:
        del self._engine.served[self.route]

    def is_withdrawn(self) -> bool:
        return True


class LoopPull(EnginePull):
    def __init__(self, arrays: tuple[Any, ...], digest_key: bytes) -> None:
        self.arrays, self.digest_key = arrays, digest_key

    def advance(self) -> int:
        return len(self.arrays)

    def free(self) -> None:
        self.arrays = ()

    abandon = free


class Unthreaded:
    """A transport whose thread's turns are the test's."""

    def __init__(self) -> None:
        engine = LoopEngine()
        with patch.object(Thread, "start"), patch("atexit.register"):
            self.transport = ThreadedTransport(engine)
        engine.transport = self.transport

    def work(self) -> None:
        """Do what the thread would do now."""
        self.transport._loop()
        self.transport._is_closed = False


ARRAYS: Final = [np.arange(4, dtype=np.uint8)]
LAYOUT: Final = describe(ARRAYS, num_blocks=1)


def part_of(number: int) -> PartId:
    return PartId(AttemptKey(f"r{number}", 1), 1, 1, 1, 0)


def transfers(transport: Any, work: Any, number: int) -> Operations:
    """A part from its offer to its withdrawal, and one whose pull is cancelled."""
    for part, is_cancelled in ((part_of(number), False), (part_of(-1 - number), True)):
        yield "offer", partial(transport.offer, part, ARRAYS, LAYOUT, ttl_s=600.0)
        yield "work", work
        [offered] = yield "poll", transport.poll
        assert isinstance(offered, Offered)
        yield "pull", partial(transport.pull, part, offered.info, LAYOUT, timeout_s=60.0)
        if is_cancelled:
            yield "cancel", partial(transport.cancel, part)
        yield "work", work
        [ended] = yield "poll", transport.poll
        assert isinstance(ended, PullFailed if is_cancelled else Received)
        yield "release", partial(transport.release, part)
        yield "withdraw", partial(transport.withdraw, part.key, was_read=True)
        yield "work", work
        [withdrawn] = yield "poll", transport.poll
        assert isinstance(withdrawn, Withdrawn)
        yield "work", work
    yield "stats", transport.stats


def finish(operations: Operations) -> None:
    """Run operations."""
    result = None
    while True:
        try:
            _, call = operations.send(result)
        except StopIteration:
            return
        result = call()


def threaded_transport(num_ended: int) -> Operations:
    """A transport with a thread, after transfers."""
    unthreaded = Unthreaded()
    for number in range(num_ended):
        finish(transfers(unthreaded.transport, unthreaded.work, number))
    yield from transfers(unthreaded.transport, unthreaded.work, num_ended)


def in_process_transport(num_ended: int) -> Operations:
    """A transport within a process, after transfers."""
    transport = InProcessTransport(InProcessExchange())
    for number in range(num_ended):
        finish(transfers(transport, int, number))
    yield from transfers(transport, int, num_ended)


def transport_drains() -> Iterator[object]:
    """Both transports, whose transfers end, are cancelled and are withdrawn."""
    unthreaded, other = Unthreaded(), InProcessTransport(InProcessExchange())
    number = 0
    while True:
        for _ in range(10):
            number += 1
            finish(transfers(unthreaded.transport, unthreaded.work, number))
            finish(transfers(other, int, number))
        yield unthreaded.transport, other


# The channel


class Monitor:
    """The failed handshakes of an inbox that fails none."""

    def __init__(self) -> None:
        self._end, self._other = socket.socketpair()

    @property
    def file(self) -> int:
        return self._end.fileno()

    def take_all(self) -> Iterator[int]:
        return iter(())

    def close(self) -> None:
        self._end.close()
        self._other.close()


class OpenGate:
    """A gate without a thread, with an inbox and peers of the test."""

    def __init__(self, stack: ExitStack, name: str) -> None:
        self._stack = stack
        self._inbox = stack.enter_context(socket.socket(socket.AF_UNIX))
        self._inbox.bind(f"\0{name}")
        self._inbox.listen(500)
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        self._address = listener.getsockname()
        monitor: Any = Monitor()
        stack.callback(monitor.close)
        with patch.object(Thread, "start"):
            self.gate = Gate(listener, name, monitor, max_connections=500)
        stack.callback(self._close)

    def _close(self) -> None:
        for connection in [*self.gate._unproven, *self.gate._proven]:
            self.gate._close(connection)
        self.gate._selector.close()

    def meet(self) -> Operations:
        """A peer that connects, proves itself, speaks and leaves."""
        peer = self._stack.enter_context(socket.create_connection(self._address))
        yield "turn: accept", self.gate._turn
        peer.sendall(b"\xff")
        yield "turn: greeting", self.gate._turn
        inside, _ = self._inbox.accept()
        self._stack.enter_context(inside)
        inside.recv(1)
        inside.sendall(bytes(400))
        yield "turn: proof", self.gate._turn
        peer.recv(400)
        peer.sendall(b"word")
        yield "turn: word", self.gate._turn
        inside.recv(4)
        yield "refused", self.gate.refused
        self._last = peer, inside

    def part(self) -> Operations:
        """The last peer leaves."""
        for end in self._last:
            end.close()
        yield "turn: end", self.gate._turn


def gate_calls(num_peers: int) -> Operations:
    """A gate with connections."""
    with ExitStack() as stack:
        gate = OpenGate(stack, f"radixkv-costs-{num_peers}")
        for _ in range(num_peers):
            finish(gate.meet())
        yield from gate.meet()
        yield from gate.part()


def channel_calls(num_peers: int) -> Operations:
    """A channel with peers, that it sends to and hears from."""
    with ExitStack() as stack:
        one, other = (ZmqChannel(name, epoch=1) for name in ("one", "other"))
        stack.callback(one.close)
        stack.callback(other.close)
        for number in range(num_peers):
            one.connect(f"peer {number}", "127.0.0.1:9")
        yield from exchange(one, other, "other")
        yield "disconnect", lambda: one.disconnect("other")
        yield "stats", one.stats


def exchange(one: ZmqChannel, other: ZmqChannel, name: str) -> Operations:
    """A message from a channel to another, in its name."""
    message = ack()
    yield "connect", lambda: one.connect(name, other.address)
    yield "send", lambda: one.send(name, message)
    assert other.wait(60.0)
    packets = yield "receive", other.receive
    assert [packet.message for packet in packets] == [message]


def channel_drains() -> Iterator[object]:
    """A channel and a gate, whose peers come and go."""
    with ExitStack() as stack:
        one = ZmqChannel("one", epoch=1)
        stack.callback(one.close)
        gate = OpenGate(stack, "radixkv-costs-drains")
        number = 0
        while True:
            for _ in range(2):
                number += 1
                other = ZmqChannel(f"other {number}", epoch=1)
                finish(exchange(one, other, other.name))
                one.disconnect(other.name)
                other.close()
                with ExitStack() as peers:
                    gate._stack = peers
                    finish(gate.meet())
                    finish(gate.part())
            yield one, gate.gate


SUBJECTS: Final = (
    Subject("nodes with idle blocks", idle_nodes, 100, NUM_BLOCKS - 100, has_jax=True),
    Subject("nodes after requests", nodes_after_requests, 3, 20, has_jax=True),
    Subject("the transport after transfers", threaded_transport, 2, 100),
    Subject("the transport of a process after transfers", in_process_transport, 2, 100),
    Subject("the gate with connections", gate_calls, 2, 60, is_thread=True),
    Subject("the channel with peers", channel_calls, 2, 40),
)
DRAINS: Final = {
    "nodes": node_drains,
    "transports": transport_drains,
    "channel": channel_drains,
}

"""A node in this process whose peer process is killed or stopped at a chosen moment.

``python -m tests.end_to_end.node_faults`` prints how long the node here took to end what it had.
"""

from __future__ import annotations

import argparse
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

from radixkv.scheduler.engine import Engine
from radixkv.scheduler.handoff import Ask, Commit, Grant, Send, Timing
from radixkv.scheduler.handoff.gateway_messages import GATEWAY
from radixkv.scheduler.models import load_model, make_tiny_checkpoint
from radixkv.scheduler.models.weights_digest import weights_digest
from radixkv.scheduler.nodes import DecodeEngine, PrefillEngine
from radixkv.scheduler.nodes.channel.secret import Secret
from radixkv.scheduler.nodes.channel.zmq_channel import ZmqChannel
from radixkv.scheduler.nodes.event_loop import NodeEventLoop
from radixkv.scheduler.nodes.processes import NodeProcesses
from radixkv.scheduler.nodes.remote_nodes import RemoteNodes
from radixkv.scheduler.nodes.transport.registry import open_transport
from radixkv.scheduler.request import Request

from .small import NODE_OPTIONS, NUM_BLOCKS, SIZES, make_engine

SILENCE_S: Final = 0.5
TRANSFER_S: Final = 3.0
TIMING: Final = Timing(SILENCE_S / 5, SILENCE_S, TRANSFER_S, remember_s=1.0)
NEW_TOKENS: Final = 6
_TRIES: Final = 5
PROMPT_TOKENS: Final = 18
MOMENTS: Final[dict[str, tuple[tuple[str, type], ...]]] = {
    # The node here is P: D is lost before ASK, and at each of its moves.
    "prefill": (("sent", Ask), ("received", Grant), ("sent", Send), ("sent", Commit)),
    "decode": (("received", Ask), ("sent", Grant), ("received", Send), ("received", Commit)),
}


class WatchedChannel(ZmqChannel):
    """Calls a function when a message of a class is first sent or received."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.waits_for: tuple[str, type] | None = None
        self.call: Callable[[], None] = lambda: None
        self.loses: type | None = None

    def watch(self, moment: tuple[str, type], call: Callable[[], None]) -> None:
        self.waits_for, self.call = moment, call

    def _see(self, how: str, message: object) -> None:
        if self.waits_for == (how, type(message)):
            self.waits_for = None
            self.call()

    def send(self, peer: str, message: Any, pull_info: Any = None) -> bool:
        if type(message) is self.loses:
            self.loses = None
            return True  # as of a connection that breaks a moment later
        is_sent = super().send(peer, message, pull_info)
        self._see("sent", message)
        return is_sent

    def receive(self) -> list[Any]:
        packets = super().receive()
        for packet in packets:
            self._see("received", packet.message)
        return packets


class Fault(NamedTuple):
    """A fault of the peer, and the time until this node ended the attempt."""

    moment: str
    sign: signal.Signals
    seconds: float


class Pair:
    """This process's node, its peer and their gateway; `turn` drives the node and the gateway."""

    def __init__(self, model_dir: Path, role: str, transport: str, stack: ExitStack) -> None:
        self.role, self.model_dir, self.transport_name = role, model_dir, transport
        self.peer = {"prefill": "decode-0", "decode": "prefill-0"}[role]
        self.processes = stack.enter_context(NodeProcesses())
        secret = self.processes.secret
        self.gateway_channel = stack.enter_context(
            closing(ZmqChannel(GATEWAY, epoch=1, secret=secret))
        )
        self.nodes = RemoteNodes(
            self.gateway_channel,
            silence_s=SILENCE_S,
            max_attempts=999,
        )
        # First, because JAX's cache of programs is not made for two that compile the same at once.
        self.engine = self._make_engine(stack)
        self.start_peer()
        self.channel = stack.enter_context(closing(self._make_channel(secret)))
        self.loop = NodeEventLoop(
            self.engine,
            self.channel,
            gateway=self.gateway_channel.address,
            transport=transport,
            timing=TIMING,
        )
        self.num_requests = 0
        self.wait_for(self.is_complete)

    def _make_channel(self, secret: Secret) -> WatchedChannel:
        return WatchedChannel(f"{self.role}-0", epoch=1, secret=secret)

    def _make_engine(self, stack: ExitStack) -> PrefillEngine | DecodeEngine:
        transport = open_transport(self.transport_name)
        stack.callback(transport.close)
        make = PrefillEngine if self.role == "prefill" else DecodeEngine
        engine = make(
            load_model(self.model_dir),
            transport,
            epoch=1,
            now=time.monotonic(),
            timing=TIMING,
            num_blocks=NUM_BLOCKS,
            weights_revision=weights_digest(self.model_dir),
            **SIZES,
        )
        stack.callback(engine.close)
        return engine

    def start_peer(self) -> None:
        """Start or restart the other process."""
        self.processes.start(
            self.peer,
            f"{self.peer.split('-')[0]}-node",
            [
                *(self.model_dir, "--gateway", self.gateway_channel.address),
                *("--silence-s", SILENCE_S, "--transport", self.transport_name),
                *NODE_OPTIONS,
            ],
        )

    def turn(self) -> None:
        """Run the node and the gateway once."""
        self.loop.run_once()
        self.nodes.step()

    def wait_for(self, is_there: Callable[[], bool]) -> None:
        while not is_there():
            self.turn()

    def is_complete(self) -> bool:
        return self.nodes.count("prefill") == self.nodes.count("decode") == 1

    def submit(self) -> Request:
        """Add a request with a new prompt."""
        self.num_requests += 1
        prompt = prompt_of(self.num_requests)
        request = Request(str(self.num_requests), prompt, NEW_TOKENS)
        self.nodes.add_request(request)
        return request

    def lose_peer(self, moment: tuple[str, type], sign: signal.Signals) -> Fault:
        """Disturb the peer at a moment of an attempt; later requests must succeed."""
        for _ in range(_TRIES):
            seconds = self._strike(moment, sign)
            if seconds is not None:
                return Fault(f"{moment[0]} {moment[1].__name__.upper()}", sign, seconds)
        raise AssertionError(f"no attempt was under way when {moment} came, {_TRIES} times")

    def _strike(self, moment: tuple[str, type], sign: signal.Signals) -> float | None:
        """Return the time until this node has ended its attempts.

        None if it had none: on a slow machine it may have given up who was late to speak.
        """
        request = self.submit()
        name = f"{request.request_id} #1.{self.num_requests - 1}"  # as the gateway calls it
        pid, happened_at = self.processes.pid(self.peer), [0.0]

        def strike() -> None:
            os.kill(pid, sign)
            happened_at[0] = time.monotonic()

        self.channel.watch(moment, strike)
        self.wait_for(lambda: happened_at[0] > 0)
        side = self.engine.scheduler._side
        struck = set(side.keys_of(name))
        self.wait_for(lambda: not struck & set(side.keys_of(name)))
        seconds = time.monotonic() - happened_at[0]
        self.engine.manager.check()
        if sign is signal.SIGSTOP:
            os.kill(pid, signal.SIGCONT)
        else:
            self.start_peer()
        self._finish(request)
        return seconds if struck else None

    def lose_report(self, kind: type) -> None:
        """Lose one message of this node to the gateway; the request must still end."""
        request, self.channel.loses = self.submit(), kind
        self._finish(request)
        assert self.channel.loses is None

    def _finish(self, request: Request) -> None:
        """Complete a request; afterwards this node must hold nothing."""
        self.wait_for(lambda: request.finish_reason is not None)
        assert self.nodes.failures == {}, self.nodes.failures
        assert request.output_tokens == expected(self.model_dir, request.prompt.tolist())
        self.wait_for(
            lambda: self.engine.scheduler.num_open == self.loop._reporter.num_unacked == 0
        )
        stats = self.engine.manager.stats()
        assert stats.live_leases == stats.private_blocks == 0, stats
        self.engine.manager.check()


def prompt_of(number: int) -> list[int]:
    return [(37 * number + 11 * place) % 1000 for place in range(PROMPT_TOKENS)]


_ENGINES: dict[Path, Engine] = {}


def expected(model_dir: Path, prompt: Sequence[int]) -> list[int]:
    """The output of one engine."""
    if model_dir not in _ENGINES:
        _ENGINES[model_dir] = make_engine(load_model(model_dir))
    request = Request("a", prompt, NEW_TOKENS)
    _ENGINES[model_dir].add_request(request)
    _ENGINES[model_dir].run()
    return request.output_tokens


@contextmanager
def pair(model_dir: Path, role: str, transport: str = "jax") -> Iterator[Pair]:
    """A node of a role in this process, and its peer."""
    with ExitStack() as stack:
        yield Pair(model_dir, role, transport, stack)


def main() -> None:
    """Print a line for each fault."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--transport", choices=("jax", "nixl"), default="jax")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        make_tiny_checkpoint(Path(directory))
        for role, moments in MOMENTS.items():
            with pair(Path(directory), role, arguments.transport) as both:
                for moment in moments:
                    for sign in (signal.SIGSTOP, signal.SIGKILL):
                        fault = both.lose_peer(moment, sign)
                        print(
                            f"{role:8} {fault.moment:16} {fault.sign.name}  {fault.seconds:.2f} s"
                        )


if __name__ == "__main__":
    main()

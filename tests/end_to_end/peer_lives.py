"""Lives of peers, each with a new name and address: what they leave behind at those who stay.

``python -m tests.end_to_end.peer_lives --lives 10000`` gives a decode node and a gateway many
prefill nodes, one after the other, over real channels and without a model. With ``--transport``,
a transport pulls a part from each of many transports.
"""

from __future__ import annotations

import argparse
import gc
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from radixkv.scheduler.handoff.gateway_messages import GATEWAY
from radixkv.scheduler.nodes.channel import Secret, ZmqChannel
from radixkv.scheduler.nodes.event_loop import NodeEventLoop
from radixkv.scheduler.nodes.remote_nodes import RemoteNodes
from radixkv.scheduler.nodes.transport import Received, open_transport
from radixkv.scheduler.request import Request

from ..scheduler.nodes.fake_channel import SILENCE_S, TIMING, Decode, Prefill, tokens_of
from ..scheduler.nodes.transport.peer import Peer, content

LATE_S: Final = 60.0
_SECRET: Final = Secret(b"a secret that is long enough")
_TURN_S: Final = 0.05
_STAGING_BYTES: Final = 1 << 20
_PART: Final = (2, 1 << 16)
"""Number of arrays, and the bytes of each."""
_LIVES_OF_A_PROCESS: Final = 25


class Held(NamedTuple):
    """What this process holds."""

    lives: int
    files: int
    sockets: int
    threads: int
    objects: int
    names: int
    rss_kib: int

    @classmethod
    def now(cls, lives: int, names: int = 0) -> Held:
        gc.collect()
        files = list(_files())
        status = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        values = dict(line.split(":\t", 1) for line in status if ":\t" in line)
        return cls(
            lives,
            len(files),
            sum(each.startswith("socket:") for each in files),
            int(values["Threads"]),
            len(gc.get_objects()),
            names,
            int(values["VmRSS"].split()[0]),
        )


def _files() -> Iterator[str]:
    """What the open descriptors are of, without that of the list itself."""
    for each in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            yield os.readlink(f"/proc/self/fd/{each}")


class Stayers:
    """A decode node and a gateway, which outlive prefill nodes; their clock is the test's."""

    def __init__(self, stack: ExitStack) -> None:
        self.now = 0.0
        self._stack = stack
        self._gateway_channel = self._channel(GATEWAY, stack)
        self.gateway = RemoteNodes(
            self._gateway_channel,
            silence_s=SILENCE_S,
            max_attempts=999,  # a node that is slow is silent for a while, by the test's clock
            clock=lambda: self.now,
        )
        self._decode_channel = self._channel("decode-0", stack)
        self._engine = Decode()
        self._loop = self._node(self._engine, self._decode_channel)

    def _channel(self, name: str, stack: ExitStack) -> ZmqChannel:
        channel = ZmqChannel(name, epoch=1, secret=_SECRET)
        channel._reader._clock = lambda: self.now
        return stack.enter_context(closing(channel))

    def _node(self, engine: Any, channel: ZmqChannel) -> NodeEventLoop:
        return NodeEventLoop(
            engine,
            channel,
            gateway=self._gateway_channel.address,
            transport="jax",
            timing=TIMING,
            clock=lambda: self.now,
        )

    @property
    def num_names(self) -> int:
        """The names that the two know, wherever they keep them."""
        gateway: Any = self.gateway._gateway
        return sum(
            len(each)
            for each in (
                *(channel._reader._last for channel in self._channels),
                *(channel._peers for channel in self._channels),
                self._loop._heard_at,
                gateway.nodes,
                gateway.gone,
                gateway._gateway._unheard,
                gateway.loads,
            )
        )

    @property
    def _channels(self) -> tuple[ZmqChannel, ZmqChannel]:
        return self._gateway_channel, self._decode_channel

    def live(self, life: int) -> None:
        """A prefill node comes, serves a request, and is gone without a word."""
        request = Request(f"request-{life}", [1, 2, 3], 2)
        with ExitStack() as stack:
            loop = self._node(Prefill(), self._channel(f"prefill-{life}", stack))
            self.gateway.add_request(request)
            end = time.monotonic() + LATE_S
            ended: list[Request] = []
            while not ended:
                assert time.monotonic() < end, self.gateway.drop_summary
                self.now += _TURN_S
                for each in (loop, self._loop):
                    each.run_once()
                ended = self.gateway.step()
        assert ended == [request]
        assert tuple(request.output_tokens) == tokens_of(request.request_id), request
        self._engine.given_up.clear()
        # The node is silent for so long that both forget it.
        for _ in range(2):
            self.now += TIMING.remember_s + SILENCE_S
            while f"prefill-{life}" in self.gateway.nodes or not self.gateway.count("decode"):
                self.now += _TURN_S
                self._loop.run_once()
                self.gateway.step()
            self._loop.run_once()


def lives_of_nodes(number: int, every: int) -> Iterator[Held]:
    """Yield what is held after each so many lives."""
    with ExitStack() as stack:
        stayers = Stayers(stack)
        for life in range(number + 1):
            if life % every == 0:
                yield Held.now(life, stayers.num_names)
            stayers.live(life)


def lives_of_transports(name: str, number: int, every: int) -> Iterator[Held]:
    """Yield what is held after each so many lives of a transport in another process."""
    with ExitStack() as stack:
        transport = stack.enter_context(closing(open_transport(name, staging_bytes=_STAGING_BYTES)))
        for life in range(number + 1):
            if life % every == 0:
                yield Held.now(life)
            if life % _LIVES_OF_A_PROCESS == 0:
                peer = Peer(name, {})
                stack.callback(peer.kill)
            assert peer.ask(f"reopen {_STAGING_BYTES}") == "open"
            info = peer.offer(1, *_PART)
            transport.pull(info.part_id, info, info.descriptor, timeout_s=LATE_S)
            while not (events := transport.poll()):
                time.sleep(1e-3)
            (received,) = events
            assert isinstance(received, Received), received
            assert all(map(np.array_equal, received.arrays, content(1, *_PART)))
            del received, events
            transport.release(info.part_id)
            if life % _LIVES_OF_A_PROCESS == _LIVES_OF_A_PROCESS - 1:
                peer.kill()


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lives", type=int, default=10_000)
    parser.add_argument("--transport", choices=("jax", "nixl"))
    arguments = parser.parse_args()
    started = time.monotonic()
    every = max(1, arguments.lives // 10)
    if arguments.transport is None:
        lives = lives_of_nodes(arguments.lives, every)
    else:
        lives = lives_of_transports(arguments.transport, arguments.lives, every)
    print("| Lives | Descriptors | Sockets | Threads | Objects | Names | RSS in KiB |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for held in lives:
        print(f"| {' | '.join(f'{each:,}' for each in held)} |", flush=True)
    print(f"\n{time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()

"""Prefill and decode node processes, and their gateway, under connections without their secret.

``python -m tests.end_to_end.strangers --connections 100000 --transport nixl`` prints what each
process occupied. Every request must get its tokens, also of a decode node that starts meanwhile.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Final, NamedTuple

from radixkv.scheduler.handoff.gateway_messages import GATEWAY
from radixkv.scheduler.models import make_tiny_checkpoint
from radixkv.scheduler.nodes.channel.zmq_channel import ZmqChannel
from radixkv.scheduler.nodes.open_files import reserve_files
from radixkv.scheduler.nodes.processes import NodeProcesses
from radixkv.scheduler.nodes.remote_nodes import RemoteNodes
from radixkv.scheduler.request import Request

from .node_faults import NEW_TOKENS, expected, prompt_of
from .small import NODE_OPTIONS

NUM_FILES: Final = 1024
SILENCE_S: Final = 2.0
_HELD: Final = 300
"""Connections that the strangers keep open; the oldest is closed for each new one."""
_BATCH: Final = 4
_GREETING: Final = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)
_HELLO: Final = b"\x04\xc8\x05HELLO\x01\x00"
SAYINGS: Final = (
    b"",
    b"\xff",
    _GREETING,
    _GREETING + _HELLO.ljust(202, b"x"),  # with another public key
    _GREETING + b"\x06" + (5 << 20).to_bytes(8, "big") + bytes(1 << 17),  # a long command
    b"GET / HTTP/1.1\r\n\r\n",
)


class Usage(NamedTuple):
    """What a process occupies."""

    files: int
    threads: int
    rss_mib: int


def usage(pid: int) -> Usage:
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    values = dict(line.split(":\t", 1) for line in status if ":\t" in line)
    rss_kib = int(values["VmRSS"].split()[0])
    return Usage(len(os.listdir(f"/proc/{pid}/fd")), int(values["Threads"]), rss_kib >> 10)


def attack(ports: Sequence[int], num_connections: int, seed: int) -> None:
    """Open connections to all ports in turn, and say one of the sayings."""
    held: deque[socket.socket] = deque()
    chosen = random.Random(seed)
    for number in range(num_connections):
        stranger = socket.socket()
        stranger.settimeout(1.0)
        with suppress(OSError):
            stranger.connect(("127.0.0.1", ports[number % len(ports)]))
            stranger.setblocking(False)
            stranger.send(chosen.choice(SAYINGS))
        held.append(stranger)
        if len(held) > _HELD:
            held.popleft().close()


class Cluster:
    """A prefill and a decode node, and their gateway, which is this process."""

    def __init__(self, model_dir: Path, transport: str, stack: ExitStack) -> None:
        self.model_dir, self._transport = model_dir, transport
        self.processes = stack.enter_context(NodeProcesses())
        secret, max_peers = self.processes.secret, reserve_files(transport=False)
        channel = ZmqChannel(GATEWAY, epoch=1, secret=secret, max_peers=max_peers)
        self.channel = stack.enter_context(closing(channel))
        self.nodes = RemoteNodes(
            self.channel,
            silence_s=SILENCE_S,
            max_attempts=999,
        )
        self.num_requests = 0
        self._open: list[Request] = []
        for name in ("prefill-0", "decode-0"):
            self.start(name)
        while self.nodes.count("prefill") + self.nodes.count("decode") < 2:
            self.step()

    def start(self, name: str) -> None:
        self.processes.start(
            name,
            f"{name.split('-')[0]}-node",
            [
                *(self.model_dir, "--gateway", self.channel.address, "--silence-s", SILENCE_S),
                *("--transport", self._transport, *NODE_OPTIONS),
            ],
        )
        limits = (NUM_FILES, NUM_FILES)
        resource.prlimit(self.processes.pid(name), resource.RLIMIT_NOFILE, limits)

    def kill(self, name: str) -> None:
        """End a node without notice."""
        os.kill(self.processes.pid(name), signal.SIGKILL)

    def ports(self) -> list[int]:
        addresses = [node.status.address for node in self.nodes.nodes.values()]
        return [int(each.rpartition(":")[2]) for each in (*addresses, self.channel.address)]

    def usage(self) -> dict[str, Usage]:
        nodes = {name: usage(self.processes.pid(name)) for name in ("prefill-0", "decode-0")}
        return {**nodes, GATEWAY: usage(os.getpid())}

    def step(self) -> None:
        self.nodes.step()
        self.processes.check()
        for request in [each for each in self._open if each.finish_reason is not None]:
            self._open.remove(request)
            prompt = request.prompt.tolist()
            assert request.output_tokens == expected(self.model_dir, prompt), request

    def keep_busy(self) -> None:
        """Take a turn; there are always a few requests."""
        while len(self._open) < _BATCH:
            self.num_requests += 1
            request = Request(str(self.num_requests), prompt_of(self.num_requests), NEW_TOKENS)
            self.nodes.add_request(request)
            self._open.append(request)
        self.step()
        assert self.nodes.failures == {}, self.nodes.failures

    def finish(self) -> None:
        """Complete the open requests."""
        while self._open:
            self.step()
        assert self.nodes.failures == {}, self.nodes.failures


class Attack(NamedTuple):
    """What the processes occupied before the strangers came, at most, and in the end."""

    before: dict[str, Usage]
    most: dict[str, Usage]
    after: dict[str, Usage]
    num_requests: int
    num_refused: int


def under_attack(cluster: Cluster, num_connections: int, restarts: int) -> Attack:
    """Complete requests until the strangers have made all connections."""
    for _ in range(50):
        cluster.keep_busy()
    before = most = cluster.usage()
    first = cluster.num_requests
    share = num_connections // (restarts + 1)
    for part in range(restarts + 1):
        ports = [*map(str, cluster.ports())]
        command = [sys.executable, "-m", __name__ if __name__ != "__main__" else __spec__.name]
        strangers = subprocess.Popen([*command, "--attack", *ports, "--connections", str(share)])
        has_restarted, next_at = part == restarts, time.monotonic()
        try:
            while strangers.poll() is None or not has_restarted:
                cluster.keep_busy()
                if time.monotonic() >= next_at:
                    next_at = time.monotonic() + 0.5
                    now = cluster.usage()
                    most = {
                        name: Usage(*map(max, zip(most[name], now[name], strict=True)))
                        for name in now
                    }
                    if not has_restarted and cluster.num_requests > first + 5:
                        cluster.kill("decode-0")
                        cluster.start("decode-0")
                        has_restarted = True
        finally:
            strangers.kill()
            strangers.wait()
        assert strangers.returncode == 0
        while cluster.nodes.count("decode") == 0:
            cluster.step()
    cluster.finish()
    gc.collect()
    refused = cluster.channel.stats().refused.total()
    return Attack(before, most, cluster.usage(), cluster.num_requests - first, refused)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--connections", type=int, default=100_000)
    parser.add_argument("--restarts", type=int, default=2)
    parser.add_argument("--transport", choices=("jax", "nixl"), default="jax")
    parser.add_argument("--attack", nargs="+", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.attack:
        attack(arguments.attack, arguments.connections, os.getpid())
        return
    started = time.monotonic()
    resource.setrlimit(resource.RLIMIT_NOFILE, (NUM_FILES, NUM_FILES))
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        make_tiny_checkpoint(Path(directory))
        cluster = Cluster(Path(directory), arguments.transport, stack)
        result = under_attack(cluster, arguments.connections, arguments.restarts)
        stats = cluster.processes.stop()
    seconds = time.monotonic() - started
    print(
        f"{arguments.connections:,} connections, {arguments.transport}, {arguments.restarts} "
        f"restarts of the decode node: {result.num_requests} requests right, {seconds:.0f} s; the "
        f"gateway refused {result.num_refused:,}; ended: {sorted(stats)}"
    )
    print("\n| | Descriptors | Threads | RSS in MiB |\n| --- | --- | --- | --- |")
    for name in result.before:
        rows = zip(result.before[name], result.most[name], result.after[name], strict=True)
        cells = [f"{before} / {most} / {after}" for before, most, after in rows]
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()

"""Prefill and decode nodes in network namespaces, whose links break while they restart in turn.

``python -m tests.end_to_end.broken_links --minutes 60`` needs root, Linux, ``ip`` and ``nft``. A
cut loses all packets from one node to another, silently. Every request must get its tokens.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from radixkv.scheduler.handoff.gateway_messages import GATEWAY
from radixkv.scheduler.models import make_tiny_checkpoint
from radixkv.scheduler.nodes.channel.zmq_channel import ZmqChannel
from radixkv.scheduler.nodes.processes import NodeProcesses
from radixkv.scheduler.nodes.remote_nodes import RemoteNodes
from radixkv.scheduler.request import Request

from .node_faults import NEW_TOKENS, expected, prompt_of
from .small import NODE_OPTIONS

PREFILL: Final = ("prefill-0", "prefill-1", "prefill-2")
DECODE: Final = ("decode-0", "decode-1")
NODES: Final = (*PREFILL, *DECODE)
ADDRESSES: Final = {name: f"10.77.0.{i + 1}" for i, name in enumerate((GATEWAY, *NODES))}
DEVICE: Final = "eth0"
TABLE: Final = (
    "add table ip cuts; add set ip cuts lost { type ipv4_addr; }; "
    "add chain ip cuts input { type filter hook input priority 0; }; "
    "add rule ip cuts input ip saddr @lost drop"
)
LINKS: Final = (*((GATEWAY, name) for name in NODES), *((p, d) for p in PREFILL for d in DECODE))
MOST_CUT: Final = 4
OPEN: Final = 6
SILENCE_S: Final = 2.0


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


def namespace_of(name: str) -> str:
    return f"radixkv-{name}"


@contextmanager
def in_namespace(name: str) -> Iterator[None]:
    """Move this thread, and the processes that it starts, into a namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    here = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    there = os.open(f"/var/run/netns/{namespace_of(name)}", os.O_RDONLY)
    try:
        if libc.setns(there, 0):
            raise OSError(ctypes.get_errno(), "setns failed")
        yield
    finally:
        libc.setns(here, 0)
        os.close(here)
        os.close(there)


@contextmanager
def namespaces() -> Iterator[None]:
    """Make a namespace for the gateway and each node, on one bridge."""
    bridge = namespace_of(GATEWAY)
    try:
        for name, address in ADDRESSES.items():
            space = namespace_of(name)
            run("ip", "netns", "add", space)
            run("ip", "-n", space, "link", "set", "lo", "up")
            if name == GATEWAY:
                run("ip", "-n", space, "link", "add", DEVICE, "type", "bridge")
            else:
                peer = ("peer", "name", name, "netns", bridge)
                run("ip", "-n", space, "link", "add", DEVICE, "type", "veth", *peer)
                run("ip", "-n", bridge, "link", "set", name, "master", DEVICE, "up")
            run("ip", "-n", space, "addr", "add", f"{address}/24", "dev", DEVICE)
            run("ip", "-n", space, "link", "set", DEVICE, "up")
            run("ip", "netns", "exec", space, "nft", TABLE)
        yield
    finally:
        for name in ADDRESSES:
            with suppress(subprocess.CalledProcessError):
                run("ip", "netns", "del", namespace_of(name))


@dataclass
class Network:
    """Cuts of links: the directions that lose everything, and when they heal."""

    heals_at: dict[tuple[str, str], float] = field(default_factory=dict)
    num_cuts: int = 0

    def cut(self, one: str, other: str, until: float) -> None:
        """Lose all packets from one to the other."""
        if (one, other) not in self.heals_at:
            self._change("add", one, other)
            self.num_cuts += 1
        self.heals_at[one, other] = max(until, self.heals_at.get((one, other), 0.0))

    def heal(self, now: float) -> None:
        """Mend what is due."""
        for link in [link for link, at in self.heals_at.items() if at <= now]:
            del self.heals_at[link]
            self._change("delete", *link)

    def _change(self, verb: str, one: str, other: str) -> None:
        change = f"{verb} element ip cuts lost {{ {ADDRESSES[one]} }}"
        run("ip", "netns", "exec", namespace_of(other), "nft", change)


class Deployment:
    """Nodes in their namespaces, and their gateway, which is this process in its own."""

    def __init__(self, model_dir: Path, seed: int, stack: ExitStack) -> None:
        self.model_dir = model_dir
        self.random = random.Random(seed)
        self.network = Network()
        self.processes = stack.enter_context(NodeProcesses())
        bind = f"{ADDRESSES[GATEWAY]}:5557"
        channel = ZmqChannel(GATEWAY, epoch=1, bind=bind, secret=self.processes.secret)
        self.channel = stack.enter_context(closing(channel))
        self.nodes = RemoteNodes(self.channel, silence_s=SILENCE_S, max_attempts=3)
        self.num_right = self.num_restarts = 0
        self.longest_s = 0.0
        self.failures: list[str] = []
        self._open: dict[str, tuple[Request, float]] = {}
        self._number = 0
        for name in NODES:
            self._start(name)

    def _start(self, name: str) -> None:
        listen = f"{ADDRESSES[name]}:5558"
        with in_namespace(name):
            self.processes.start(
                name,
                f"{name.split('-')[0]}-node",
                [
                    *(self.model_dir, "--gateway", self.channel.address, "--listen", listen),
                    *("--silence-s", SILENCE_S, *NODE_OPTIONS),
                ],
            )

    def restart(self, name: str) -> None:
        """End a node, politely or not, and start it again."""
        how = self.random.choice((signal.SIGTERM, signal.SIGKILL))
        os.kill(self.processes.pid(name), how)
        while name not in self.processes.ended():
            self.step()
        self._start(name)
        self.num_restarts += 1

    def break_something(self) -> None:
        """Cut a link, one way or both, or all links of a node."""
        until = time.monotonic() + self.random.uniform(1, 45)
        if self.random.random() < 0.2:
            name = self.random.choice(NODES)
            links = [link for link in LINKS if name in link]
        elif len(self.network.heals_at) < MOST_CUT:
            links = [self.random.choice(LINKS)]
        else:
            return
        way = self.random.choice(("both", "there", "back"))
        for one, other in links:
            if way != "back":
                self.network.cut(one, other, until)
            if way != "there":
                self.network.cut(other, one, until)

    def step(self) -> None:
        """Heal what is due, keep requests open, and compare what has ended."""
        self.network.heal(time.monotonic())
        while len(self._open) < OPEN and not self.is_ending:
            self._number += 1
            request = Request(str(self._number), prompt_of(self._number), NEW_TOKENS)
            self.nodes.add_request(request)
            self._open[request.request_id] = request, time.monotonic()
        self.nodes.step()
        for name, (request, began) in list(self._open.items()):
            if request.finish_reason is None:
                continue
            del self._open[name]
            self.longest_s = max(self.longest_s, time.monotonic() - began)
            if name in self.nodes.failures:
                self.failures.append(f"{name}: {self.nodes.failures.pop(name)}")
            elif request.output_tokens != expected(self.model_dir, request.prompt.tolist()):
                self.failures.append(f"{name}: other tokens: {request.output_tokens}")
            else:
                self.num_right += 1

    is_ending = False

    def run(self, seconds: float) -> None:
        """Break links and restart nodes for some time, then complete what is open."""
        while self.nodes.count("prefill") + self.nodes.count("decode") < len(NODES):
            self.step()
            self.processes.check()
        began = time.monotonic()
        break_at, restart_at, turn = began, began + 20, 0
        while (now := time.monotonic()) < began + seconds:
            self.step()
            if now >= break_at:
                break_at = now + self.random.uniform(1, 10)
                self.break_something()
            if now >= restart_at:
                restart_at = now + self.random.uniform(20, 60)
                self.restart(NODES[turn % len(NODES)])
                turn += 1
        self.network.heal(float("inf"))
        self.is_ending = True
        while self._open:
            self.step()


def main() -> None:
    """Print a line; the exit status is 1 if a request had no answer, or a wrong one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}", flush=True)
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        make_tiny_checkpoint(directory)
        stack.enter_context(namespaces())
        stack.enter_context(in_namespace(GATEWAY))
        deployment = Deployment(directory, arguments.seed, stack)
        deployment.run(60 * arguments.minutes)
    print(
        f"{arguments.minutes:g} minutes, {deployment.network.num_cuts} cuts, "
        f"{deployment.num_restarts} restarts: {deployment.num_right} requests right, "
        f"{len(deployment.failures)} failed; the longest took {deployment.longest_s:.0f} s"
    )
    for failure in deployment.failures:
        print(failure)
    sys.exit(1 if deployment.failures else 0)


if __name__ == "__main__":
    main()

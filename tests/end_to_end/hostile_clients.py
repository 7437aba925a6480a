"""Hostile clients of `radixkv serve` in a process of its own, beside clients that behave.

``python -m tests.end_to_end.hostile_clients`` starts the server as a user would, with a limit of
1,024 file descriptors and a storage tier on a full disk, attacks it in every way below, and prints
what the others noticed, and what the server holds afterwards. Then it kills a node behind another.
Needs Linux and ``unshare``, for a small file system of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import resource
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, Final

from radixkv.scheduler.models import make_tiny_checkpoint

from ..tokenizers import add_tokenizer

DESCRIPTORS: Final = 1024
MAX_MODEL_LEN: Final = 2048
MAX_CONNECTIONS: Final = 512
TIMEOUT_S: Final = 120.0
"""A client that behaves gives up after this time, which counts as a failure."""

_PROMPTS: Final = tuple(f"the cache holds {word}" for word in ("keys", "values", "naïve 🙂", ""))
_HEAD: Final = "POST {} HTTP/1.1\r\nhost: a\r\ncontent-length: {}\r\n\r\n"
_SIZES: Final = ("--block-size", "8", "--max-running", "4", "--token-budget", "32")


# The server


class ServerProcess:
    """`radixkv serve` as a user starts it.

    Attributes:
        port: where it listens.
        pid: of the server.
    """

    def __init__(self, directory: Path, *options: str, disk: Path | None = None) -> None:
        """Start it, and wait until it accepts connections.

        Args:
            directory: of the checkpoint.
            options: of the command.
            disk: a directory in which it sees a file system of 256 KiB; nobody else does.

        Raises:
            AssertionError: if it ends before.
        """
        command = [sys.executable, "-m", "radixkv.scheduler.cli.main", "serve", str(directory)]
        command += ["--served-model-name", "tiny", "--port", "0", *options]
        if disk is not None:
            mount = 'mount -t tmpfs -o size=256k,mode=700 tmpfs "$0" && exec "$@"'
            command = ["unshare", "-rm", "sh", "-c", mount, str(disk), *command]
        command = ["prlimit", f"--nofile={DESCRIPTORS}:{DESCRIPTORS}", *command]
        self._log: list[str] = []
        self._process = subprocess.Popen(
            command, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        self.pid = self._process.pid
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._log.append(line)
            if found := re.search(r" is served at http://127\.0\.0\.1:(\d+)/v1$", line):
                self.port = int(found[1])
                break
        else:
            raise AssertionError("".join(self._log))
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def log(self) -> str:
        """What it has said."""
        return "".join(self._log)

    def descriptors(self) -> int:
        """Return how many file descriptors it has."""
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    def memory_mib(self) -> float:
        """Return its resident memory."""
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * resource.getpagesize() / 2**20

    def children(self, kind: str) -> list[int]:
        """Return the processes that it has started with a word in their command lines."""
        found = []
        for task in Path(f"/proc/{self.pid}/task").iterdir():
            for pid in (task / "children").read_text().split():
                if kind in Path(f"/proc/{pid}/cmdline").read_text().split("\0"):
                    found.append(int(pid))
        return found

    def free_bytes(self, disk: Path) -> int:
        """Return how much room its file system has."""
        free = os.statvfs(f"/proc/{self.pid}/root{disk}")
        return free.f_bavail * free.f_frsize

    def stop(self) -> int:
        """End it as a service manager does, and return its status."""
        self._process.send_signal(signal.SIGTERM)
        status = self._process.wait(TIMEOUT_S)
        self._reader.join()
        assert self._process.stderr is not None
        self._process.stderr.close()
        return status

    def kill(self) -> None:
        """End it and all that it has started."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()

    def _read(self) -> None:
        assert self._process.stderr is not None
        with suppress(ValueError):  # it is closed
            self._log.extend(self._process.stderr)


@contextmanager
def running(directory: Path, *options: str, disk: Path | None = None) -> Iterator[ServerProcess]:
    """A server, which ends whatever happens."""
    server = ServerProcess(directory, *options, disk=disk)
    try:
        yield server
    finally:
        server.kill()


def make_model(directory: Path) -> None:
    """Write a tiny checkpoint with a tokenizer."""
    make_tiny_checkpoint(directory, "qwen3", overrides={"vocab_size": 340})
    add_tokenizer(directory)


# Clients that behave


def ask(port: int, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
    """Send a request over a connection of its own; return status and body."""
    connection = HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
    try:
        connection.request(method, path, body, {"connection": "close"})
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def complete(
    port: int, prompt: str, *, stream: bool = False, on_busy: Callable[[], object] = lambda: None
) -> str:
    """Return the text of a greedy completion; ask again while there are too many requests.

    Args:
        port: of the server.
        prompt, stream: of the request.
        on_busy: called for each refusal of one request or connection too many.

    Raises:
        AssertionError: for any other refusal.
    """
    fields = {"prompt": prompt, "max_tokens": 24, "temperature": 0, "stream": stream}
    status, body = ask(port, "POST", "/v1/completions", body_of(**fields))
    while b'"code":"too_many_' in body:
        on_busy()
        time.sleep(1.0)  # as Retry-After says
        status, body = ask(port, "POST", "/v1/completions", body_of(**fields))
    assert status == 200, (status, body)
    if not stream:
        return str(json.loads(body)["choices"][0]["text"])
    *events, done, end = body.decode().split("\n\n")
    assert (done, end) == ("data: [DONE]", ""), body[-200:]
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    return "".join(chunk["choices"][0]["text"] for chunk in chunks)


@dataclass
class Witnesses:
    """Clients in threads that ask for the same again and again, and compare.

    Attributes:
        expected: text of each prompt.
        latencies_s: how long each answer took.
        busy: how often they were asked to come again.
        failures: what went wrong.
    """

    port: int
    expected: dict[str, str]
    latencies_s: list[float] = field(default_factory=list)
    busy: int = 0
    failures: list[str] = field(default_factory=list)
    _stops: threading.Event = field(default_factory=threading.Event)

    def _run(self, seed: int, min_answers: int) -> None:
        choose = random.Random(seed)
        answers = 0
        while answers < min_answers or not self._stops.is_set():
            prompt, begun = choose.choice(_PROMPTS), time.monotonic()
            try:
                stream = choose.random() < 0.5
                text = complete(self.port, prompt, stream=stream, on_busy=self._come_again)
                assert text == self.expected[prompt], (text, self.expected[prompt])
            except Exception as error:
                self.failures.append(repr(error))
            self.latencies_s.append(time.monotonic() - begun)
            answers += 1

    def _come_again(self) -> None:
        self.busy += 1

    @contextmanager
    def watching(self, num: int = 2, min_answers: int = 2) -> Iterator[None]:
        """Ask during the block, a few times each at least."""
        self._stops.clear()
        threads = [
            threading.Thread(target=self._run, args=(seed, min_answers)) for seed in range(num)
        ]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._stops.set()
            for thread in threads:
                thread.join()


# Attacks


def body_of(**fields: Any) -> bytes:
    """Return the body of a request."""
    return json.dumps({"model": "tiny", **fields}).encode()


def request_of(body: bytes, path: str = "/v1/completions") -> bytes:
    """Return a whole request."""
    return _HEAD.format(path, len(body)).encode() + body


Attack = Callable[["Attacker"], Awaitable[None]]


class Attacker:
    """One connection of a hostile client.

    Attributes:
        rng: choices.
        patience_s: how long it holds its connection.
    """

    def __init__(self, port: int, seed: int, patience_s: float) -> None:
        self._port = port
        self.rng = random.Random(seed)
        self.patience_s = patience_s

    async def connect(self, receive_bytes: int | None = None) -> socket.socket:
        """Open a connection."""
        opened = socket.socket()
        opened.setblocking(False)
        if receive_bytes is not None:
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        await asyncio.get_running_loop().sock_connect(opened, ("127.0.0.1", self._port))
        self.socket = opened
        return opened

    async def send(self, data: bytes) -> None:
        """Send bytes."""
        await asyncio.get_running_loop().sock_sendall(self.socket, data)

    async def receive(self) -> bytes:
        """Return some bytes, or none at the end."""
        return await asyncio.get_running_loop().sock_recv(self.socket, 65536)

    async def drain(self) -> bytes:
        """Read until the server ends the connection."""
        found = b""
        while data := await self.receive():
            found = (found + data)[-65536:]
        return found

    async def drip(self, data: bytes, gap_s: float = 0.02) -> None:
        """Send byte after byte."""
        for each in data:
            await self.send(bytes([each]))
            await asyncio.sleep(gap_s)

    def reset(self) -> None:
        """Close at once, so that the server sees a reset."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()

    async def run(self, attack: Attack) -> None:
        """Attack until the server closes the connection, or patience ends."""
        with suppress(OSError, TimeoutError):  # refused, reset: as it should
            async with asyncio.timeout(self.patience_s):
                await attack(self)
        if hasattr(self, "socket"):
            self.reset()


async def says_nothing(client: Attacker) -> None:
    """Open a connection."""
    await client.connect()
    await client.drain()


async def drips_a_head(client: Attacker) -> None:
    """Send a head byte by byte."""
    await client.connect()
    await client.drip(b"POST /v1/completions HTTP/1.1\r\n" + b"x: y\r\n" * 10**4)


async def drips_a_body(client: Attacker) -> None:
    """Send a body of which a part is there at once, and the rest byte by byte."""
    await client.connect()
    await client.send(_HEAD.format("/v1/completions", 4 * 2**20).encode())
    await client.send(b" " * client.rng.choice([1, 2**16, 2**20]))
    await client.drip(b" " * 10**5)


async def reads_nothing(client: Attacker) -> None:
    """Ask for a long answer, and do not read it."""
    await client.connect(receive_bytes=4096)
    fields: dict[str, Any] = {"max_tokens": 1000, "ignore_eos": True, "return_token_ids": True}
    await client.send(request_of(body_of(prompt="the cache", stream=True, **fields)))
    await asyncio.sleep(client.patience_s)


async def reads_slowly(client: Attacker) -> None:
    """Ask for a long answer, and read it byte by byte."""
    await client.connect(receive_bytes=4096)
    fields: dict[str, Any] = {"max_tokens": 300, "ignore_eos": True}
    await client.send(request_of(body_of(prompt="the cache", stream=True, **fields)))
    while await asyncio.get_running_loop().sock_recv(client.socket, 1):
        await asyncio.sleep(0.01)


async def sends_too_much(client: Attacker) -> None:
    """Send heads and bodies above the limits."""
    await client.connect()
    head, size = _HEAD.format("/v1/completions", 8 * 2**20).encode(), 8 * 2**20
    await client.send(
        client.rng.choice(
            [
                head + b"x" * size,
                _HEAD.format("/v1/completions", 10**18).encode() + b"x" * 2**20,
                b"GET /" + b"x" * 2**20 + b" HTTP/1.1\r\n\r\n",
                b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * 2**17,
                b"POST /tokenize HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n"
                + b"fffff\r\n%b\r\n" % (b"x" * 0xFFFFF) * 8,
            ]
        )
    )
    await client.drain()


async def sends_nonsense(client: Attacker) -> None:
    """Send what is no HTTP, no JSON, or no request, and whole requests with bytes changed."""
    await client.connect()
    rng, fields = client.rng, body_of(prompt="the cache", max_tokens=1)
    changed = bytearray(request_of(fields))
    for _ in range(rng.randint(1, 8)):
        changed[rng.randrange(len(changed))] = rng.randrange(256)
    await client.send(
        rng.choice(
            [
                rng.randbytes(rng.randrange(1, 4096)),
                b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + rng.randbytes(200),
                b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
                request_of(b"[" * 10**5),
                request_of(b'{"model": "tiny", "prompt": [' + b"[1]," * 10**5 + b"[1]]}"),
                request_of(b'{"model": "tiny", "prompt": "a", "n": ' + b"9" * 10**5 + b"}"),
                request_of(body_of(prompt=["a"] * 10**4)),
                request_of(body_of(prompt="x" * 10**6)),
                request_of(body_of(prompt=[10**9] * 100)),
                request_of(body_of(prompt="a", max_tokens=1, stop=["\ud800"])),
                bytes(changed),
            ]
        )
    )
    client.socket.shutdown(socket.SHUT_WR)
    await client.drain()


async def leaves_in_the_middle(client: Attacker) -> None:
    """Ask for a stream, and go away after some of it."""
    await client.connect()
    fields: dict[str, Any] = {"max_tokens": 500, "ignore_eos": True}
    prompt = f"the cache {client.rng.random()}"
    await client.send(
        request_of(body_of(prompt=prompt, stream=client.rng.random() < 0.7, **fields))
    )
    for _ in range(client.rng.randrange(4)):
        await client.receive()


async def sends_requests_and_reads_nothing(client: Attacker) -> None:
    """Send many requests in a packet, and read no answer."""
    await client.connect(receive_bytes=4096)
    await client.send(request_of(body_of(prompt="the cache", max_tokens=2)) * 200)
    await asyncio.sleep(client.patience_s)


ATTACKS: Final[Sequence[tuple[Attack, float]]] = (
    (says_nothing, 1.0),
    (drips_a_head, 0.5),
    (drips_a_body, 0.2),
    (reads_nothing, 0.02),
    (reads_slowly, 0.02),
    (sends_too_much, 0.05),
    (sends_nonsense, 0.3),
    (leaves_in_the_middle, 0.1),
    (sends_requests_and_reads_nothing, 0.02),
)
"""Each with its part of the connections: those that make the server compute have fewer."""


async def attack(
    port: int, attacks: Sequence[Attack], num: int, *, patience_s: float, seed: int
) -> None:
    """Let a number of connections attack, 2,000 at a time."""
    numbers = iter(range(num))

    async def one_after_the_other() -> None:
        for number in numbers:
            chosen = attacks[number % len(attacks)]
            await Attacker(port, seed + number, patience_s).run(chosen)

    await asyncio.gather(*(one_after_the_other() for _ in range(min(num, 2000))))


def settle(server: ServerProcess, num_descriptors: int) -> int:
    """Wait until the server has given back what its clients held; return its descriptors."""
    deadline = time.monotonic() + 2 * TIMEOUT_S
    while (num := server.descriptors()) > num_descriptors and time.monotonic() < deadline:
        time.sleep(0.05)
    return num


def fill(server: ServerProcess, disk: Path) -> None:
    """Complete new prompts until its disk has room for one block at most.

    Raises:
        AssertionError: if it does not store them.
    """
    for number in range(1000):
        if server.free_bytes(disk) <= 8192:
            return
        complete(server.port, f"{number} is what the cache holds")
    raise AssertionError(f"{server.free_bytes(disk):,} bytes of its disk are free")


# The command


@dataclass(frozen=True)
class Result:
    """What an attack did.

    Attributes:
        name: of the attack.
        num: connections.
        answers, busy, failures, worst_s: of the clients that behave.
        descriptors, memory_mib: of the server afterwards.
    """

    name: str
    num: int
    answers: int
    busy: int
    failures: list[str]
    worst_s: float
    descriptors: int
    memory_mib: float

    def __str__(self) -> str:
        return (
            f"{self.name:34} {self.num:6,} {self.answers:7} {self.busy:4} {len(self.failures):6} "
            f"{self.worst_s:8.1f} {self.descriptors:6} {self.memory_mib:9.0f}"
        )


HEADINGS: Final = (
    f"{'attack':34} {'conns':>6} {'answers':>7} {'busy':>4} {'wrong':>6} {'worst s':>8} "
    f"{'files':>6} {'memory MiB':>9}"
)


def attack_server(
    server: ServerProcess,
    ways: Sequence[tuple[Sequence[Attack], int]],
    *,
    patience_s: float,
    num_descriptors: int,
) -> Iterator[Result]:
    """Attack in several ways, one after the other; yield what each did.

    Args:
        server: the server.
        ways: attacks that come together, and their number of connections.
        patience_s: see `Attacker`.
        num_descriptors: of the server without clients.
    """
    expected = {prompt: complete(server.port, prompt) for prompt in _PROMPTS}
    for attacks, num in ways:
        seed = random.getrandbits(32)
        witnesses = Witnesses(server.port, expected)
        with witnesses.watching():
            asyncio.run(attack(server.port, attacks, num, patience_s=patience_s, seed=seed))
        name = attacks[0].__name__ if len(attacks) == 1 else "all of them"
        yield Result(
            name=name.replace("_", " "),
            num=num,
            answers=len(witnesses.latencies_s),
            busy=witnesses.busy,
            failures=[f"{name}, seed {seed}: {failure}" for failure in witnesses.failures],
            worst_s=max(witnesses.latencies_s),
            descriptors=settle(server, num_descriptors),
            memory_mib=server.memory_mib(),
        )


def kill_a_node(directory: Path) -> tuple[Witnesses, str]:
    """Kill a decode node behind a server while clients wait for their answers."""
    options = ("--disaggregate", "--prefill", "1", "--decode", "2", "--device-blocks", "512")
    sizes = (*_SIZES, "--max-model-len", str(MAX_MODEL_LEN))
    with running(directory, *options, *sizes) as server:
        witnesses = Witnesses(
            server.port, {prompt: complete(server.port, prompt) for prompt in _PROMPTS}
        )
        with witnesses.watching(num=8, min_answers=6):
            while len(witnesses.latencies_s) < 16:
                time.sleep(0.01)
            os.kill(server.children("decode-node")[0], signal.SIGKILL)
        server.stop()
        return witnesses, server.log


@contextmanager
def attacked(directory: Path, disk: Path, *, has_disk: bool = True) -> Iterator[ServerProcess]:
    """A server for `attack_server`: few connections, and a storage tier on a disk that is full.

    Without has_disk, the disk has room, and no file system is mounted.
    """
    tiers = ("--device-blocks", "600", "--host-blocks", "64", "--storage", disk.as_uri())
    limits = ("--max-connections", str(MAX_CONNECTIONS), "--max-model-len", str(MAX_MODEL_LEN))
    small = disk if has_disk else None
    with running(directory, *_SIZES, *tiers, *limits, disk=small) as server:
        yield server


def main() -> int:
    """Attack, and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--connections", type=int, default=10_000, help="of an attack, at most")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--patience-s", type=float, default=15.0)
    parser.add_argument("--no-nodes", action="store_true", help="kill no node")
    options = parser.parse_args()
    failures: list[str] = []
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model, disk = directory / "model", directory / "disk"
        model.mkdir()
        disk.mkdir()
        make_model(model)
        server = stack.enter_context(attacked(model, disk))
        num_descriptors = server.descriptors()
        print(HEADINGS, flush=True)
        everything = tuple(each for each, _ in ATTACKS)
        ways: list[tuple[Sequence[Attack], int]] = [
            ((each,), max(1, int(options.connections * part))) for each, part in ATTACKS
        ]
        ways.append((everything, max(len(ATTACKS), options.connections // 5)))
        ways *= options.rounds
        patience_s = options.patience_s
        for result in attack_server(
            server, ways, patience_s=patience_s, num_descriptors=num_descriptors
        ):
            print(result, flush=True)
            failures += result.failures
        print(f"room on the disk of its storage tier: {server.free_bytes(disk):,} bytes")
        print(f"status of the server at SIGTERM: {server.stop()}")
        if not options.no_nodes:
            witnesses, _ = kill_a_node(model)
            failures += witnesses.failures
            print(
                f"kill -9 of a decode node: {len(witnesses.latencies_s)} answers, "
                f"{len(witnesses.failures)} wrong, at most {max(witnesses.latencies_s):.1f} s"
            )
    for failure in failures[:20]:
        print(failure)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())

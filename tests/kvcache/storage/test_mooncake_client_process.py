"""Mooncake client processes: how they end and what they leave behind."""

from __future__ import annotations

import fcntl
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from radixkv.kvcache.storage import BackendUnreachableError
from radixkv.kvcache.storage.mooncake import client_main
from radixkv.kvcache.storage.mooncake.client_process import ClientProcess

from .conformance import KEYS, MIB, get, put, value_of
from .mooncake_calls import LONG_S, LOST, clients_of, connected, runs
from .mooncake_server import MooncakeServer


def test_a_client_that_dies_fails_one_call(shared_mooncake: MooncakeServer) -> None:
    with connected(shared_mooncake) as backend:
        put(backend, KEYS[2], b"abc")
        backend._idle[0]._process.kill()
        backend._idle[0]._process.wait()
        with pytest.raises(BackendUnreachableError, match=f"^reading failed: {LOST}$"):
            get(backend, KEYS[2], 3)
        assert get(backend, KEYS[2], 3) == (3, [b"abc"])


def test_a_client_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: set[int] = set()
    pipe, memory, close = os.pipe, os.memfd_create, os.close

    def noted_pipe() -> tuple[int, int]:
        ends = pipe()
        opened.update(ends)
        return ends

    def noted_memory(name: str) -> int:
        opened.add(file := memory(name))
        return file

    def noted_close(file: int) -> None:
        opened.discard(file)
        close(file)

    for name, noted in (
        ("pipe", noted_pipe),
        ("memfd_create", noted_memory),
        ("close", noted_close),
    ):
        monkeypatch.setattr(os, name, noted)
    client = ClientProcess("127.0.0.1", "127.0.0.1:1")
    assert opened
    for _ in range(2):
        client.kill()
    assert opened == set()
    assert client._control.fileno() == -1


def test_memory_that_grows_byte_by_byte_is_mapped_a_few_times(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each time, the client registers it again."""
    sizes: list[int] = []
    truncate = os.ftruncate

    def noted(file: int, size: int) -> None:
        sizes.append(size)
        truncate(file, size)

    monkeypatch.setattr(os, "ftruncate", noted)
    client = ClientProcess("127.0.0.1", "127.0.0.1:1")
    for num_bytes in (0, 1, MIB, *range(MIB + 1, MIB + 9), 3 * MIB):
        client.reserve(num_bytes)
        assert len(client.view(num_bytes)) == num_bytes
    client.reserve(5)
    assert sizes == [MIB, 2 * MIB, 4 * MIB]
    client.kill()


@pytest.mark.parametrize("why", ["it was killed", "it found no master"])
def test_a_client_that_exits_before_it_is_connected(
    monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    client = ClientProcess("127.0.0.1", "127.0.0.1:1")
    if why == "it was killed":
        client._process.kill()
        client._process.wait()
    else:
        monkeypatch.setattr(client, "_receive", lambda timeout_s: {"code": -1})
    with pytest.raises(EOFError):
        client.wait_connected(LONG_S)
    assert not client.alive


def test_values_outlive_the_backend_and_its_processes(shared_mooncake: MooncakeServer) -> None:
    value = value_of(5, 2 * MIB)
    with connected(shared_mooncake) as backend:
        put(backend, KEYS[5], value[:1000], value[1000:])
        (client,) = clients_of(backend)
    assert not runs(client)
    with connected(shared_mooncake) as backend:
        assert get(backend, KEYS[5], len(value)) == (len(value), [value])
        assert backend.delete(KEYS[5])


ENGINE = """
import sys, time
from radixkv.kvcache.storage import open_backend, BackendOptions
backend = open_backend(sys.argv[1], BackendOptions(timeout_s=60.0, connect_timeout_s=0.1))
try:
    backend.contains([bytes(32)])
except Exception:
    pass
print(backend._idle[0]._process.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("answers", [True, False])
def test_no_client_outlives_the_engine(shared_mooncake: MooncakeServer, answers: bool) -> None:
    """Not even a client that waits for a master and runs no Python."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = shared_mooncake.port if answers else listener.getsockname()[1]
        engine = subprocess.Popen(
            [sys.executable, "-c", ENGINE, f"mooncake://127.0.0.1:{port}"], stdout=subprocess.PIPE
        )
        assert engine.stdout is not None
        client = int(engine.stdout.readline())
        assert runs(client)
        engine.send_signal(signal.SIGKILL)
        engine.wait()
        engine.stdout.close()
        end = time.monotonic() + LONG_S
        while runs(client):
            assert time.monotonic() < end, "the process is still there"
            time.sleep(0.01)


@pytest.fixture
def many_descriptors() -> Iterator[None]:
    """Let this process and its children have more than 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2_048), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("least", [0, 1_024])
def test_a_client_that_starts_after_the_engine_died_ends(
    least: int, many_descriptors: None
) -> None:
    first, engines_end = os.pipe()
    os.close(engines_end)
    life = fcntl.fcntl(first, fcntl.F_DUPFD, least)
    os.close(first)
    command = [sys.executable, "-P", client_main.__file__, "0", "0", str(life)]
    finished = subprocess.run(
        [*command, "127.0.0.1", "127.0.0.1:1"], pass_fds=[life], timeout=LONG_S, check=False
    )
    os.close(life)
    assert finished.returncode == 0


def open_ports(pid: int) -> list[int]:
    """Return the TCP ports on which a process listens."""
    links = []
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            links.append(os.readlink(path))
    lines = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
    ]
    return [
        int(line[1].rpartition(":")[2], 16)
        for line in lines
        if line[3] == "0A" and f"socket:[{line[9]}]" in links
    ]


def test_nobody_can_connect_to_a_client(shared_mooncake: MooncakeServer) -> None:
    """Mooncake's client listens on the whole network; the filter drops all packets."""
    with connected(shared_mooncake) as backend:
        assert backend.contains(KEYS[:1]) == [False]
        ports = open_ports(clients_of(backend)[0])
        assert ports
        for port in ports:
            with pytest.raises(TimeoutError):
                socket.create_connection(("127.0.0.1", port), timeout=0.2)
        put(backend, KEYS[0], b"abc")
        assert get(backend, KEYS[0], 3) == (3, [b"abc"])
        assert backend.delete(KEYS[0])

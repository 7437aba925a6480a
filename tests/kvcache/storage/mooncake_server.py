"""A real Mooncake store for tests: a master and a process with memory, on loopback."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from http.client import HTTPException
from importlib.util import find_spec
from pathlib import Path

import pytest

from ...ports import reserved_ports

MISSING = (
    "these tests start a Mooncake store: pip install 'radixkv[mooncake]' and "
    "apt-get install libibverbs1"
)
NO_WHEELS = "Mooncake has no wheels for Python 3.14"
HAS_NO_WHEELS = sys.version_info >= (3, 14) and find_spec("mooncake") is None
_A_WHILE_S = 60.0

needs_wheels = pytest.mark.skipif(HAS_NO_WHEELS, reason=NO_WHEELS)
"""For a test that needs the package, but no store."""


def program(name: str) -> str:
    """Return the path of a Mooncake program."""
    package = find_spec("mooncake")
    assert package is not None and package.submodule_search_locations, MISSING
    try:
        ctypes.CDLL("libibverbs.so.1")
    except OSError:
        raise AssertionError(MISSING) from None
    return str(Path(package.submodule_search_locations[0]) / name)


class MooncakeServer:
    """A master that a test can pause, kill and restart, and a memory process that it can kill."""

    def __init__(self, ports: Sequence[int]) -> None:
        self.port, self._metrics_port, self._memory_port = ports
        self._master: subprocess.Popen[bytes] | None = None
        self._memory: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Wait until the master serves and has the memory registered."""
        self._master = _start(
            "mooncake_master",
            "--rpc_address=127.0.0.1",
            f"--rpc_port={self.port}",
            "--metrics_host=127.0.0.1",
            f"--metrics_port={self._metrics_port}",
        )
        self._wait("/health", b"")
        if self._memory is None:
            self._memory = _start(
                "mooncake_client",
                "--host=127.0.0.1",
                f"--port={self._memory_port}",
                f"--master_server_address=127.0.0.1:{self.port}",
                "--metadata_server=P2PHANDSHAKE",
                "--global_segment_size=256MB",
            )
        self._wait("/get_all_segments", b"127.0.0.1")

    def pause(self) -> None:
        """Stop the master; its sockets stay open without answers."""
        assert self._master is not None
        self._master.send_signal(signal.SIGSTOP)
        os.waitpid(self._master.pid, os.WUNTRACED)

    def go_on(self) -> None:
        assert self._master is not None
        self._master.send_signal(signal.SIGCONT)

    def kill_master(self) -> None:
        if self._master is not None:
            _end(self._master)
            self._master = None

    def kill_memory(self) -> None:
        if self._memory is not None:
            _end(self._memory)
            self._memory = None

    def _wait(self, path: str, wanted: bytes) -> None:
        """Wait until a page of the master contains a text."""
        end = time.monotonic() + _A_WHILE_S
        url = f"http://127.0.0.1:{self._metrics_port}{path}"
        while time.monotonic() < end:
            assert self._master is not None and self._master.poll() is None, "the master ended"
            with (
                suppress(OSError, HTTPException),
                urllib.request.urlopen(url, timeout=_A_WHILE_S) as answer,
            ):
                if wanted in answer.read():
                    return
            time.sleep(0.02)
        raise AssertionError(f"a Mooncake store does not start: {path}")


def _start(name: str, *options: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [program(name), *options],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


@contextmanager
def running() -> Iterator[MooncakeServer]:
    """Run a store in the context, or skip the test where Mooncake has no wheels."""
    if HAS_NO_WHEELS:
        pytest.skip(NO_WHEELS)
    with reserved_ports(3) as ports:
        server = MooncakeServer(ports)
        try:
            server.start()
            yield server
        finally:
            server.kill_memory()
            server.kill_master()

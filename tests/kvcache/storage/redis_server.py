"""A real redis-server for tests, on loopback, in a temporary directory, without persistence."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ...ports import reserved_port

MISSING = "these tests start a redis-server: apt-get install redis-server"


class RedisServer:
    """A server that a test can pause, kill and restart at the same address."""

    def __init__(
        self, directory: str, port: int, settings: Sequence[str] = (), *, tls: bool = False
    ) -> None:
        program = shutil.which("redis-server")
        assert program is not None, MISSING
        self._program = program
        self._settings = settings
        self._tls = tls
        self._process: subprocess.Popen[str] | None = None
        self.directory = directory
        self.socket = f"{directory}/redis.sock"
        self.port = port

    def start(self) -> None:
        """Wait until the server answers."""
        settings = [
            "bind 127.0.0.1",
            f"{'tls-port' if self._tls else 'port'} {self.port}",
            *(["port 0"] if self._tls else []),
            f"unixsocket {self.socket}",
            "unixsocketperm 700",
            f"dir {self.directory}",
            "maxmemory 256mb",
            'save ""',
            "appendonly no",
            *self._settings,
        ]
        self._process = subprocess.Popen(
            [self._program, "-"],  # settings from stdin keep passwords out of the process list
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write("\n".join(settings))
        self._process.stdin.close()
        said = []
        for line in self._process.stdout:
            if "ready to accept connections" in line.lower():
                return
            said.append(line)
        self.kill()
        raise AssertionError(f"redis-server does not start: {''.join(said)}")

    def pause(self) -> None:
        """Stop the process; its sockets stay open without answers."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        os.waitpid(self._process.pid, os.WUNTRACED)

    def go_on(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """Kill the process, if it runs or is paused."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            assert self._process.stdout is not None
            self._process.stdout.close()
            self._process = None


@contextmanager
def running(settings: Sequence[str] = (), *, tls: bool = False) -> Iterator[RedisServer]:
    """Run a server in the context."""
    # Not pytest's directory: the path of a socket is limited to 107 bytes.
    with tempfile.TemporaryDirectory(prefix="radixkv-redis-") as directory, reserved_port() as port:
        server = RedisServer(directory, port, settings, tls=tls)
        try:
            server.start()
            yield server
        finally:
            server.kill()

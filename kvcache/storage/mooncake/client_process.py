"""The engine's end of a process that talks to Mooncake."""

from __future__ import annotations

import json
import mmap
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, Final

from . import client_main

_FIRST_BYTES: Final = 1 << 20


class ClientProcess:
    """One process, and the memory that it shares with this one. For one thread at a time."""

    def __init__(self, local_host: str, master: str) -> None:
        """Start it; it connects in its own time.

        Raises:
            OSError: if the system gives no process, memory or files.
        """
        self.connected = False
        self._view = memoryview(b"")
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._file = os.memfd_create("radixkv-mooncake")
        life, self._life = os.pipe()
        with theirs:
            files = (theirs.fileno(), self._file, life)
            self._process = subprocess.Popen(
                # -P: the folder of this file has names of other people's packages in it.
                [
                    sys.executable,
                    "-P",
                    client_main.__file__,
                    *map(str, files),
                    local_host,
                    master,
                ],
                pass_fds=files,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # Mooncake talks a lot
                stderr=subprocess.DEVNULL,
            )
        os.close(life)
        self.alive = True

    def wait_connected(self, timeout_s: float) -> None:
        """Return when it has found the master.

        Raises:
            TimeoutError: if it has not yet; it goes on.
            EOFError: if it gave up, and is gone.
        """
        if not self.connected:
            code: int = self._receive(timeout_s)["code"]
            if code != 0:
                self.kill()
                raise EOFError
            self.connected = True

    def reserve(self, num_bytes: int) -> None:
        """Have memory for a value of this length, at least."""
        if num_bytes <= len(self._view):
            return
        size = max(num_bytes, 2 * len(self._view), _FIRST_BYTES)
        os.ftruncate(self._file, size)
        self._view = memoryview(mmap.mmap(self._file, size))

    def write(self, parts: Sequence[memoryview]) -> int:
        """Put the parts into the memory, one after the other, and return their length."""
        num_bytes = sum(len(part) for part in parts)
        self.reserve(num_bytes)
        position = 0
        for part in parts:
            self._view[position : position + len(part)] = part
            position += len(part)
        return num_bytes

    def view(self, num_bytes: int) -> memoryview:
        """Return the first bytes of the memory; until the next request."""
        return self._view[:num_bytes]

    def ask(self, do: str, name: str, num_bytes: int, timeout_s: float) -> dict[str, Any]:
        """Let it do one thing, and return its answer.

        Raises:
            TimeoutError: if there is none in time. It may still do it, and use the memory.
            EOFError: if it is gone.
            OSError: if it is gone.
        """
        self.reserve(num_bytes)
        request = {"do": do, "name": name, "num_bytes": num_bytes, "memory_bytes": len(self._view)}
        self._control.send(json.dumps(request).encode())
        return self._receive(timeout_s)

    def kill(self) -> None:
        """End it at once; what it was doing may be done or not."""
        if not self.alive:
            return
        self.alive = False
        self._process.kill()
        self._process.wait()
        self._control.close()
        os.close(self._file)
        os.close(self._life)

    def _receive(self, timeout_s: float) -> dict[str, Any]:
        self._control.settimeout(timeout_s)
        message = self._control.recv(1 << 20)
        if not message:
            self.kill()
            raise EOFError
        answer: dict[str, Any] = json.loads(message)
        return answer

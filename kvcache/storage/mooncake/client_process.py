"""Handle of a subprocess that runs Mooncake's client (`client_main`)."""

from __future__ import annotations

import json
import mmap
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

from ...cleanup import give_back
from . import client_main

_FIRST_BYTES: Final = 1 << 20


class ClientProcess:
    """A client subprocess and the memory shared with it. Not thread-safe."""

    def __init__(self, local_host: str, master: str) -> None:
        """Start the process, which begins to connect to the master.

        Raises:
            OSError: if the system is out of processes, memory or files.
        """
        self.connected = self.alive = False
        self._view = memoryview(b"")
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._file = life = self._life = -1
        try:
            try:
                self._file = os.memfd_create("radixkv-mooncake")
                life, self._life = os.pipe()
                files = (theirs.fileno(), self._file, life)
                self._process = subprocess.Popen(
                    # -P: keep the program's folder out of sys.path.
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
                    stdout=subprocess.DEVNULL,  # Mooncake prints a lot
                    stderr=subprocess.DEVNULL,
                )
                self.alive = True
            finally:
                give_back(theirs.close, partial(_close, life))
        except BaseException:
            give_back(self.kill if self.alive else self._close_files)
            raise

    def wait_connected(self, timeout_s: float) -> None:
        """Wait until the process is connected to the master.

        Raises:
            TimeoutError: if it is not connected after timeout_s; it keeps trying.
            EOFError: if it gave up and exited.
        """
        if not self.connected:
            code: int = self._receive(timeout_s)["code"]
            if code != 0:
                self.kill()
                raise EOFError
            self.connected = True

    def reserve(self, num_bytes: int) -> None:
        """Enlarge the memory to at least num_bytes."""
        if num_bytes <= len(self._view):
            return
        size = max(num_bytes, 2 * len(self._view), _FIRST_BYTES)
        os.ftruncate(self._file, size)
        self._view = memoryview(mmap.mmap(self._file, size))

    def write(self, parts: Sequence[memoryview]) -> int:
        """Copy the concatenated parts into the memory, and return their length in bytes."""
        num_bytes = sum(len(part) for part in parts)
        self.reserve(num_bytes)
        position = 0
        for part in parts:
            self._view[position : position + len(part)] = part
            position += len(part)
        return num_bytes

    def view(self, num_bytes: int) -> memoryview:
        """Return the first bytes of the memory, which are valid until the next request."""
        return self._view[:num_bytes]

    def ask(self, do: str, name: str, num_bytes: int, timeout_s: float) -> dict[str, Any]:
        """Send a request and return the answer.

        Raises:
            TimeoutError: if there is no answer in time. The process may still execute the request
                and use the memory.
            EOFError, OSError: if the process is gone.
        """
        self.reserve(num_bytes)
        request = {"do": do, "name": name, "num_bytes": num_bytes, "memory_bytes": len(self._view)}
        self._control.send(json.dumps(request).encode())
        return self._receive(timeout_s)

    def kill(self) -> None:
        """Kill the process; its current request may or may not take effect."""
        if not self.alive:
            return
        self.alive = False
        give_back(self._process.kill, self._process.wait, self._close_files)

    def _close_files(self) -> None:
        self._view = memoryview(b"")  # whose mapping has a descriptor of its own
        give_back(self._control.close, partial(_close, self._file), partial(_close, self._life))

    def _receive(self, timeout_s: float) -> dict[str, Any]:
        self._control.settimeout(timeout_s)
        message = self._control.recv(1 << 20)
        if not message:
            self.kill()
            raise EOFError
        answer: dict[str, Any] = json.loads(message)
        return answer


def _close(file: int) -> None:
    """Close a file that may not have been opened."""
    if file >= 0:
        os.close(file)

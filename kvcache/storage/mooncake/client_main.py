"""Program of the subprocess that runs Mooncake's client; `client_process` starts and kills it.

Mooncake's client has no time limits. While it waits for a master that does not answer (90 s) and
while it closes (18 s), it also holds the GIL, so that no thread of its process runs. A subprocess
keeps the engine running.

::

    engine                                        this process
    control ── one message per request, JSON ──►  get, put, remove, exist, read
            ◄── one message per reply ──────────
    memory  ◄── the bytes of one value ────────►  registered with Mooncake
    life    closed when the engine dies           the system then kills this process

It runs by path and imports nothing of radixkv, so it starts in a fraction of a second.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import mmap
import os
import select
import socket
import struct
import sys
from typing import Any, Final

NOT_FOUND: Final = -704
TOO_SMALL: Final = -600
MESSAGE_BYTES: Final = 4096
_LOCAL_BUFFER_BYTES: Final = 16 << 20
_SO_ATTACH_FILTER: Final = 26  # linux/asm-generic/socket.h; missing in Python's socket
_BPF_RETURN: Final = 6  # linux/bpf_common.h: return the number of bytes to accept
_REMOVE_LEASED: Final = True
"""A lease protects a value from removal while it is read; our readers verify checksums instead."""


def main() -> None:
    """Connect, report the result, and serve requests until the engine closes the socket."""
    control_fd, memory_fd, life_fd = (int(word) for word in sys.argv[1:4])
    local_host, master = sys.argv[4:6]
    _die_with(life_fd)
    from mooncake.store import MooncakeDistributedStore

    store = MooncakeDistributedStore()
    # This process contributes no memory to the store, so values outlive it.
    code = store.setup(local_host, "P2PHANDSHAKE", 0, _LOCAL_BUFFER_BYTES, "tcp", "", master)
    _refuse_connections()
    control = socket.socket(fileno=control_fd)
    control.send(json.dumps({"code": code}).encode())
    memory = _Memory(store, memory_fd)
    while code == 0 and (message := control.recv(MESSAGE_BYTES)):
        request = json.loads(message)
        memory.grow(request["memory_bytes"])
        control.send(json.dumps(_answer(store, memory, request)).encode())
    # Skip the client's shutdown, which may take long.
    os._exit(0)


class _Memory:
    """Memory shared with the engine: the value of a request, or the names of a lookup."""

    def __init__(self, store: Any, file: int) -> None:
        self._store = store
        self._file = file
        self._map: mmap.mmap | None = None
        self._num_bytes = 0
        self.address = 0

    def grow(self, num_bytes: int) -> None:
        """Map the memory again after the engine enlarged it."""
        if num_bytes <= self._num_bytes:
            return
        if self._map is not None:
            self._store.unregister_buffer(self.address)
        self._map = mmap.mmap(self._file, num_bytes)
        self._num_bytes = num_bytes
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._store.register_buffer(self.address, num_bytes)

    def names(self, num_bytes: int) -> list[str]:
        """Return the names that the engine wrote, one per line."""
        assert self._map is not None, "each request carries the size of the memory"
        return self._map[:num_bytes].decode().split("\n")


def _answer(store: Any, memory: _Memory, request: dict[str, Any]) -> dict[str, Any]:
    name, num_bytes = request["name"], request["num_bytes"]
    match request["do"]:
        case "exist":
            codes = store.batch_is_exist(memory.names(num_bytes))
            return {"code": min(codes), "found": "".join("01"[code == 1] for code in codes)}
        case "get":
            return {"code": _get(store, memory, name, num_bytes)}
        case "put":
            return {"code": store.upsert_from(name, memory.address, num_bytes)}
        case _:
            return {"code": store.remove(name, _REMOVE_LEASED)}


def _get(store: Any, memory: _Memory, name: str, num_bytes: int) -> int:
    """Fill the memory, and return the value's length in bytes, or an error code."""
    code: int = store.get_into(name, memory.address, num_bytes)
    if code != TOO_SMALL:
        return code
    length: int = store.get_size(name)
    if length <= num_bytes:
        return length if length < 0 else code
    # Read only the part that fits.
    (((code,),),) = store.get_into_ranges(
        [memory.address], [[name]], [[[0]]], [[[0]]], [[[num_bytes]]]
    )
    return length if code >= 0 else code


def _refuse_connections() -> None:
    """Drop every packet to the listening ports of this process, which serves nobody.

    Mooncake's client always opens two ports to the whole network. Closing them could make the
    client spin; a packet filter does not.
    """
    drop = ctypes.create_string_buffer(struct.pack("HBBI", _BPF_RETURN, 0, 0, 0))
    program = struct.pack("HP", 1, ctypes.addressof(drop))
    for name in os.listdir("/proc/self/fd"):
        try:
            port = socket.socket(fileno=os.dup(int(name)))
        except OSError:  # not a socket
            continue
        with port:
            if port.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                port.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)


def _die_with(life: int) -> None:
    """Make the system kill this process when the engine closes its end of the pipe."""
    fcntl.fcntl(life, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(life, fcntl.F_SETFL, fcntl.fcntl(life, fcntl.F_GETFL) | os.O_ASYNC)
    ends = select.poll()  # select.select refuses descriptors above 1,023
    ends.register(life, select.POLLIN)
    if ends.poll(0):  # already closed: no signal will come
        os._exit(0)


if __name__ == "__main__":
    main()

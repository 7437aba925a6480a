"""Helpers of the Mooncake tests: time limits, connections, client processes."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from radixkv.kvcache.storage.mooncake.backend import MooncakeBackend

from .mooncake_server import MooncakeServer

SOON_S = 0.1  # for requests that end without an answer
LONG_S = 120.0  # for requests that get an answer
LOST = "no connection, or it was lost"


def connected(
    store: MooncakeServer, timeout_s: float = LONG_S, connect_timeout_s: float = LONG_S
) -> closing[MooncakeBackend]:
    return closing(
        MooncakeBackend(
            "127.0.0.1", store.port, timeout_s=timeout_s, connect_timeout_s=connect_timeout_s
        )
    )


def clients_of(backend: MooncakeBackend) -> list[int]:
    """Return the process ids of idle client processes."""
    return [client._process.pid for client in backend._idle]


def runs(pid: int) -> bool:
    """Return whether a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False

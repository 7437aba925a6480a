"""File descriptors of a process with a channel: a share for each purpose, checked at its start."""

from __future__ import annotations

import os
import resource
from typing import Final

from ..errors import ConfigError
from .channel.gate import FILES_PER_CONNECTION, MAX_UNPROVEN
from .channel.zmq_channel import FILES_PER_PEER, MAX_PEERS
from .transport.transfer_engine import MAX_FILES

HANDSHAKE_FILES: Final = FILES_PER_CONNECTION * MAX_UNPROVEN
TRANSPORT_FILES: Final = MAX_FILES
"""For the transfers of a node; a gateway has none."""
OTHER_FILES: Final = 128
"""For threads and programs of JAX, its cache of programs, storage, and clients of servers."""
_MIN_PEERS: Final = 4
_ENOUGH: Final = 1 << 16


def reserve_files(*, transport: bool) -> int:
    """Raise the soft limit of descriptors to the hard one; return how many peers have room.

    Args:
        transport: whether this process transfers KV, as nodes do.

    Raises:
        ConfigError: if there is no room for some peers; with the share of each purpose.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = _ENOUGH if hard == resource.RLIM_INFINITY else hard
    if soft != resource.RLIM_INFINITY and soft < (wanted := min(limit, max(soft, _ENOUGH))):
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    shares = {
        "that are open": len(os.listdir("/proc/self/fd")),
        "for connections that have not proved the secret": HANDSHAKE_FILES,
        "for transfers": TRANSPORT_FILES if transport else 0,
        "for everything else": OTHER_FILES,
        f"for {_MIN_PEERS} peers": _MIN_PEERS * FILES_PER_PEER,
    }
    room = limit - sum(shares.values())
    if room < 0:
        text = ", ".join(f"{number} {purpose}" for purpose, number in shares.items() if number)
        raise ConfigError(
            f"this process needs {sum(shares.values())} file descriptors ({text}), and the limit "
            f"is {hard} (`ulimit -Hn`)"
        )
    return min(MAX_PEERS, _MIN_PEERS + room // FILES_PER_PEER)

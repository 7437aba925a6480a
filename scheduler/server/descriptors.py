"""File descriptors of the process: enough for all connections, and for everything else."""

from __future__ import annotations

import os
import resource
from typing import Final

from ..errors import ConfigError

ACCEPTED_AT_ONCE: Final = 64
"""Connections that the server accepts in a turn of its loop."""

_RESERVED: Final = 4 * ACCEPTED_AT_ONCE + 128
"""Descriptors for connections that are being accepted and closed, and for what the process opens
later: files of storage, and connections to nodes and storage servers."""

_DEFAULT_CONNECTIONS: Final = 1024


def reserve_descriptors(max_connections: int | None) -> int:
    """Raise the soft limit of descriptors as far as connections need it; return their number.

    Args:
        max_connections: number of connections; None for 1,024, or as many as the hard limit allows.

    Raises:
        ConfigError: if the hard limit allows fewer; with the numbers.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    others = len(os.listdir("/proc/self/fd")) + _RESERVED
    room = _unlimited(hard) - others
    wanted = _DEFAULT_CONNECTIONS if max_connections is None else max_connections
    if room < wanted:
        if max_connections is not None or room < 1:
            raise ConfigError(
                f"{wanted} connections need {wanted + others} file descriptors, and the limit is "
                f"{hard} (`ulimit -Hn`)"
            )
        wanted = room
    needed = wanted + others
    if _unlimited(soft) < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
    return wanted


def _unlimited(limit: int) -> int:
    return 2**30 if limit == resource.RLIM_INFINITY else limit

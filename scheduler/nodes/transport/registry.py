"""Transports between processes by name, so that nobody imports an engine that is not used."""

from __future__ import annotations

import ipaddress
from typing import Final

from .base import Transport
from .errors import TransportArgumentError
from .threaded import ThreadedTransport

PROCESS_TRANSPORTS: Final = ("jax", "nixl")
_STAGING_BYTES: Final = 256 << 20


def open_transport(
    name: str, *, host: str = "127.0.0.1", staging_bytes: int = _STAGING_BYTES
) -> Transport:
    """Start an engine, and test it by a transfer from this node to itself.

    Args:
        name: one of PROCESS_TRANSPORTS; the same on all nodes.
        host: the address of this node, a number. On loopback nothing else is listened at.
        staging_bytes: of NIXL: memory for all parts that are offered, or received, at a time.

    Raises:
        TransportUnavailableError: if it cannot run here; the text says what is missing.
        TransportArgumentError: for another name or no address.
    """
    try:
        is_loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        raise TransportArgumentError(f"a host is an IP address, got {host!r}") from None
    match name:
        case "jax":
            from .jax_engine import JaxEngine

            return ThreadedTransport(JaxEngine(host))
        case "nixl":
            from .nixl_engine import NixlEngine

            devices = "lo" if is_loopback else None
            return ThreadedTransport(NixlEngine(staging_bytes, devices=devices))
    known = ", ".join(PROCESS_TRANSPORTS)
    raise TransportArgumentError(f"no transport {name!r} between processes; there are {known}")

"""Numeric addresses, which mean the same on every machine and need no name server."""

from __future__ import annotations

import ipaddress

from .errors import ChannelAddressError
from .secret import ENVIRONMENT


def host_of(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Return the host of an address.

    Raises:
        ChannelAddressError: for a malformed address.
    """
    return _parse(address)[0]


def check_target(address: str) -> None:
    """Reject an address that no node can connect to.

    Raises:
        ChannelAddressError: for a malformed address, the address of all interfaces, or port 0.
    """
    host, port = _parse(address)
    if host.is_unspecified or not port:
        raise ChannelAddressError(
            f"nobody can connect to {address}: it must be one address of a machine, with a port"
        )


def check_bind(address: str, *, has_secret: bool) -> None:
    """Reject an address that other machines can reach, unless connections need a secret.

    Raises:
        ChannelAddressError: for such an address, or a malformed one.
    """
    if not host_of(address).is_loopback and not has_secret:
        raise ChannelAddressError(
            f"{address} can be reached from other machines, so it needs a secret: set "
            f"{ENVIRONMENT}, or give a file with --secret-file, or bind to 127.0.0.1"
        )


def _parse(address: str) -> tuple[ipaddress.IPv4Address | ipaddress.IPv6Address, int]:
    host, _, port = address.rpartition(":")
    if port.isascii() and port.isdigit() and int(port) < 1 << 16:
        try:
            return ipaddress.ip_address(host.removeprefix("[").removesuffix("]")), int(port)
        except ValueError:
            pass
    raise ChannelAddressError(f"an address is like 127.0.0.1:5557 or [::1]:5557, got {address!r}")

"""Addresses as numbers: what one means is the same on every machine, and nobody is asked for it."""

from __future__ import annotations

import ipaddress

from .errors import ChannelAddressError


def host_of(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Return the host of an address.

    Raises:
        ChannelAddressError: if it is none.
    """
    return _parse(address)[0]


def check_target(address: str) -> None:
    """Refuse an address that nobody can connect to.

    Raises:
        ChannelAddressError: if it is none, all addresses of a machine, or has no port.
    """
    host, port = _parse(address)
    if host.is_unspecified or not port:
        raise ChannelAddressError(
            f"nobody can connect to {address}: it must be one address of a machine, with a port"
        )


def _parse(address: str) -> tuple[ipaddress.IPv4Address | ipaddress.IPv6Address, int]:
    host, _, port = address.rpartition(":")
    if port.isascii() and port.isdigit() and int(port) < 1 << 16:
        try:
            return ipaddress.ip_address(host.removeprefix("[").removesuffix("]")), int(port)
        except ValueError:
            pass
    raise ChannelAddressError(f"an address is like 127.0.0.1:5557 or [::1]:5557, got {address!r}")

"""Opens transports between processes by name; imports only the engine in use."""

from __future__ import annotations

import ipaddress
from importlib.util import find_spec
from typing import Final

from .base import Transport
from .errors import TransportArgumentError, TransportUnavailableError
from .threaded import ThreadedTransport

PROCESS_TRANSPORTS: Final = ("jax", "nixl", "storage")
"""Names of the transports that connect processes."""

STAGING_BYTES: Final = 256 << 20


def open_transport(
    name: str,
    *,
    host: str = "127.0.0.1",
    staging_bytes: int = STAGING_BYTES,
    storage: str | None = None,
) -> Transport:
    """Start an engine, and test it with a transfer from this node to itself.

    Args:
        name: one of PROCESS_TRANSPORTS; the same on all nodes.
        host: numeric address of this node. With loopback, the engine listens only there.
        staging_bytes: not for jax: memory for all parts that are offered, or received, at a time.
        storage: URL for "storage".

    Raises:
        TransportUnavailableError: if the engine cannot run here; the text says what is missing.
        TransportArgumentError: for an unknown name, an invalid address, or storage without a URL.
        StorageError: for a wrong URL.
    """
    try:
        is_loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        raise TransportArgumentError(f"host must be an IP address, got {host!r}") from None
    if find_spec("cryptography") is None:
        raise TransportUnavailableError(
            "cryptography is not installed: pip install 'radixkv[nodes]'"
        )
    match name:
        case "jax":
            from .jax_engine import JaxEngine

            return ThreadedTransport(JaxEngine(host))
        case "nixl":
            from .nixl_engine import NixlEngine

            devices = "lo" if is_loopback else None
            return ThreadedTransport(NixlEngine(staging_bytes, devices=devices))
        case "storage":
            from .storage_engine import open_storage_engine

            if storage is None:
                raise TransportArgumentError("the transport storage needs the URL of a storage")
            return ThreadedTransport(open_storage_engine(storage, staging_bytes))
    known = ", ".join(PROCESS_TRANSPORTS)
    raise TransportArgumentError(f"transport must be one of {known}, got {name!r}")

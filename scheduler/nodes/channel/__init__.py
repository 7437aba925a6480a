"""The control channel: messages of hand-offs and of the gateway between processes.

Public are `ZmqChannel`, its packets, statistics and errors, and `load_secret`. The channel needs
the extra `nodes` (ZeroMQ and msgspec), so its modules are imported on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from .errors import (
    ChannelAddressError,
    ChannelClosedError,
    ChannelError,
    DecodeError,
    EncodeError,
    SecretError,
    TooManyPeersError,
    UnknownPeerError,
)
from .secret import Secret, load_secret

if TYPE_CHECKING:
    from .codec import DroppedFrame, Packet
    from .curve import RefusedConnection
    from .zmq_channel import ChannelStats, ZmqChannel

__all__ = [
    "ChannelAddressError",
    "ChannelClosedError",
    "ChannelError",
    "ChannelStats",
    "DecodeError",
    "DroppedFrame",
    "EncodeError",
    "Packet",
    "RefusedConnection",
    "Secret",
    "SecretError",
    "TooManyPeersError",
    "UnknownPeerError",
    "ZmqChannel",
    "load_secret",
]

_MODULES = {
    "ChannelStats": "zmq_channel",
    "DroppedFrame": "codec",
    "Packet": "codec",
    "RefusedConnection": "curve",
    "ZmqChannel": "zmq_channel",
}


def __getattr__(name: str) -> object:
    """Import a name on first use."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(f".{_MODULES[name]}", __name__), name)
    except ModuleNotFoundError as error:
        raise ChannelError(
            f"{error.name} is not installed: pip install 'radixkv[nodes]'"
        ) from error

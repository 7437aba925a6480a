"""The control channel: the messages of a hand-off, and of requests, between processes.

The channel itself needs the extra `nodes` (ZeroMQ and msgpack), and is imported when it is used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from ...handoff.gateway_messages import (
    DecodeFailed,
    Finished,
    GiveUp,
    Heard,
    NodeStatus,
    PrefillFailed,
    RunPrefill,
    Started,
)
from .errors import (
    ChannelAddressError,
    ChannelClosedError,
    ChannelError,
    DecodeError,
    EncodeError,
    SecretError,
    UnknownPeerError,
)
from .secret import Secret, load_secret

if TYPE_CHECKING:
    from .codec import Packet
    from .frames import Dropped
    from .handshakes import Refused
    from .zmq_channel import ChannelStats, ZmqChannel

__all__ = [
    "ChannelAddressError",
    "ChannelClosedError",
    "ChannelError",
    "ChannelStats",
    "DecodeError",
    "DecodeFailed",
    "Dropped",
    "EncodeError",
    "Finished",
    "GiveUp",
    "Heard",
    "NodeStatus",
    "Packet",
    "PrefillFailed",
    "Refused",
    "RunPrefill",
    "Secret",
    "SecretError",
    "Started",
    "UnknownPeerError",
    "ZmqChannel",
    "load_secret",
]

_HOME = {
    "ChannelStats": "zmq_channel",
    "Dropped": "frames",
    "Packet": "codec",
    "Refused": "handshakes",
    "ZmqChannel": "zmq_channel",
}


def __getattr__(name: str) -> object:
    """Import a name when it is first used."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(f".{_HOME[name]}", __name__), name)
    except ModuleNotFoundError as error:
        raise ChannelError(
            f"{error.name} is not installed: pip install 'radixkv[nodes]'"
        ) from error

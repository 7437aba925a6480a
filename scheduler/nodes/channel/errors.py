"""Errors of the control channel.

::

    SchedulerError
    └── ChannelError
        ├── EncodeError          a message of this process that cannot be encoded
        ├── DecodeError          received bytes that are not a message; a channel drops these
        ├── ChannelAddressError  an address that is malformed, in use, or public without a secret
        ├── ChannelClosedError   a call after close
        ├── SecretError          a secret that is too short, or a file that others can read
        ├── TooManyPeersError    one peer more than a channel may have
        └── UnknownPeerError     a message to a node that is not connected

No error carries a secret, a prompt or tokens.
"""

from __future__ import annotations

from ...errors import SchedulerError


class ChannelError(SchedulerError):
    """Base class of the control channel's errors."""


class EncodeError(ChannelError, ValueError):
    """A message cannot be encoded; the text names the field."""


class DecodeError(ChannelError, ValueError):
    """Bytes are not a message of this version; the text gives the position of the field."""


class ChannelAddressError(ChannelError, ValueError):
    """An address cannot be used."""


class ChannelClosedError(ChannelError):
    """A channel was used after it was closed."""


class SecretError(ChannelError, ValueError):
    """A secret cannot be used; the text gives the reason, never the secret."""


class UnknownPeerError(ChannelError, LookupError):
    """A message is for a node that is not connected."""

    def __init__(self, peer: str) -> None:
        super().__init__(f"no node {peer!r} is connected")
        self.peer = peer


class TooManyPeersError(ChannelError):
    """A channel has as many peers as it may."""

    def __init__(self, peer: str, max_peers: int) -> None:
        super().__init__(
            f"{peer!r} is one peer more than the {max_peers} that this process has file "
            "descriptors for (`ulimit -Hn`)"
        )
        self.peer = peer
        self.max_peers = max_peers

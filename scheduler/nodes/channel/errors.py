"""What the control channel refuses.

::

    SchedulerError
    └── ChannelError
        ├── EncodeError          a message of ours that has no encoding: too long, out of range
        ├── DecodeError          bytes of a peer that are no message; a channel counts and drops
        ├── ChannelAddressError  an address that is malformed, in use, or public without a secret
        ├── ChannelClosedError   a call after close
        ├── SecretError          a secret that is too short, or a file that others may read
        └── UnknownPeerError     a message to a node that was never connected

None of them carries a secret, or the content of a message.
"""

from __future__ import annotations

from ...errors import SchedulerError


class ChannelError(SchedulerError):
    """Base of what the control channel refuses."""


class EncodeError(ChannelError, ValueError):
    """A message cannot be encoded; the text names the field."""


class DecodeError(ChannelError, ValueError):
    """Bytes are no message of this version; the text names the field."""


class ChannelAddressError(ChannelError, ValueError):
    """A channel cannot be at this address."""


class ChannelClosedError(ChannelError):
    """A channel was used after it was closed."""


class SecretError(ChannelError, ValueError):
    """A secret cannot be used; the text says why, and never what it is."""


class UnknownPeerError(ChannelError, LookupError):
    """A message is for a node that was never connected."""

    def __init__(self, peer: str) -> None:
        super().__init__(f"no node {peer!r} is connected")
        self.peer = peer

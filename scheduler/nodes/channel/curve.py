"""Connections that only holders of the secret can make: CURVE, which is in ZeroMQ (its RFC 26).

Everything that goes over one is encrypted, and can be neither changed, played back, nor read later
by who learns the secret then: each connection has keys of its own.

**Who is let in.** All nodes have one pair of keys, which is made of the secret. Its public half is
as secret as that: nothing prints it, and it goes over a wire only in boxes that a holder alone can
open. The first thing that a client says, HELLO, is a box for that key, so who does not have it
cannot begin; who plays one back that was recorded cannot go on, as the answer is for the key of a
moment that the recorded client had. The answer is made with the other half, so a client knows that
the server is a holder, too. A list of clients (ZAP, a thread of its own in each process) could name
one key alone, which everybody who can say HELLO has: it would refuse nobody.

**What a stranger can have kept.** ZeroMQ ends a connection at the first thing that is not of CURVE,
or of an older ZeroMQ which has none. Until then it holds one frame of each, `zmq.MAXMSGSIZE` at
most, for 30 s at most. Messages of strangers are neither kept nor seen.
"""

from __future__ import annotations

from typing import Final

import zmq
from zmq.utils import z85

from .errors import SecretError
from .secret import Secret

_LABEL: Final = b"radixkv control channel, CURVE, 1"
OVERHEAD_BYTES: Final = 33
"""What a frame on the wire has beside the message: a name, a nonce, flags and a MAC."""


class CurveKeys:
    """The keys of all holders of a secret, which nothing prints."""

    def __init__(self, secret: Secret) -> None:
        """Make them.

        Raises:
            SecretError: if ZeroMQ was built without CURVE.
        """
        if not zmq.has("curve"):
            raise SecretError(
                f"this build of ZeroMQ ({zmq.zmq_version()}) has no CURVE, without which a secret "
                "protects nothing: install pyzmq from a wheel, or libzmq with libsodium"
            )
        self._private = secret.key(_LABEL)
        self._public = zmq.curve_public(z85.encode(self._private))

    def guard(self, socket: zmq.Socket[bytes], *, is_server: bool) -> None:
        """Make a socket connect with holders of the secret alone.

        Args:
            socket: neither bound nor connected yet.
            is_server: whether it will be bound, so that others connect to it.
        """
        socket.set(zmq.CURVE_SECRETKEY, self._private)
        socket.set(zmq.CURVE_PUBLICKEY, self._public)
        if is_server:
            socket.set(zmq.CURVE_SERVER, 1)
        else:
            socket.set(zmq.CURVE_SERVERKEY, self._public)

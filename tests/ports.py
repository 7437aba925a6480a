"""TCP ports of loopback for what must know its port before it listens there."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager


@contextmanager
def reserved_port() -> Iterator[int]:
    """A port that nobody else is given meanwhile, and at which nobody listens yet.

    It has a socket that is bound and does not listen. The system gives such a port neither to
    whoever asks for any nor to a client, and a server that sets SO_REUSEADDR, as all here do, may
    listen there, end, and listen again. A port that was found to be free a moment ago would be
    somebody else's now and then.
    """
    with socket.socket() as keeper:
        keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        keeper.bind(("127.0.0.1", 0))
        yield keeper.getsockname()[1]


@contextmanager
def reserved_ports(count: int) -> Iterator[list[int]]:
    """Several of them."""
    with ExitStack() as stack:
        yield [stack.enter_context(reserved_port()) for _ in range(count)]

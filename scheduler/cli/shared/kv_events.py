"""The publisher of KV events that --kv-events asks for."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from importlib.util import find_spec

from ....kvcache import EventBatch
from ..errors import BadInputError
from ..exit_status import say
from ..options.common import check_needs


def check_libraries(command: str) -> None:
    """Reject a command whose libraries are not installed.

    Raises:
        BadInputError: with the extra that has them.
    """
    for library in ("msgspec", "zmq"):
        if find_spec(library) is None:
            raise BadInputError(
                f"{command} needs the library {library!r}: pip install 'radixkv[events]'"
            )


@contextmanager
def publishing(arguments: argparse.Namespace) -> Iterator[Callable[[EventBatch], object] | None]:
    """Yield what takes the KV events of an engine; None without --kv-events."""
    check_needs(arguments, "--kv-events", "--kv-events-replay")
    if arguments.kv_events is None:
        yield None
        return
    check_libraries("--kv-events")
    from ...events import EventPublisher  # here, because it needs the extra

    replay = arguments.kv_events_replay
    with closing(EventPublisher(arguments.kv_events, replay_endpoint=replay)) as publisher:
        again = f", and again at {publisher.replay_endpoint}" if replay else ""
        say(f"KV events are published at {publisher.endpoint}{again}")
        yield publisher.publish

"""Which connection is closed for a new one, and how a refused or dropped one ends."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock, call

import pytest
import uvicorn
from hypothesis import given
from hypothesis import strategies as st
from uvicorn.server import ServerState

from radixkv.scheduler.server.connections import Connections, _LingeringTransport
from radixkv.scheduler.server.limits import ServerLimits


class Fake:
    """A connection that is forgotten when it is dropped or refused."""

    def __init__(self, owner: Connections) -> None:
        self.owner = owner
        self.ended: Any = None

    def drop(self) -> None:
        self.ended = "dropped"
        self.owner.closed(self)  # type: ignore[arg-type]

    def refuse(self, num_open: int) -> None:
        self.ended = num_open
        self.owner.closed(self)  # type: ignore[arg-type]


@given(st.integers(1, 4), st.data())
def test_a_new_connection_takes_the_place_of_the_one_that_waits_longest(
    most: int, data: st.DataObject
) -> None:
    connections = Connections(ServerLimits(max_connections=most))
    opened: list[Any] = []
    waiting: list[Any] = []
    num_dropped = 0
    for _ in range(12):
        action = data.draw(st.sampled_from(["open", "begin", "end", "close"]))
        if action == "open":
            new: Any = Fake(connections)
            connections.opened(new)
            waiting.append(new)
            opened.append(new)
            if len(opened) > most:
                num_dropped += 1
                oldest = waiting.pop(0)
                assert oldest.ended == (most if oldest is new else "dropped")
                opened.remove(oldest)
        elif opened:
            one = data.draw(st.sampled_from(opened))
            if action == "close":
                opened.remove(one)
                connections.closed(one)
            else:
                connections.waits(one, action == "end")
            if action == "end" and one not in waiting:
                waiting.append(one)
            elif action != "end" and one in waiting:
                waiting.remove(one)
        assert (connections.num_open, connections.num_dropped) == (len(opened), num_dropped)
        assert all(each.ended is None for each in opened) and len(opened) <= most


def test_bytes_that_begin_no_request_do_not_prolong_a_wait() -> None:
    connections = Connections(ServerLimits(max_connections=2))
    slow, other, new = (Fake(connections) for _ in range(3))
    for each in (slow, other):
        connections.opened(each)  # type: ignore[arg-type]
    connections.waits(slow, True)  # type: ignore[arg-type]
    connections.opened(new)  # type: ignore[arg-type]
    assert (slow.ended, other.ended, new.ended) == ("dropped", None, None)


@pytest.mark.parametrize("num_left", [0, 1])
@pytest.mark.parametrize("is_closing", [False, True])
def test_a_close_waits_for_a_peer_that_does_not_read_and_not_for_ever(
    num_left: int, is_closing: bool
) -> None:
    transport, loop = Mock(), Mock()
    transport.is_closing.return_value = is_closing
    transport.get_write_buffer_size.return_value = num_left
    lingering = _LingeringTransport(transport, loop, 5.0)
    assert lingering.write is transport.write
    assert lingering.get_extra_info is transport.get_extra_info
    lingering.close()
    assert transport.close.call_count == (not is_closing)
    lingers = num_left and not is_closing
    assert loop.mock_calls == ([call.call_later(5.0, transport.abort)] if lingers else [])


@pytest.mark.parametrize("end", ["lost", "dropped", "refused"])
def test_the_deadline_of_a_connection_ends_with_it(end: str) -> None:
    """Otherwise each one that ends would stay in memory until then."""
    transport, loop = Mock(), Mock()
    transport.get_extra_info.return_value = None
    transport.get_write_buffer_size.return_value = 0
    connections = Connections(ServerLimits(head_s=7.0))
    make: Any = connections.protocol()
    config = uvicorn.Config(Mock(), log_config=None)
    connection = make(config=config, server_state=ServerState(), app_state={}, _loop=loop)
    connection.connection_made(transport)
    assert loop.mock_calls == [call.call_later(7.0, connection.drop)]
    if end == "lost":
        connection.connection_lost(None)
    elif end == "dropped":
        connection.drop()
    else:
        connection.refuse(1)
    loop.call_later.return_value.cancel.assert_called_once_with()
    assert connections.num_open == 0 and not connections._waiting
    assert transport.abort.call_count == (end == "dropped")

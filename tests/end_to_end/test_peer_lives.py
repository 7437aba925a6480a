"""Nothing is left of a peer that is gone; a small `peer_lives`."""

from __future__ import annotations

import gc
import time
from collections import Counter

import pytest

from radixkv.scheduler.gateway import network_gateway
from radixkv.scheduler.nodes.channel import codec

from .peer_lives import LATE_S, Held, lives_of_nodes

_LIVES = 40
_EVERY = 10


def num_of_our_types() -> Counter[str]:
    """Objects by type, of the types of this project and of ZeroMQ."""
    kinds = (f"{type(each).__module__}.{type(each).__qualname__}" for each in gc.get_objects())
    return Counter(kind for kind in kinds if kind.startswith(("radixkv.", "zmq.")))


def holds_more(held: Held, before: Held) -> bool:
    return (
        held.files > before.files or held.sockets > before.sockets or held.threads > before.threads
    )


def test_lives_of_peers_leave_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network_gateway, "_MAX_GONE", 3)
    monkeypatch.setattr(codec, "MAX_SENDERS", 4)
    seen: list[Held] = []
    ours: list[Counter[str]] = []
    for held in lives_of_nodes(_LIVES, _EVERY):
        end = time.monotonic() + LATE_S
        # The gates notice in their threads that a connection has ended.
        while seen[1:] and holds_more(held, seen[1]) and time.monotonic() < end:
            held = Held.now(held.lives, held.names)
        seen.append(held)
        ours.append(num_of_our_types())
    first, *others = seen[1:]
    assert len(others) == 3
    for held in others:
        assert not holds_more(held, first)
        # The last one that went may not be forgotten everywhere yet.
        assert abs(held.names - first.names) <= 2
    growth = ours[-1] - ours[-3]
    assert not [kind for kind, number in growth.items() if number >= _EVERY], growth

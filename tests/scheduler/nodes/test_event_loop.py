"""How long the loop of a node waits for messages, and when they arrive."""

from __future__ import annotations

from typing import Any

import pytest

from radixkv.kvcache import CacheManager, HostConfig
from radixkv.scheduler import DecodeScheduler, PrefillScheduler, Request
from radixkv.scheduler.handoff import Ask, AttemptKey, Header
from radixkv.scheduler.handoff.messages import Renew
from radixkv.scheduler.nodes.channel import Packet

from .fake_channel import SILENCE_S, TIMING, Deployment


def test_nodes_tell_what_they_take() -> None:
    world = Deployment()
    world.turn(4)
    told = {name: node.status.max_model_len for name, node in world.nodes.nodes.items()}
    assert told == {"prefill-0": 24, "decode-0": 24}


@pytest.mark.parametrize("name", ["prefill-0", "decode-0"])
def test_what_wakes_nobody_is_looked_for_soon(name: str) -> None:
    """The end of a transfer, or of a copy between tiers, brings no message."""
    world = Deployment()
    world.turn(4)
    loop, engine = world.loops[name], world.engines[name]
    waits: list[float] = []

    def wait_s() -> float:
        """Let the loop find nothing to do, and return how long it waits for a message."""
        stops = iter([False, True])
        loop.run(lambda: next(stops))
        return waits.pop()

    channel: Any = loop._channel
    channel.wait = waits.append
    manager = engine.manager = CacheManager(8, 4, host=HostConfig(8, "back"))
    lease = manager.admit(manager.match(range(4)))
    manager.publish(lease, range(4))
    manager.release(lease)
    idle_s = wait_s()
    engine.scheduler.num_open = 1
    assert 0 < wait_s() < idle_s / 10
    engine.scheduler.num_open = 0
    assert wait_s() == idle_s
    assert manager.evict(1) == 1 and manager.tiers is not None
    assert manager.tiers.num_open_operations == 1
    assert 0 < wait_s() < idle_s / 10


@pytest.mark.parametrize("name", ["prefill-0", "decode-0"])
def test_a_heartbeat_that_arrives_during_a_long_step_is_no_older_than_its_end(name: str) -> None:
    world = Deployment()
    engine, key = world.engines[name], AttemptKey("a", 1)
    sizes: dict[str, Any] = {"epoch": 1, "timing": TIMING, "token_budget": 8, "max_running": 2}
    scheduler: Any
    if name == "prefill-0":
        peer, scheduler = "decode-0", PrefillScheduler(engine.manager, **sizes)
        scheduler.begin(Request("a", [1, 2, 3], 1), peer)
        scheduler.schedule()
        heartbeat = Renew(Header(key, 1, 1))
    else:
        peer, scheduler = "prefill-0", DecodeScheduler(engine.manager, **sizes)
        scheduler.receive(peer, Ask(Header(key, 1), bytes(12), b"", 4, 1, 1))
        heartbeat = Renew(Header(key, 1, 1, 1))
    assert scheduler.num_open == 1
    engine.scheduler = scheduler
    engine.receive = lambda message: scheduler.receive(message.peer, message.message)
    engine.poll = scheduler.tick
    world.now = 1 + SILENCE_S
    world.ends[name]._arrived.append(Packet(peer, name, 1, 0, heartbeat, None))
    world.loops[name].run_once()
    assert scheduler.num_open == 1
    world.now += SILENCE_S
    world.loops[name].run_once()
    assert scheduler.num_open == 0

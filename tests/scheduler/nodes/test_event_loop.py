"""How long the loop of a node waits for messages."""

from __future__ import annotations

from typing import Any

import pytest

from radixkv.kvcache import CacheManager, HostConfig

from .fake_channel import Deployment


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

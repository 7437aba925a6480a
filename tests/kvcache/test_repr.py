"""What a notebook shows of a manager, a match and a lease: their numbers."""

from __future__ import annotations

from radixkv.kvcache import CacheManager, HostConfig

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9]


def test_the_life_of_a_request() -> None:
    manager = CacheManager(8_000, 4)
    assert repr(manager) == (
        "CacheManager(8,000 blocks of 4 tokens: 8,000 free, 0 idle, 0 in use; live leases: 0)"
    )
    match = manager.match(PROMPT)
    assert repr(match) == "Match(0 of 9 tokens: 0 device blocks)"
    lease = manager.admit(match)
    assert repr(lease) == "Lease(3 blocks for 9 tokens: 0 hit, 0 shared)"
    manager.publish(lease, PROMPT)
    assert repr(lease) == "Lease(3 blocks for 9 tokens: 0 hit, 2 shared)"
    assert repr(manager) == (
        "CacheManager(8,000 blocks of 4 tokens: 7,997 free, 0 idle, 3 in use; live leases: 1)"
    )
    match = manager.match([*PROMPT[:8], 100])
    assert repr(match) == "Match(8 of 9 tokens: 2 device blocks)"
    other = manager.admit(match)
    assert repr(other) == "Lease(3 blocks for 9 tokens: 2 hit, 2 shared)"
    manager.release(lease)
    assert repr(lease) == "Lease(released)"
    manager.release(other)
    assert repr(manager) == (
        "CacheManager(8,000 blocks of 4 tokens: 7,998 free, 2 idle, 0 in use; live leases: 0)"
    )


def test_the_host_tier() -> None:
    manager = CacheManager(2, 4, host=HostConfig(1_000))
    assert manager.tiers is not None
    lease = manager.admit(manager.match(PROMPT[:8]))
    manager.publish(lease, PROMPT[:8])
    manager.release(lease)
    manager.evict(2)
    for operation in manager.tiers.take_operations():
        manager.tiers.complete(operation.id, [True] * operation.num_blocks)
    assert repr(manager) == (
        "CacheManager(2 blocks of 4 tokens: 2 free, 0 idle, 0 in use; live leases: 0; "
        "host tier of 1,000 blocks)"
    )
    match = manager.match(PROMPT[:8])
    assert repr(match) == "Match(0 of 8 tokens: 0 device blocks and 2 host blocks)"
    lease = manager.admit(match)
    assert repr(lease) == "Lease(2 blocks for 8 tokens: 0 hit, 0 shared, loading)"
    [operation] = manager.tiers.take_operations()
    manager.tiers.complete(operation.id, [True, True])
    assert repr(lease) == "Lease(2 blocks for 8 tokens: 0 hit, 2 shared)"
    manager.release(lease)
    lease = manager.admit(manager.match([50, 51, 52, 53]))
    manager.publish(lease, [50, 51, 52, 53])
    manager.tiers.park(lease, [50, 51, 52, 53])
    assert repr(lease) == "Lease(1 blocks for 4 tokens: 0 hit, 1 shared, parking)"

"""What must be true of a manager after each step, seen from outside."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from radixkv.spec import prefix_tags

from .leaf_lru import Key

if TYPE_CHECKING:
    from .harness import Harness, Request


def settle(harness: Harness) -> None:
    """Check the manager's own invariants (if it may help), then all of it from outside."""
    if harness.white_box:
        harness.manager.check()
    _check_stats(harness)
    for request in harness.running:
        _check_lease(harness, request)
    _check_matches(harness)
    _check_next_blocks(harness)


def _check_stats(harness: Harness) -> None:
    entries, free = harness.oracle.entries, len(harness.free_ids)
    expected = {
        "num_blocks": harness.config.num_blocks,
        "free_blocks": free,
        "cached_blocks": len(entries),
        "idle_blocks": harness.oracle.num_idle,
        "private_blocks": sum(len(request.private) for request in harness.running),
        "live_leases": len(harness.running),
        "admitted": harness.admitted,
        "hit_blocks": harness.hit_blocks,
        "evicted_blocks": harness.evicted_blocks,
        "duplicate_blocks": harness.duplicate_blocks,
    }
    stats = asdict(harness.manager.stats())
    wrong = {name: (stats[name], n) for name, n in expected.items() if stats[name] != n}
    assert not wrong, f"stats and what they should be: {wrong}"
    available = harness.manager.available
    assert available == free + harness.oracle.num_idle, f"{available} blocks available"


def _check_lease(harness: Harness, request: Request) -> None:
    lease = request.lease
    table = lease.block_table.tolist()
    assert table == harness.table(request), f"table {table}, should be {harness.table(request)}"
    assert lease.num_blocks == len(table) == harness.blocks_for(lease.num_tokens), (
        f"{lease.num_blocks} blocks for {lease.num_tokens} tokens"
    )
    counts = (lease.num_hit_blocks, lease.num_shared_blocks)
    expected = (request.num_hit_blocks, len(request.shared))
    assert counts == expected, f"{counts} hit and shared blocks, should be {expected}"
    row = harness.manager.tables.ids[lease.row].tolist()
    assert row == table + [0] * (len(row) - len(table)), f"row {lease.row} is not its table"
    # The oracle of content: whatever blocks it was given, it reads its own prefix.
    tags = prefix_tags(request.namespace, request.tokens[: request.computed])
    harness.ghost.read_sequence(table, tags)


def _check_matches(harness: Harness) -> None:
    # Each published block is found; with the equal counts of the stats: nothing else is.
    for namespace, tokens in harness.probes():
        match = harness.manager.match(tokens, namespace)
        hit = harness.oracle.hit(harness.oracle.path(namespace, tokens))
        assert match.num_blocks == hit, f"{tokens}: {match.num_blocks} blocks hit, not {hit}"
        assert match.num_tokens == hit * harness.config.block_size, "a hit is whole blocks"
    # However old a match is, what it would leave is counted as of now.
    for request in harness.waiting:
        path = harness.oracle.path(request.namespace, request.tokens)
        idle = harness.oracle.num_idle - harness.oracle.count_idle(path[: harness.oracle.hit(path)])
        left = harness.manager.available_after(request.match)
        assert left == len(harness.free_ids) + idle, f"{left} blocks available after a match"


def _check_next_blocks(harness: Harness) -> None:
    # Two requests wait for the same block if and only if it would be the same.
    size = harness.config.block_size
    following: list[tuple[Key, object]] = []
    for request in harness.running:
        found = harness.manager.next_block(request.lease, request.tokens)
        end = (len(request.shared) + 1) * size
        if len(request.tokens) < end:
            assert found is None, "there is no next block"
            continue
        key = (request.namespace, tuple(request.tokens[:end]))
        following.append((key, found))
        match = harness.manager.match(request.tokens, request.namespace)
        if match.num_blocks == len(request.shared):
            assert match.next_block == found, "leader and follower name another next block"
    for key, next_block in following:
        for other_key, other in following:
            assert (next_block == other) == (key == other_key), (
                f"the next blocks of {key} and {other_key} are {next_block} and {other}"
            )

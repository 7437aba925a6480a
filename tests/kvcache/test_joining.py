"""Runs that were split are joined again, once nothing tells them apart, and no order is lost."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.kvcache import CacheManager, Lease, OpKind
from radixkv.kvcache.tiers import offload, storage_recency
from radixkv.kvcache.tiers.host_tier import WritePolicy

from .helpers import hit, serve, start
from .observe import eviction_order
from .tier_memory import TierMemory

TRUNK = list(range(100, 120))


def num_nodes(manager: CacheManager) -> int:
    return len(list(manager._tree.nodes()))


def cut(manager: CacheManager) -> None:
    """Publish the trunk, and a branch of one block after each of its blocks but the last."""
    serve(manager, TRUNK)
    for place in range(1, len(TRUNK)):
        serve(manager, [*TRUNK[:place], place])


def test_a_path_is_one_run_again_after_its_branches_were_evicted():
    manager = CacheManager(200, 1)
    cut(manager)
    table = serve(manager, TRUNK)
    assert num_nodes(manager) == 2 * len(TRUNK) - 1
    assert manager.evict(len(TRUNK) - 1) == len(TRUNK) - 1
    assert num_nodes(manager) == len(TRUNK)
    assert serve(manager, TRUNK) == table
    assert num_nodes(manager) == 1
    assert eviction_order(manager, [(b"", TRUNK)]) == [[n] for n in reversed(range(len(TRUNK)))]


@pytest.mark.parametrize("place", [1, 10, 19])
def test_a_branch_that_is_left_keeps_its_runs_apart(place: int):
    manager = CacheManager(200, 1)
    cut(manager)
    serve(manager, [*TRUNK[:place], place])
    serve(manager, TRUNK)
    manager.evict(len(TRUNK) - 2)
    assert hit(manager, [*TRUNK[:place], place]) == place + 1
    serve(manager, TRUNK)
    assert num_nodes(manager) == 3


def test_a_lease_that_ends_between_two_runs_keeps_them_apart():
    manager = CacheManager(200, 1)
    serve(manager, TRUNK)
    short = start(manager, TRUNK[:5])
    serve(manager, TRUNK)
    assert num_nodes(manager) == 2
    manager.publish(short, TRUNK[:5])
    manager.release(short)
    manager.check()
    long = start(manager, TRUNK)
    assert num_nodes(manager) == 1
    assert long.block_table.tolist() == serve(manager, TRUNK)
    manager.release(long)
    manager.check()


def test_runs_are_joined_while_several_leases_use_both():
    manager = CacheManager(200, 1)
    serve(manager, TRUNK)
    short = start(manager, TRUNK[:5])
    leases = [start(manager, TRUNK) for _ in range(3)]
    manager.release(short)
    leases.append(start(manager, TRUNK))
    assert num_nodes(manager) == 1
    manager.check()
    for lease in leases:
        manager.release(lease)
        manager.check()
    assert manager.evict(100) == len(TRUNK)


def test_a_trimmed_run_is_joined_without_the_tokens_that_were_cut_off():
    manager = CacheManager(200, 1)
    serve(manager, TRUNK)
    manager.evict(5)
    serve(manager, [*TRUNK[:15], 7, 8])
    serve(manager, [*TRUNK[:15], 7, 8])
    assert num_nodes(manager) == 1
    assert hit(manager, TRUNK) == 15
    assert hit(manager, [*TRUNK[:15], 7, 8]) == 17


def test_a_match_of_before_a_join_is_made_anew():
    manager = CacheManager(200, 1)
    serve(manager, TRUNK)
    serve(manager, TRUNK[:5])
    match = manager.match(TRUNK[:5])
    serve(manager, TRUNK)
    lease = manager.admit(match)
    assert lease.num_hit_blocks == 5
    manager.check()
    manager.release(lease)


@pytest.mark.parametrize("seed", range(20))
def test_joining_changes_no_hit_and_no_victim(seed: int, monkeypatch: pytest.MonkeyPatch):
    r = random.Random(seed)
    joined, split = CacheManager(24, 2), CacheManager(24, 2)
    monkeypatch.setattr(split._tree, "join_path", lambda node: None)
    leases: list[tuple[Lease, Lease, list[int]]] = []
    past: list[list[int]] = [[]]
    for _ in range(150):
        action = r.random()
        if action < 0.5 and len(leases) < 3:
            begin = r.choice(past[-4:])
            tokens = begin[: r.randint(0, len(begin))]
            tokens = [*tokens, *(r.randint(0, 2) for _ in range(r.randint(1, 4)))][:14]
            if joined.available < 8:
                continue
            past.append(tokens)
            leases.append((start(joined, tokens), start(split, tokens), tokens))
        elif action < 0.9 and leases:
            one, other, tokens = leases.pop(r.randrange(len(leases)))
            for manager, lease in ((joined, one), (split, other)):
                manager.publish(lease, tokens)
                manager.release(lease)
        elif action > 0.9:
            number = r.randint(1, 6)
            assert joined.evict(number) == split.evict(number)
        joined.check()
        split.check()
        assert _idle(joined) == _idle(split)
        assert joined.stats() == split.stats()
    assert num_nodes(joined) <= num_nodes(split)


def _idle(manager: CacheManager) -> list[tuple[int, ...]]:
    """Return the prefix of each idle block, of two tokens, in eviction order."""
    prefixes = []
    for node in manager._tree.idle_nodes():
        path, above = [node], node.parent
        while above is not None and above.parent is not None:
            path.append(above)
            above = above.parent
        runs = [each.tokens[: 8 * each.num_blocks] for each in reversed(path)]
        tokens = tuple(np.frombuffer(b"".join(runs), np.int32).tolist())
        prefixes += [tokens[: len(tokens) - 2 * n] for n in range(node.num_blocks)]
    return prefixes


@pytest.mark.parametrize("storage", [False, True])
@pytest.mark.parametrize("write", ["exclusive", "back", "through"])
def test_runs_are_joined_in_every_tier(write: WritePolicy, storage: bool):
    memory = TierMemory(60, 60, write, storage=storage)
    manager = memory.manager

    def use(tokens: list[int]) -> None:
        memory.serve(tokens)
        memory.settle()

    use(TRUNK)
    use(TRUNK[:5])
    use(TRUNK[:12])
    assert num_nodes(manager) == 2
    for _ in range(2):
        use(TRUNK)
        manager.check()
    assert num_nodes(manager) == 1
    manager.evict(60)
    memory.settle()
    assert manager.match(TRUNK).num_host_blocks == len(TRUNK)
    lease = manager.admit(manager.match(TRUNK))
    memory.settle()
    memory.read(lease, TRUNK)
    manager.check()


@pytest.mark.parametrize("is_stored", [False, True])
def test_a_run_in_storage_is_joined_only_with_runs_in_storage(is_stored: bool):
    memory = TierMemory(60, 60, "through", storage=True)
    memory.serve(TRUNK[:5])
    memory.serve_without_copies(TRUNK)
    memory.finish(memory.one(OpKind.DEVICE_TO_HOST))
    memory.finish(memory.one(OpKind.HOST_TO_STORAGE), is_stored)
    assert num_nodes(memory.manager) == 2
    memory.serve(TRUNK)
    assert num_nodes(memory.manager) == (1 if is_stored else 2)


@pytest.mark.parametrize("storage", [False, True])
@pytest.mark.parametrize("num_late", [0, 1, 5])
def test_what_a_request_decodes_is_few_runs_though_each_block_is_copied_alone(
    num_late: int, storage: bool
):
    """Otherwise each block would cost as much as the path before it is long."""
    memory = TierMemory(300, 300, "through", storage=storage)
    tokens, most = [0], 0
    lease = memory.start(tokens)
    memory.compute(lease, tokens)
    for token in range(1, 250):
        tokens.append(token)
        memory.manager.extend(lease, 1)
        memory.compute(lease, tokens)
        memory.take()
        for operation, _ in list(memory.flight.values())[: len(memory.flight) - num_late]:
            memory.finish(operation)
        memory.manager.check()
        most = max(most, num_nodes(memory.manager))
    assert 10 < most <= 20 + num_late
    memory.manager.release(lease)
    memory.settle()
    assert memory.manager.evict(250) == 250
    assert memory.hit(tokens) == (0, 250)
    lease = memory.start(tokens)
    memory.settle()
    memory.read(lease, tokens)


@given(st.integers(0, 2**32), st.integers(1, 6), st.booleans())
def test_joining_a_decoded_path_keeps_every_block_in_its_place(
    seed: int, most_nodes: int, storage: bool
):
    """`TierMemory` checks what each block holds; storage hears of a path's last block first."""
    r = random.Random(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(offload, "_MANY_NODES", most_nodes)
        patch.setattr(storage_recency, "REPORT_INTERVAL", r.choice([1, 5, 100]))
        memory = TierMemory(24, r.choice([8, 30]), "through", storage=storage)
        manager, live = memory.manager, dict[Lease, list[int]]()
        reports: list[list[bytes]] = []
        for _ in range(80):
            action = r.random()
            if action < 0.2 and len(live) < 3:
                tokens = [r.randint(0, 1) for _ in range(r.randint(1, 5))]
                if manager.available >= 8:
                    lease = memory.start(tokens)
                    memory.settle()
                    memory.compute(lease, tokens)
                    live[lease] = tokens
            elif action < 0.7 and live and manager.available:
                lease = r.choice(list(live))
                live[lease].append(r.randint(0, 1))
                manager.extend(lease, 1)
                memory.compute(lease, live[lease])
            elif action < 0.8 and live:
                manager.release(lease := r.choice(list(live)))
                del live[lease]
            elif action < 0.85:
                manager.evict(r.randint(1, 4))
            reports.append(memory.tiers.take_used())
            memory.take()
            for operation, _ in list(memory.flight.values())[r.randint(0, 2) :]:
                memory.finish(operation)
            manager.check()
        memory.settle()
        for lease, tokens in live.items():
            memory.read(lease, tokens)
            manager.release(lease)
        manager.check()
        paths = [memory.namespace.block_keys(tag[1]) for tag in memory.storage.values() if tag]
        for report in reports:
            places = {key: place for place, key in enumerate(report)}
            for path in paths:
                found = [places[key] for key in path if key in places]
                assert found == sorted(found, reverse=True), "a block is told after the next one"


def test_an_idle_path_is_not_joined_when_it_is_copied(monkeypatch: pytest.MonkeyPatch):
    """Its last request ended between the last block and its copy."""
    monkeypatch.setattr(offload, "_MANY_NODES", 2)
    memory = TierMemory(8, 8, "through")
    lease = memory.start([1, 2, 3])
    for end in (1, 2):
        memory.compute(lease, [1, 2, 3][:end])
        memory.settle()
    memory.compute(lease, [1, 2, 3])
    memory.manager.release(lease)
    memory.settle()
    assert memory.residency([1, 2, 3]) == "bbb"
    memory.serve([1, 2, 3])

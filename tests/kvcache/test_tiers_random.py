"""Random requests over all tiers, with copies that end in any order and any way.

Every read finds its own prefix, every invariant holds after each call, and in the end nothing is
left in use. A seed replays its case.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import get_args

import numpy as np
import pytest

from radixkv.kvcache import (
    AllBlocksCleared,
    BlockStored,
    Lease,
    Match,
    Operation,
    OpKind,
    OutOfBlocksError,
    Parked,
    Prefetch,
    RequestTooLargeError,
)
from radixkv.kvcache.tiers.host_tier import WritePolicy

from .tier_memory import TierMemory

NUM_CASES, NUM_STEPS, NUM_GROUPS = 240, 200, 8


@dataclass(eq=False)
class Running:
    """A request with a lease."""

    lease: Lease
    tokens: list[int]
    namespace: bytes
    computed: int | None = None  # tokens, once it has begun


@dataclass(eq=False)
class Waiting:
    """A preempted request."""

    parked: Parked
    tokens: list[int]
    namespace: bytes


class World:
    """A random cache, and what happens to it."""

    def __init__(self, seed: int) -> None:
        self.random = r = random.Random(seed)
        self.block_size = r.randint(1, 3)
        write: WritePolicy = r.choice(get_args(WritePolicy))
        self.memory = TierMemory(
            r.randint(3, 10),
            r.randint(1, 8),
            write,
            hits=r.choice([0, 0, 1, 2]) if write == "through" else 0,
            block_size=self.block_size,
            storage=r.random() < 0.6,
            record_events=True,
        )
        self.manager, self.tiers = self.memory.manager, self.memory.tiers
        self.running: list[Running] = []
        self.waiting: list[Waiting] = []
        self.prefetches: list[Prefetch] = []
        self.asked: list[list[int]] = []  # the tokens of all requests
        self.there: dict[str, set[int]] = {"GPU": set(), "CPU": set()}  # as the events say
        self.tables = self.manager.tables
        self.copies: dict[int, tuple[int, list[int]]] = {}  # version and blocks of their rows
        self.actions: dict[Callable[[], None], float] = {
            self.admit: 30,
            self.resume: 8,
            self.compute: 24,
            self.fork: 10,
            self.release: 8,
            self.park: 6,
            self.unpark: 2,
            self.prefetch: 10,
            self.cancel: 2,
            self.evict: 12,
            self.take: 4,
            self.finish: 40,
            self.fence: 6,
            self.reset: 0.8,
            self.rename: 0.8,
        }
        self.has_storage = self.tiers.storage is not None

    def run(self) -> None:
        actions, weights = list(self.actions), list(self.actions.values())
        for action in self.random.choices(actions, weights, k=NUM_STEPS):
            before = [(tokens, self.manager.match(tokens)) for tokens in self.asked[-4::3]]
            action()
            self.manager.check()
            self.check_matches(before)
            self.check_stats(is_reset=action == self.reset)
            self.check_tables()
        self.drain()

    # Requests

    def tokens(self) -> list[int]:
        """Tokens that often begin as others did."""
        r, longest = self.random, self.manager.num_blocks * self.block_size
        tokens: list[int] = []
        if self.asked and r.random() < 0.9:
            tokens = list(r.choice(self.asked[-4:]))
            tokens = tokens[: r.randint(len(tokens) // 3, len(tokens))]
        fewest = 0 if tokens else 1
        tokens += [r.randint(0, 1) for _ in range(r.randint(fewest, 2 * self.block_size + 1))]
        self.asked.append(tokens[:longest])
        return tokens[:longest]

    def admit(self) -> None:
        namespace = self.random.choice([b"", b"", b"", b"a"])
        self.begin(self.tokens(), namespace)

    def resume(self) -> None:
        ready = [each for each in self.waiting if each.parked.saved]
        if not ready:
            return
        request = self.random.choice(ready)
        tokens = list(request.tokens)
        if len(tokens) < self.manager.num_blocks * self.block_size:
            tokens.append(self.random.randint(0, 2))
        if self.begin(tokens, request.namespace, request.parked):
            self.waiting.remove(request)

    def begin(self, tokens: list[int], namespace: bytes, parked: Parked | None = None) -> bool:
        before = list(tokens)
        match = self.manager.match(tokens, namespace)
        try:
            lease = self.manager.admit(match, parked)
        except (OutOfBlocksError, RequestTooLargeError):
            return False
        assert tokens == before
        self.count_admission(lease)
        self.memory.read(lease, tokens[: lease.num_hit_blocks * self.block_size], namespace)
        self.running.append(Running(lease, tokens, namespace))
        return True

    def pick(self) -> Running | None:
        """A request that a step could run now; all was dispatched before that step."""
        self.take()
        ready = [r for r in self.running if r.lease.loading is None and not r.lease.parking]
        if not ready:
            return None
        request = self.random.choice(ready)
        if request.computed is None:
            request.computed = request.lease.num_ready_tokens
        return request

    def compute(self) -> None:
        if (request := self.pick()) is None or request.computed is None:
            return
        upto = len(request.tokens)
        if self.random.random() < 0.4:
            upto = self.random.randint(request.computed, upto)
        self.memory.write(request.lease, request.tokens[:upto], request.computed, request.namespace)
        request.computed = upto
        if self.random.random() < 0.9:
            self.publish(request, upto)
        if upto == len(request.tokens) and self.random.random() < 0.3:
            self.end(request)

    def publish(self, request: Running, num_tokens: int) -> None:
        """Publish tokens; those of blocks that others have published are duplicates."""
        tokens, before = request.tokens[:num_tokens], self.manager.stats().duplicate_blocks
        others = self.manager.match(tokens, request.namespace).num_blocks
        expected = max(others - request.lease.num_shared_blocks, 0)
        self.manager.publish(request.lease, tokens)
        assert self.manager.stats().duplicate_blocks == before + expected

    def fork(self) -> None:
        if (request := self.pick()) is None:
            return
        tokens = request.tokens[: request.computed]
        try:
            lease = self.tiers.fork(request.lease, tokens)
        except OutOfBlocksError:
            return
        self.count_admission(lease)
        self.running.append(Running(lease, tokens, request.namespace))

    def release(self) -> None:
        if self.running:
            self.end(self.random.choice(self.running))

    def end(self, request: Running) -> None:
        self.running.remove(request)
        self.manager.release(request.lease)

    def park(self) -> None:
        if (request := self.pick()) is None:
            return
        tokens = request.tokens[: request.computed]
        in_storage = self.tiers.storage is not None and self.random.random() < 0.5
        parked = self.tiers.park(request.lease, tokens, "storage" if in_storage else "host")
        if parked is not None:
            self.running.remove(request)
            self.waiting.append(Waiting(parked, request.tokens, request.namespace))

    def unpark(self) -> None:
        if self.waiting:
            request = self.waiting.pop(self.random.randrange(len(self.waiting)))
            self.tiers.unpark(request.parked)

    def prefetch(self) -> None:
        # Mostly of what was there some time ago: storage may have it still.
        again = self.asked and self.random.random() < 0.9
        tokens = self.random.choice(self.asked) if again else self.tokens()
        prefetch = self.tiers.prefetch(tokens)
        if prefetch is not None:
            self.prefetches.append(prefetch)

    def cancel(self) -> None:
        if self.prefetches:
            self.tiers.cancel(self.prefetches.pop(self.random.randrange(len(self.prefetches))))

    # The cache as a whole

    def evict(self) -> None:
        self.manager.evict(self.random.randint(0, 4))

    def reset(self) -> None:
        self.memory.reset([b"a"] if self.random.random() < 0.5 else [])
        self.running.clear()
        if self.random.random() < 0.5:
            while self.waiting:
                self.unpark()

    def rename(self) -> None:
        if self.tiers.storage is not None and self.random.random() < 0.3:
            self.tiers.storage = None
        elif self.has_storage:
            self.memory.rename()

    # Copies

    def take(self) -> None:
        self.memory.take()
        self.tiers.take_cancelled()

    def finish(self) -> None:
        if not self.memory.flight:
            return
        operation, _ = self.random.choice(list(self.memory.flight.values()))
        ok = [True] * operation.num_blocks
        if self.random.random() < 0.2:
            ok = [self.random.random() < 0.6 for _ in ok]
        self.memory.finish(operation, ok, fenced=self.random.random() < 0.85)

    def fence(self) -> None:
        if self.memory.unfenced:
            unfenced: list[Operation] = [each for each, _ in self.memory.unfenced.values()]
            self.memory.fence(self.random.choice(unfenced))

    # What the statistics should say

    def count_admission(self, lease: Lease) -> None:
        self.memory.counts["admitted"] += 1
        self.memory.counts["hit_blocks"] += lease.num_hit_blocks

    def check_stats(self, *, is_reset: bool) -> None:
        """Compare each count that the calls and the events determine."""
        counts, stats = self.memory.counts, self.manager.stats()
        tiers = stats.tiers
        assert tiers is not None
        batch = self.manager.take_events()
        for event in () if batch is None else batch.events:
            if isinstance(event, AllBlocksCleared):
                self.there = {"GPU": set(), "CPU": set()}
            elif event.medium != "STORAGE":
                there, hashes = self.there[event.medium], set(event.block_hashes)
                if isinstance(event, BlockStored):
                    assert not hashes & there
                    there |= hashes
                else:
                    assert hashes <= there
                    there -= hashes
                    if event.medium == "GPU" and not is_reset:
                        counts["evicted_blocks"] += len(hashes)
        assert stats.cached_blocks == len(self.there["GPU"])
        assert tiers.host_cached_blocks == len(self.there["CPU"])
        assert stats.num_blocks == self.manager.num_blocks
        assert self.manager.available == stats.free_blocks + stats.idle_blocks
        assert stats.private_blocks == stats.num_blocks - stats.free_blocks - stats.cached_blocks
        saving = sum(not each.parked.saved for each in self.waiting)
        assert stats.live_leases == len(self.running) + saving
        assert tiers.host_blocks == self.tiers.config.num_blocks
        assert tiers.parked == len(self.waiting)
        with_copies = self.tiers.config.write != "through"
        counts["demoted_blocks"] = counts["evicted_blocks"] * with_copies
        for name, expected in counts.items():
            found = getattr(stats, name, None)
            assert (getattr(tiers, name) if found is None else found) == expected, name

    def check_matches(self, before: list[tuple[list[int], Match]]) -> None:
        """While the version of the tree is the same, a match is what it was: `admit` relies on it.

        Other matches are made again when they are admitted.
        """
        for tokens, old in before:
            new = self.manager.match(tokens)
            assert old._version != new._version or _found(old) == _found(new), tokens

    def check_tables(self) -> None:
        """While its version is the same, a block table only grows: a copy of it stays right."""
        tables = self.manager.tables
        if tables is not self.tables:  # since a reset
            self.tables, self.copies = tables, {}
        for row in np.flatnonzero(tables.live).tolist():
            version, table = tables.versions.item(row), tables.row(row).tolist()
            copied, ids = self.copies.get(row, (version, []))
            assert version > copied or table[: len(ids)] == ids, f"row {row} has the same version"
            self.copies[row] = version, table

    def drain(self) -> None:
        """End everything; then all blocks are free or cached, in each tier."""
        self.memory.settle()
        for request in self.running:
            self.manager.release(request.lease)
        while self.waiting:
            self.unpark()
        self.memory.settle()
        assert all(prefetch.done for prefetch in self.prefetches)
        stats = self.manager.stats()
        assert stats.private_blocks == stats.live_leases == 0
        assert self.manager.available == self.manager.num_blocks
        tiers = stats.tiers
        assert tiers is not None
        assert tiers.open_operations == tiers.quarantined_operations == tiers.parked == 0
        assert tiers.host_free_blocks + tiers.host_cached_blocks == tiers.host_blocks
        assert self.tiers.state.host.available == tiers.host_blocks
        if self.has_storage:  # and now nothing fails
            self.memory.storage.clear()
            self.memory.rename()
            self.memory.settle()
            assert {*self.memory.drop_order()} <= {*self.memory.storage.values()}


def _found(match: Match) -> tuple[object, ...]:
    """What a match found: nodes and copies of the tree, by identity."""
    walk = match._walk
    runs = [(run, run.num_blocks) for run in match.host_runs]
    if walk is None:
        return None, match.num_host_blocks, runs
    ends = walk.node, walk.num_bytes, walk.inside, walk.inside_blocks
    return *ends, match.num_host_blocks, runs


@pytest.mark.parametrize("group", range(NUM_GROUPS))
def test_random_requests(group):
    for seed in range(group, NUM_CASES, NUM_GROUPS):
        try:
            World(seed).run()
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise


def test_the_cases_reach_every_kind_of_copy():
    kinds: Counter[OpKind] = Counter()
    for seed in range(20):
        world = World(seed)
        world.run()
        kinds += world.memory.kinds
    assert set(kinds) == set(OpKind)

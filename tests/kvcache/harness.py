"""A cache manager under traffic, checked after each step against ghost memory and a block-level oracle.

`Harness` has a method per rule. The parameters are small integers that it resolves to requests, so
the Hypothesis machine (`test_manager_machine.py`) and a plain random driver (`drive`, for planted
bugs) share every rule and every check. It uses the public API only.
"""

from __future__ import annotations

import inspect
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from types import ModuleType
from typing import Any, Final

import numpy as np

import radixkv.kvcache
from radixkv.kvcache import CacheManager, Lease, Match
from radixkv.spec import GhostMemory, prefix_tags

from .leaf_lru import Entry, Key, LeafLru
from .observe import Probe, observe

MAX_WAITING: Final = 4
MAX_RUNNING: Final = 6
NAMESPACES: Final = (b"", b"", b"tenant")

BOUNDS: Final = {
    "base": 8,
    "keep": 6,
    "blocks": 6,
    "delta": 3,
    "fill": 81,
    "namespace": len(NAMESPACES),
    "who": MAX_RUNNING,
    "num_tokens": 9,
    "num_blocks": 6,
    "token": 3,
    "rows": 2**MAX_RUNNING,
    "kind": 16,
}
"""Every parameter of a rule is drawn from ``range(BOUNDS[its name])``."""

WEIGHTS: Final = {
    "submit": 7,
    "admit": 9,
    "twin": 3,
    "compute": 5,
    "publish": 4,
    "finish": 6,
    "extend": 3,
    "extend_batch": 3,
    "release": 9,
    "evict": 1,
    "refuse": 1,
    "reset": 0.2,
}
"""How often the random driver takes a rule."""


@dataclass(frozen=True)
class Config:
    num_blocks: int = 8
    block_size: int = 2
    alphabet: int = 2


@dataclass(eq=False)
class Request:
    """A request as its owner knows it: tokens so far, and how many of them have KV."""

    namespace: bytes
    tokens: list[int]
    match: Match
    lease: Any = None  # a Lease of the module under test
    computed: int = 0
    num_hit_blocks: int = 0
    shared: list[Key] = field(default_factory=list)
    private: list[int] = field(default_factory=list)


class Harness:
    """One manager, its requests, and what must be true of both."""

    def __init__(self, config: Config, kvcache: ModuleType = radixkv.kvcache) -> None:
        self.config = config
        self.kvcache = kvcache
        self.manager: CacheManager = kvcache.CacheManager(config.num_blocks, config.block_size)
        self.oracle = LeafLru(config.block_size)
        self.ghost = GhostMemory(config.block_size)
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.ended: list[Lease] = []  # released ones, and those of older epochs
        self.prompts: list[list[int]] = [[]]
        self.admitted = self.hit_blocks = self.evicted_blocks = self.duplicate_blocks = 0
        self.seen: Counter[str] = Counter()

    # What the oracle knows

    @property
    def free_ids(self) -> set[int]:
        """The blocks that nobody has: neither cached nor private."""
        cached = {entry.block for entry in self.oracle.entries.values()}
        private = {block for request in self.running for block in request.private}
        return set(range(1, self.config.num_blocks + 1)) - cached - private

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.config.block_size)

    def room(self, request: Request) -> int:
        return int(request.lease.num_tokens)

    def table(self, request: Request) -> list[int]:
        return self.oracle.blocks(request.shared) + request.private

    # Rules: requests come

    def submit(self, base: int, keep: int, blocks: int, delta: int, fill: int, namespace: int) -> None:
        """A prompt that continues an earlier one, of a length at or beside a block boundary; matched now."""
        size, alphabet = self.config.block_size, self.config.alphabet
        length = max(0, blocks * size + delta - 1)
        tokens = self.prompts[base % len(self.prompts)][: keep * size]
        digits = [fill // alphabet**digit % alphabet for digit in range(4)]
        tokens = (tokens + digits * length)[:length]
        self._wait(tokens, NAMESPACES[namespace])

    def twin(self, who: int) -> None:
        """The same prompt again, while the first is running: both may compute the same blocks."""
        if request := self._pick(self.running, who):
            self._wait(list(request.tokens), request.namespace)
            self._admit(self.waiting[-1])

    def admit(self, who: int) -> None:
        """Admit a request with the match of when it came: it may be stale."""
        if request := self._pick(self.waiting, who):
            self._admit(request)

    def _wait(self, tokens: list[int], namespace: bytes) -> None:
        match = self.manager.match(np.array(tokens, np.int32), namespace)
        self.waiting = [*self.waiting[-MAX_WAITING + 1 :], Request(namespace, tokens, match)]
        self.prompts = [*self.prompts[-BOUNDS["base"] + 1 :], tokens]

    def _admit(self, request: Request) -> None:
        if len(self.running) == MAX_RUNNING:
            return
        length, total = len(request.tokens), self.blocks_for(len(request.tokens))
        path = self.oracle.path(request.namespace, request.tokens)
        hit = path[: self.oracle.hit(path)]
        needed = total - len(hit)
        available = len(self.free_ids) + self.oracle.num_idle - self.oracle.count_idle(hit)
        if request.match.num_blocks != len(hit):
            self.seen["admit with a stale match"] += 1
        if total > self.config.num_blocks:
            message = f"{length} tokens need {total} blocks, but the pool has {self.config.num_blocks}"
            self._refused("RequestTooLargeError", message, lambda: self.manager.admit(request.match))
            self.waiting.remove(request)
            return
        if needed > available:
            message = f"needs {needed} blocks, but only {available} are free or evictable"
            self._refused("OutOfBlocksError", message, lambda: self.manager.admit(request.match))
            return
        self.oracle.pin(hit)
        self._make_room(needed)
        request.lease = self.manager.admit(request.match)
        request.num_hit_blocks, request.shared = len(hit), hit
        request.computed = max(0, min(len(hit) * self.config.block_size, length - 1))
        self._receive(request, needed)
        self.admitted += 1
        self.hit_blocks += len(hit)
        self.waiting.remove(request)
        self.running.append(request)
        if hit:
            self.seen["full hit" if not needed else "hit"] += 1

    # Rules: requests run

    def compute(self, who: int, num_tokens: int, token: int) -> None:
        """Write the KV of the next tokens; one is sampled where all that are known have been computed."""
        if request := self._pick(self.running, who):
            self._compute(request, num_tokens, token % self.config.alphabet)

    def publish(self, who: int, delta: int) -> None:
        """Publish what is computed, or a few tokens fewer."""
        if request := self._pick(self.running, who):
            self._publish(request, max(0, request.computed - delta))

    def finish(self, who: int) -> None:
        """Compute and publish all."""
        if request := self._pick(self.running, who):
            self._compute(request, len(request.tokens) - request.computed, 0)
            self._publish(request, request.computed)

    def _compute(self, request: Request, num_tokens: int, token: int) -> None:
        for _ in range(num_tokens):
            if request.computed == len(request.tokens):
                if len(request.tokens) == self.room(request):
                    break
                request.tokens.append(token)
            position = request.computed
            request.computed += 1
            index, offset = divmod(position, self.config.block_size)
            if index < request.num_hit_blocks:
                self.seen["masked write"] += 1
                continue
            block = request.lease.block_table.tolist()[index]
            cached = [entry.block for entry in self.oracle.entries.values()]
            assert block not in cached, f"published block {block} is written at position {position}"
            tags = prefix_tags(request.namespace, request.tokens[: position + 1])
            self.ghost.write(block, offset, tags[-1])

    def _publish(self, request: Request, num_tokens: int) -> None:
        tokens = np.array(request.tokens[:num_tokens], np.int32)
        entries, last = self.oracle.entries, num_tokens // self.config.block_size
        for key in self.oracle.path(request.namespace, request.tokens)[len(request.shared) : last]:
            block = request.private.pop(0)
            if key in entries:
                self.duplicate_blocks += 1
                held = "a held" if entries[key].users else "an unheld"
                self.seen[f"duplicate of {held} copy"] += 1
                entries[key].users += 1
            else:
                entries[key] = Entry(block, users=1)
            request.shared.append(key)
        self.manager.publish(request.lease, tokens)
        tokens[:] = -7  # the caller's array is the caller's: changing it must not change the cache

    def extend(self, who: int, num_tokens: int) -> None:
        """Make room for more tokens of one request."""
        if not (request := self._pick(self.running, who)):
            return
        needed = self.blocks_for(self.room(request) + num_tokens) - len(self.table(request))
        if not self._can_make_room(needed, lambda: self.manager.extend(request.lease, num_tokens)):
            return
        self.manager.extend(request.lease, num_tokens)
        self._receive(request, needed)

    def extend_batch(self, rows: int) -> None:
        """Make room for one more token of some requests."""
        chosen = [request for i, request in enumerate(self.running) if rows >> i & 1]
        crossing = [r for r in chosen if self.room(r) % self.config.block_size == 0]
        array = np.array([request.lease.row for request in chosen], np.int32)
        if not self._can_make_room(len(crossing), lambda: self.manager.extend_batch(array)):
            return
        self.manager.extend_batch(array)
        self.seen["batch that needs blocks"] += len(crossing) > 1
        for request in crossing:
            self._receive(request, 1)

    def _can_make_room(self, needed: int, call: Callable[[], object]) -> bool:
        available = len(self.free_ids) + self.oracle.num_idle
        if needed > available:
            message = f"needs {needed} blocks, but only {available} are free or evictable"
            self._refused("OutOfBlocksError", message, call)
            return False
        self._make_room(needed)
        return True

    def _make_room(self, needed: int) -> None:
        short = needed - len(self.free_ids)
        if short > 0:
            self.evicted_blocks += len(self.oracle.evict(short))
            self.seen["evicted for room"] += 1

    def _receive(self, request: Request, needed: int) -> None:
        free, table = self.free_ids, request.lease.block_table.tolist()
        given = table[len(table) - needed :]
        assert len(set(given)) == needed, f"asked for {needed} blocks, got {given}"
        assert free.issuperset(given), f"got {given}, but only {sorted(free)} are free"
        request.private += given

    # Rules: requests go

    def release(self, who: int) -> None:
        """A request ends, or is preempted: it is the same to the cache."""
        if request := self._pick(self.running, who):
            self.oracle.unpin(request.shared)
            self.running.remove(request)
            self.manager.release(request.lease)
            self._end(request)

    def evict(self, num_blocks: int) -> None:
        expected = len(self.oracle.evict(num_blocks))
        self.evicted_blocks += expected
        evicted = self.manager.evict(num_blocks)
        assert evicted == expected, f"evicted {evicted} of {num_blocks} blocks, should be {expected}"

    def reset(self) -> None:
        """Forget all. Who is waiting keeps a match of the old epoch."""
        epoch = self.manager.epoch
        assert self.manager.reset() == epoch + 1 == self.manager.epoch
        self.oracle = LeafLru(self.config.block_size)
        for request in self.running:
            self._end(request)
        self.running = []

    def _end(self, request: Request) -> None:
        self.ended = [*self.ended[-3:], request.lease]

    def drain(self) -> None:
        """End everything: the pool is full again, and nothing is cached."""
        while self.running:
            self.release(0)
            self.settle()
        self.evict(self.config.num_blocks)
        self.settle()
        stats = self.manager.stats()
        assert stats.free_blocks == self.manager.available == self.config.num_blocks, stats
        assert stats.cached_blocks == stats.private_blocks == stats.live_leases == 0, stats

    # Rules: refused calls

    def refuse(self, kind: int, who: int) -> None:
        """A call that must be refused by type and text, and change nothing."""
        manager, calls = self.manager, list(self._wrong_calls())
        if request := self._pick(self.running, who):
            calls += self._wrong_calls_of(request)
        if ended := self._pick(self.ended, who):
            calls += self._calls_of_ended(ended)
        if dead := sorted(set(range(4)) - {request.lease.row for request in self.running}):
            row = np.array([dead[0]], np.int32)
            message = f"rows [{dead[0]}] are not all rows of live leases"
            calls.append(("LeaseError", message, lambda: manager.extend_batch(row)))
        self._refused(*calls[kind % len(calls)])

    def _wrong_calls(self) -> Iterator[tuple[str, str, Callable[[], object]]]:
        manager = self.manager
        bad_namespace: Any = "tenant"
        yield "CountError", "num_blocks must be at least 0, got -1", lambda: manager.evict(-1)
        yield (
            "TokenError",
            "token 1 is 2147483648, outside int32",
            lambda: manager.match([0, 2**31]),
        )
        yield (
            "NamespaceError",
            "namespace must be bytes, got 'tenant'",
            lambda: manager.match([0], bad_namespace),
        )

    def _wrong_calls_of(
        self, request: Request
    ) -> Iterator[tuple[str, str, Callable[[], object]]]:
        manager, lease, room = self.manager, request.lease, self.room(request)
        yield (
            "LeaseError",
            f"{room + 1} tokens published on a lease with room for {room}",
            lambda: manager.publish(lease, [0] * (room + 1)),
        )
        yield "CountError", "num_tokens must be at least 0, got -2", lambda: manager.extend(lease, -2)
        yield (
            "LeaseError",
            f"rows [{lease.row}, {lease.row}] name a lease twice",
            lambda: manager.extend_batch(np.array([lease.row, lease.row], np.int32)),
        )
        needed = len(self.free_ids) + self.oracle.num_idle + 1
        yield (
            "OutOfBlocksError",
            f"needs {needed} blocks, but only {needed - 1} are free or evictable",
            lambda: manager.extend(lease, needed * self.config.block_size),
        )

    def _calls_of_ended(self, lease: Lease) -> Iterator[tuple[str, str, Callable[[], object]]]:
        manager = self.manager
        message = "the lease was released, or is of another manager"
        if lease.epoch != manager.epoch:
            message = f"the lease is of epoch {lease.epoch}, the cache of {manager.epoch}"
            yield "", "", lambda: manager.release(lease)  # it ended with the reset: harmless
        else:
            yield "LeaseError", message, lambda: manager.release(lease)
        yield "LeaseError", message, lambda: manager.publish(lease, [])
        yield "LeaseError", message, lambda: manager.extend(lease, 1)
        yield "LeaseError", message, lambda: manager.next_block(lease, [0, 0])

    def _refused(self, error: str, message: str, call: Callable[[], object]) -> None:
        with self.unchanged():
            if not error:
                call()
                return
            try:
                call()
            except self.kvcache.RadixKVError as caught:
                assert (type(caught).__name__, str(caught)) == (error, message)
            else:
                raise AssertionError(f"not refused with {error}: {message}")
        self.seen[error] += 1

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Assert that nothing observable is changed, not even the order of what comes next."""
        before = self._observe()
        yield
        after = self._observe()
        changed = [name for name in before if before[name] != after[name]]
        assert not changed, f"a refused call changed {changed}"

    def _observe(self) -> dict[str, Any]:
        return observe(self.manager, [r.lease for r in self.running], self.probes())

    def probes(self) -> list[Probe]:
        """All that is published, and all that is asked for."""
        requests = [(r.namespace, r.tokens) for r in [*self.running, *self.waiting]]
        return [*self.oracle.entries, *requests]

    # What must be true after each step

    def settle(self) -> None:
        """Check the manager's own invariants, then all of it from outside."""
        self.manager.check()
        self._check_stats()
        for request in self.running:
            self._check_lease(request)
        self._check_matches()
        self._check_next_blocks()

    def _check_stats(self) -> None:
        entries, free = self.oracle.entries, len(self.free_ids)
        expected = {
            "num_blocks": self.config.num_blocks,
            "free_blocks": free,
            "cached_blocks": len(entries),
            "idle_blocks": self.oracle.num_idle,
            "private_blocks": sum(len(request.private) for request in self.running),
            "live_leases": len(self.running),
            "admitted": self.admitted,
            "hit_blocks": self.hit_blocks,
            "evicted_blocks": self.evicted_blocks,
            "duplicate_blocks": self.duplicate_blocks,
        }
        stats = asdict(self.manager.stats())
        wrong = {name: (stats[name], n) for name, n in expected.items() if stats[name] != n}
        assert not wrong, f"stats and what they should be: {wrong}"
        available = self.manager.available
        assert available == free + self.oracle.num_idle, f"{available} blocks available"

    def _check_lease(self, request: Request) -> None:
        lease = request.lease
        table = lease.block_table.tolist()
        assert table == self.table(request), f"table {table}, should be {self.table(request)}"
        assert lease.num_blocks == len(table) == self.blocks_for(lease.num_tokens)
        assert lease.num_hit_blocks == request.num_hit_blocks
        assert lease.num_shared_blocks == len(request.shared)
        row = self.manager.tables.ids[lease.row]
        assert row[: len(table)].tolist() == table and not row[len(table) :].any()
        # The oracle of content: whatever blocks it was given, it reads its own prefix.
        tags = prefix_tags(request.namespace, request.tokens[: request.computed])
        self.ghost.read_sequence(table, tags)

    def _check_matches(self) -> None:
        # Each published block is found; with the equal counts of the stats: nothing else is.
        for namespace, tokens in self.probes():
            match = self.manager.match(tokens, namespace)
            hit = self.oracle.hit(self.oracle.path(namespace, tokens))
            assert match.num_blocks == hit, f"{tokens}: {match.num_blocks} blocks hit, not {hit}"
            assert match.num_tokens == hit * self.config.block_size

    def _check_next_blocks(self) -> None:
        # Two requests wait for the same block if and only if it would be the same.
        size = self.config.block_size
        following: list[tuple[Key, object]] = []
        for request in self.running:
            found = self.manager.next_block(request.lease, request.tokens)
            end = (len(request.shared) + 1) * size
            if len(request.tokens) < end:
                assert found is None, "there is no next block"
                continue
            key = (request.namespace, tuple(request.tokens[:end]))
            following.append((key, found))
            match = self.manager.match(request.tokens, request.namespace)
            if match.num_blocks == len(request.shared):
                assert match.next_block == found, "leader and follower name another next block"
        for key, found in following:
            for other_key, other in following:
                assert (found == other) == (key == other_key), f"next blocks of {key}, {other_key}"

    def _pick(self, things: list[Any], who: int) -> Any:
        return things[who % len(things)] if things else None


def drive(
    seed: int, num_steps: int, kvcache: ModuleType = radixkv.kvcache, steps_per_case: int = 80
) -> Counter[str]:
    """Run the rules in random order on one tiny configuration after another.

    Returns:
        How often each situation of interest came up.
    """
    rng = random.Random(seed)
    names, weights = list(WEIGHTS), list(WEIGHTS.values())
    parameters = {name: list(inspect.signature(getattr(Harness, name)).parameters)[1:] for name in names}
    seen: Counter[str] = Counter()
    for _ in range(num_steps // steps_per_case):
        harness = Harness(random_config(rng), kvcache)
        for name in rng.choices(names, weights, k=steps_per_case):
            arguments = [rng.randrange(BOUNDS[parameter]) for parameter in parameters[name]]
            getattr(harness, name)(*arguments)
            harness.settle()
        harness.drain()
        seen += harness.seen
    return seen


def random_config(rng: random.Random) -> Config:
    return Config(rng.randint(4, 14), rng.randint(1, 4), rng.randint(2, 3))

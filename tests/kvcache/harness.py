"""A cache manager under traffic, beside ghost memory and a block-level oracle.

`Harness` has a method per rule. The parameters are small integers that it resolves to requests, so
the Hypothesis machine (`test_manager_machine.py`) and the random driver (`driver.py`) share every
rule and every check. It uses the public API only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Final

import numpy as np

import radixkv.kvcache
from radixkv.kvcache import CacheManager, Lease, Match
from radixkv.spec import GhostMemory, prefix_tags

from .leaf_lru import Entry, Key, LeafLru
from .observe import Probe, observe
from .settle import settle
from .wrong_calls import calls_of_ended, wrong_calls, wrong_calls_of

MAX_WAITING: Final = 4
MAX_RUNNING: Final = 6
NAMESPACES: Final = (b"", b"", b"tenant")

BOUNDS: Final = {
    "base": 8,
    "keep": 5,
    "blocks": 5,
    "delta": 3,
    "fill": 81,
    "namespace": len(NAMESPACES),
    "who": MAX_RUNNING,
    "num_tokens": 5,
    "num_blocks": 6,
    "token": 3,
    "rows": 2**MAX_RUNNING,
    "kind": 16,
}
"""Every parameter of a rule is drawn from ``range(BOUNDS[its name])``."""


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

    def __init__(
        self, config: Config, kvcache: ModuleType = radixkv.kvcache, white_box: bool = True
    ) -> None:
        self.config = config
        self.white_box = white_box
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

    def submit(
        self, base: int, keep: int, blocks: int, delta: int, fill: int, namespace: int
    ) -> None:
        """A prompt that continues an earlier one, of some blocks or a token off; matched now."""
        size, alphabet = self.config.block_size, self.config.alphabet
        length = max(0, blocks * size + delta - 1)
        tokens = self.prompts[base % len(self.prompts)][: keep * size]
        digits = [fill // alphabet**digit % alphabet for digit in range(4)]
        tokens = (tokens + digits * length)[:length]
        self.arrive(tokens, NAMESPACES[namespace])

    def serve(
        self, base: int, keep: int, blocks: int, delta: int, fill: int, namespace: int
    ) -> None:
        """A whole request, from match to release."""
        self.submit(base, keep, blocks, delta, fill, namespace)
        if self._admit(self.waiting[-1]):
            self.finish(len(self.running) - 1)
            self.release(len(self.running) - 1)

    def twin(self, who: int) -> None:
        """The same prompt twice at once: both may compute the same blocks."""
        if request := self._pick([*self.waiting, *self.running], who):
            if request in self.waiting:
                self._admit(request)
            self.arrive(list(request.tokens), request.namespace)
            self._admit(self.waiting[-1])

    def admit(self, who: int) -> None:
        """Admit a request with the match of when it came: it may be stale."""
        if request := self._pick(self.waiting, who):
            self._admit(request)

    def arrive(self, tokens: list[int], namespace: bytes) -> None:
        """A request comes, and waits with the match of now."""
        match = self.manager.match(np.array(tokens, np.int32), namespace)
        self.waiting = [*self.waiting[-MAX_WAITING + 1 :], Request(namespace, tokens, match)]
        self.prompts = [*self.prompts[-BOUNDS["base"] + 1 :], tokens]

    def _admit(self, request: Request) -> bool:
        if len(self.running) == MAX_RUNNING:
            return False
        length, total = len(request.tokens), self.blocks_for(len(request.tokens))
        path = self.oracle.path(request.namespace, request.tokens)
        hit = path[: self.oracle.hit(path)]
        needed = total - len(hit)
        available = len(self.free_ids) + self.oracle.num_idle - self.oracle.count_idle(hit)
        if request.match.num_blocks != len(hit):
            self.seen["admit with a stale match"] += 1
        if total > self.config.num_blocks:
            message = (
                f"{length} tokens need {total} blocks, but the pool has {self.config.num_blocks}"
            )
            self._refused(
                "RequestTooLargeError", message, lambda: self.manager.admit(request.match)
            )
            self.waiting.remove(request)
            return False
        if needed > available:
            message = f"needs {needed} blocks, but only {available} are free or evictable"
            self._refused("OutOfBlocksError", message, lambda: self.manager.admit(request.match))
            return False
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
        return True

    # Rules: requests run

    def compute(self, who: int, num_tokens: int, token: int) -> None:
        """Write the KV of the next tokens; where all are written, sample one more."""
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
        assert evicted == expected, (
            f"evicted {evicted} of {num_blocks} blocks, should be {expected}"
        )

    def reset(self) -> None:
        """Forget all. Who is waiting keeps a match of the old epoch."""
        epoch = self.manager.epoch
        assert self.manager.reset() == epoch + 1 == self.manager.epoch, "a reset begins an epoch"
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
        manager, calls = self.manager, list(wrong_calls(self))
        if request := self._pick(self.running, who):
            calls += wrong_calls_of(self, request)
        if ended := self._pick(self.ended, who):
            calls += calls_of_ended(self, ended)
        if dead := sorted(set(range(4)) - {request.lease.row for request in self.running}):
            row = np.array([dead[0]], np.int32)
            message = f"rows [{dead[0]}] are not all rows of live leases"
            calls.append(("LeaseError", message, lambda: manager.extend_batch(row)))
        self._refused(*calls[kind % len(calls)])

    def _refused(self, error: str, message: str, call: Callable[[], object]) -> None:
        with self.unchanged():
            if not error:
                call()
                return
            try:
                call()
            except self.kvcache.RadixKVError as caught:
                found = f"{type(caught).__name__}: {caught}"
                assert found == f"{error}: {message}", f"{found}, should be {error}: {message}"
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

    def settle(self) -> None:
        """Assert what must be true after each step."""
        settle(self)

    def _pick(self, things: list[Any], who: int) -> Any:
        return things[who % len(things)] if things else None

"""Adapter of our cache manager for the specification, at every depth."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, TypeAlias

import numpy as np

from ... import kvcache as own_kvcache
from ...spec.adapters.cache import Events, Factory, Promises, Snapshot
from ...spec.adapters.references import count_references
from ...spec.model.events import Batch
from ...spec.rules.cache import C3
from ...spec.rules.rule import require
from .kv_events import KEPT_BATCHES, as_event
from .lent_tokens import Lent, lend, lending, listed, take_back
from .misuse import misuse

Prefix: TypeAlias = tuple[bytes, tuple[int, ...]]
"""A namespace, and all tokens of the prefix."""


def make_factory(kvcache: ModuleType | None = None) -> Factory:
    """Return a factory of adapters for `kvcache`, a copy of `radixkv.kvcache`, or for our own."""
    module = own_kvcache if kvcache is None else kvcache
    return lambda num_blocks, block_size: CacheAdapter(module, num_blocks, block_size)


def _set_sizes(kvcache: ModuleType, num_blocks: int) -> None:
    """Lower thresholds for every other cache, so that tiny ones use the code of large ones."""
    large = num_blocks % 2 == 1
    few = num_blocks // 2 % 2  # with 0, every eviction takes leaves in phases
    tree, tables = kvcache.prefix.radix_tree, kvcache.prefix.block_tables
    tree._FEW, tree._AT_ONCE = (few, 3) if large else (16, 1024)
    tables._FIRST_ROWS = tables._FIRST_IDS = 2 if large else 64
    tables._LEAST_ROOM, tables._KEPT_IDS = (1, 4) if large else (16, 2**18)


def _padded_row(tables: Any, row: int) -> list[int]:
    """Return the whole segment of a row: its blocks, and the entries past them."""
    start = tables._starts[row]
    return list(map(int, tables._ids[start : start + tables._rooms[row]]))


class CacheAdapter:
    """A `CacheManager` whose leases have names.

    Tokens are passed as `lend` says. Those of a match stay with the cache until the admission.
    """

    promises = Promises.all()

    def __init__(self, kvcache: ModuleType, num_blocks: int, block_size: int) -> None:
        self.kvcache = kvcache
        _set_sizes(kvcache, num_blocks)
        # In half of the worlds; odd numbers are those of other thresholds.
        self.records_events = num_blocks % 4 in (1, 2)
        self.manager = self._make_manager(num_blocks, block_size)
        self._batches: list[Batch] = []
        self._kept = kvcache.ReplayBuffer(KEPT_BATCHES)
        self.leases: dict[str, Any] = {}
        self.ended: list[Any] = []  # last leases that were released, or ended by a reset
        self.matches: dict[str, tuple[Any, Lent]] = {}
        self._matched: dict[str, list[int]] = {}  # the tokens of these matches, as they must stay
        self.steps_begun = self.steps_ended = 0
        self._refusal = (0, 0)
        self._has_misused = False
        self._events: Events | None = None
        self.publisher = ""
        self._tokens: dict[str, list[int]] = {}  # of requests without append_batch

    def _make_manager(self, num_blocks: int, block_size: int) -> Any:
        return self.kvcache.CacheManager(num_blocks, block_size, record_events=self.records_events)

    # Depth api

    def match(self, name: str, tokens: list[int], namespace: bytes) -> int:
        """Match tokens, and keep the match for the next admission of the name."""
        before, lent = tokens.copy(), lend(tokens)
        match = self.manager.match(lent, namespace)
        tokens[:] = listed(lent)
        self.matches[name] = (match, lent)
        self._matched[name] = before
        hit: int = match.num_tokens
        return hit

    def admit(self, name: str, tokens: list[int], namespace: bytes) -> int | None:
        """Admit with the kept match, which may be old, or with a new one."""
        if self._matched.get(name) == tokens:
            match, lent = self.matches[name]
        else:
            lent = lend(tokens)
            match = self.manager.match(lent, namespace)
        self.matches.pop(name, None)
        self._matched.pop(name, None)
        hit = self._admit(name, match, lent)
        take_back(lent, tokens)
        return hit

    def _admit(self, name: str, match: Any, lent: Lent) -> int | None:
        try:
            lease = self._lease(name, match, lent)
        except self.kvcache.OutOfBlocksError as error:
            self._refusal = (error.needed, error.available)
            return None
        except self.kvcache.RequestTooLargeError as error:
            self._refusal = (error.needed, error.num_blocks)
            return None
        self.leases[name] = lease
        self._tokens[name] = listed(lent).copy()
        self._report_new(name, lease.num_shared_blocks)
        return int(lease.num_hit_blocks * self.manager.block_size)

    def _lease(self, name: str, match: Any, lent: Lent) -> Any:
        return self.manager.admit(match)

    def append(self, name: str, tokens: Sequence[int]) -> bool:
        """Extend a lease by tokens; return whether blocks sufficed."""
        lease = self.leases[name]
        done = self._grow([name], lambda: self.manager.extend(lease, len(tokens)))
        if done and name in self._tokens:
            self._tokens[name] += tokens
        return done

    def append_batch(self, names: Sequence[str]) -> bool:
        """Extend leases by one token each in one call; return whether blocks sufficed."""
        for name in names:
            self._tokens.pop(name, None)
        rows = [self.leases[name].row for name in names]
        with lending(given := rows.copy()) as lent:
            done = self._grow(names, lambda: self.manager.extend_batch(lent))
        self._require_same("extend_batch", rows, given)
        return done

    def _grow(self, names: Sequence[str], call: Callable[[], None]) -> bool:
        before = {name: self.leases[name].num_blocks for name in names}
        try:
            call()
        except self.kvcache.OutOfBlocksError as error:
            self._refusal = (error.needed, error.available)
            return False
        for name, held in before.items():
            self._report_new(name, held)
        return True

    def refusal(self) -> tuple[int, int]:
        """Return the blocks needed and available at the last refusal."""
        return self._refusal

    def publish(self, name: str, tokens: list[int]) -> None:
        """Publish computed tokens."""
        self.publisher = name
        with lending(tokens) as lent:
            self.manager.publish(self.leases[name], lent)

    def release(self, name: str) -> None:
        """Release a lease."""
        lease = self.leases.pop(name)
        self.manager.release(lease)
        self.ended = [*self.ended[-2:], lease]

    def block_table(self, name: str) -> list[int]:
        """Return the block table of a lease."""
        table: list[int] = self.leases[name].block_table.tolist()
        return table

    def available(self) -> int:
        """Return the number of blocks that are free or evictable."""
        number: int = self.manager.available
        return number

    def begin_step(self) -> None:
        """Begin a step that reads the block tables as they are now."""
        self.steps_begun += 1
        self.manager.begin_step()

    def end_step(self) -> None:
        """End the first step in flight."""
        self.steps_ended += 1
        self.manager.end_step()

    def evict(self, num_blocks: int) -> int:
        """Evict idle blocks, and return how many."""
        number: int = self.manager.evict(num_blocks)
        return number

    def reset(self) -> None:
        """Reset the cache, which ends all leases."""
        epoch = self.manager.epoch
        assert self.manager.reset() == epoch + 1 == self.manager.epoch, "a reset begins an epoch"
        self.steps_ended = self.steps_begun
        self.ended = [*self.ended, *self.leases.values()][-3:]
        self.leases.clear()
        if self._events is not None:
            self.report_to(self._events)

    def misuse(self, kind: int, name: str) -> None:
        """Make wrong calls and check that they are refused; see `misuse.py`."""
        misuse(self, kind, name, is_first=not self._has_misused)
        self._has_misused = True

    def check(self) -> None:
        """Run the manager's own check."""
        self.manager.check()

    def size(self) -> int:
        """Return the number of references that the manager holds, besides events to be taken."""
        self._take_events()
        return count_references(self.manager, self.manager.tables._free_rows)

    # KV events

    def _take_events(self) -> None:
        batch = self.manager.take_events()
        if batch is not None:
            taken = Batch(batch.seq, [as_event(each) for each in batch.events])
            self._batches.append(taken)
            self._kept.add(taken.seq, taken)

    def _kv_events(self) -> list[Batch]:
        """Return the batches since the last call."""
        self._take_events()
        batches, self._batches = self._batches, []
        return batches

    def _replay(self, seq: int) -> list[Batch]:
        """Return the batches from number seq on again."""
        return [batch for _, batch in self._kept.since(seq)]

    @property
    def kv_events(self) -> Callable[[], list[Batch]] | None:
        """Take the KV events, if this world has them."""
        return self._kv_events if self.records_events else None

    @property
    def replay(self) -> Callable[[int], list[Batch]] | None:
        """Replay KV events, if this world has them."""
        return self._replay if self.records_events else None

    # Depth events

    def report_to(self, events: Events) -> None:
        """Report events from now on, by wrapping methods of pool and tree."""
        self._events = events
        manager, pool, tree = self.manager, self.manager._pool, self.manager._tree

        # Call the methods of the class: after a reset, those of the pool are already wrapped.
        def watched_recycle(ids: np.ndarray) -> None:
            type(pool).recycle(pool, ids)
            events.freed(ids.tolist())

        def watched_evict(num_blocks: int) -> np.ndarray:
            victims: np.ndarray = type(tree).evict(tree, num_blocks)
            events.evicted(victims.tolist())
            return victims

        def watched_append(node: Any, tokens: bytes, device_blocks: bytes) -> Any:
            events.published(self.publisher, np.frombuffer(device_blocks, np.int32).tolist())
            return type(tree).append(tree, node, tokens, device_blocks)

        def watched_replace(blocks: np.ndarray) -> None:
            if self.steps_begun > self.steps_ended:
                events.replaced(self.publisher, blocks.tolist())
            type(manager)._recycle_replaced(manager, blocks)

        manager._recycle_replaced = watched_replace
        pool.recycle, tree.evict, tree.append = watched_recycle, watched_evict, watched_append

    def _report_new(self, name: str, held: int) -> None:
        if self._events is not None:
            new = self.leases[name].block_table[held:].tolist()
            if new:
                self._events.allocated(name, new)

    # Depth full

    def snapshot(self) -> Snapshot:
        """Return the state of pool, tree, tables and leases."""
        manager = self.manager
        for name, (_, lent) in self.matches.items():
            self._require_same(f"the match of {name}", self._matched[name], listed(lent))
        cached, users = self._published()
        idle: list[int] = []
        for node in manager._tree.idle_nodes():
            idle += reversed(memoryview(node.device_blocks).cast("i").tolist())
        tables = manager.tables
        stats = manager.stats()
        return Snapshot(
            free=manager._pool.free_ids().tolist(),
            cached=cached,
            users=users,
            idle=idle,
            rows={name: _padded_row(tables, lease.row) for name, lease in self.leases.items()},
            next_blocks={
                name: self._next_block(name, tokens)
                for name, tokens in self._tokens.items()
                if name in self.leases
            },
            waiting_blocks={
                name: manager.match(lent, match._namespace).next_block
                for name, (match, lent) in self.matches.items()
            },
            available_after={
                name: manager.available_after(match) for name, (match, _) in self.matches.items()
            },
            counts={name: value for name, value in vars(stats).items() if name != "tiers"},
        )

    def _next_block(self, name: str, tokens: list[int]) -> Any:
        with lending(given := tokens.copy()) as lent:
            found = self.manager.next_block(self.leases[name], lent)
        self._require_same("next_block", tokens, given)
        return found

    def _require_same(self, what: str, before: list[int], after: list[int]) -> None:
        require(before == after, C3, "{} was given {}, and it is now {}", what, before, after)

    def _published(self) -> tuple[dict[Prefix, int], dict[Prefix, int]]:
        """Return block and number of users of each published prefix."""
        cached: dict[Prefix, int] = {}
        users: dict[Prefix, int] = {}
        size = self.manager.block_size
        nodes: list[tuple[bytes, tuple[int, ...], Any]] = []
        for namespace, root in self.manager._tree.roots.items():
            nodes += [(namespace, (), child) for child in root.children.values()]
        while nodes:
            namespace, tokens, node = nodes.pop()
            end, refs = len(tokens), node.refs
            tokens += tuple(memoryview(node.tokens).cast("i").tolist())
            for block in memoryview(node.device_blocks).cast("i").tolist():
                end += size
                prefix = (namespace, tokens[:end])
                cached[prefix], users[prefix] = block, refs
            nodes += [(namespace, tokens[:end], child) for child in node.children.values()]
        return cached, users

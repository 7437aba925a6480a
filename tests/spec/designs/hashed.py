"""Managers of hashed blocks: of a dictionary, of nano-vllm, and of vLLM."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

from radixkv.spec.adapters.cache import Promises

Prefix: TypeAlias = tuple[bytes, tuple[int, ...]]
"""Stands for the hash of a block: its namespace, and all tokens up to its end."""


class Hashed:
    """Block tables of requests over a queue of blocks; a block in the queue can still be hit.

    Copies of a block are all entered under its hash, as in vLLM, or the last one replaces those
    before it, as in nano-vllm, or a copy stays private.
    """

    promises = Promises(
        hits_all=True, refuses_only_short=True, holds_exactly=True, leaves_first=True, lru=True,
        ages_from_release=True, frees_at_once=True, counts_available=True,
    )  # fmt: skip

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.queue = deque(range(num_blocks))  # without users, the least recently used first
        self.users = dict.fromkeys(range(num_blocks), 0)
        self.hash_of: dict[int, Prefix] = {}
        self.blocks_of: dict[Prefix, list[int]] = {}
        self.tables: dict[str, list[int]] = {}
        self.lengths: dict[str, int] = {}
        self.namespaces: dict[str, bytes] = {}
        self.events: Any = None

    def report_to(self, events: Any) -> None:
        self.events = events

    def hashes(self, namespace: bytes, tokens: Sequence[int]) -> Iterator[Prefix]:
        for end in range(self.block_size, len(tokens) + 1, self.block_size):
            yield namespace, tuple(tokens[:end])

    def admit(self, name: str, tokens: Sequence[int], namespace: bytes) -> int | None:
        table: list[int] = []
        for prefix in self.hashes(namespace, tokens[:-1]):
            if prefix not in self.blocks_of:
                break
            table.append(self.blocks_of[prefix][0])
        hit = len(table) * self.block_size
        unused = [block for block in table if not self.users[block]]
        if self.short(len(tokens), len(table)) > len(self.queue) - len(unused):
            return None
        for block in table:
            self.users[block] += 1
        for block in unused:
            self.queue.remove(block)
        self.tables[name], self.lengths[name], self.namespaces[name] = table, hit, namespace
        assert self.append(name, tokens[hit:]), "there is room"
        return hit

    def short(self, num_tokens: int, num_blocks: int) -> int:
        return -(-num_tokens // self.block_size) - num_blocks

    def append(self, name: str, tokens: Sequence[int]) -> bool:
        length = self.lengths[name] + len(tokens)
        short = self.short(length, len(self.tables[name]))
        if short > len(self.queue):
            return False
        new = [self.queue.popleft() for _ in range(short)]
        self.lengths[name] = length
        self.forget(new)
        for block in new:
            self.users[block] = 1
        self.tables[name] += new
        self.report("allocated", name, new)
        return True

    def forget(self, blocks: Sequence[int]) -> None:
        hashed = [block for block in blocks if block in self.hash_of]
        for block in hashed:
            prefix = self.hash_of.pop(block)
            self.blocks_of[prefix].remove(block)
            if not self.blocks_of[prefix]:
                del self.blocks_of[prefix]
        self.report("evicted", hashed)

    def publish(self, name: str, tokens: Sequence[int]) -> None:
        prefixes = self.hashes(self.namespaces[name], tokens)
        for block, prefix in zip(self.tables[name], prefixes, strict=False):
            if block not in self.hash_of:
                self.enter(name, block, prefix)

    def enter(self, name: str, block: int, prefix: Prefix) -> None:
        self.hash_of[block] = prefix
        self.blocks_of.setdefault(prefix, []).append(block)
        self.report("published", name, [block])

    def release(self, name: str) -> None:
        for block in reversed(self.tables.pop(name)):  # so that the last ones are reused first
            self.users[block] -= 1
            if not self.users[block]:
                self.queue.append(block)
                if block not in self.hash_of:
                    self.report("freed", [block])

    def block_table(self, name: str) -> list[int]:
        return self.tables[name]

    def available(self) -> int:
        return len(self.queue)

    def reset(self) -> None:
        for name in list(self.tables):
            self.release(name)
        self.report("freed", list(self.hash_of))
        self.hash_of.clear()
        self.blocks_of.clear()

    def report(self, event: str, *arguments: Any) -> None:
        if self.events is not None:
            getattr(self.events, event)(*arguments)


class LastCopy(Hashed):
    """The last copy replaces the others, which cannot be hit any more: nano-vllm."""

    promises = Promises(
        refuses_only_short=True, holds_exactly=True, leaves_first=True, lru=True,
        ages_from_release=True, frees_at_once=True, counts_available=True,
    )  # fmt: skip

    def forget(self, blocks: Sequence[int]) -> None:
        hashed = [block for block in blocks if block in self.hash_of]
        for block in hashed:
            prefix = self.hash_of.pop(block)
            if self.blocks_of.get(prefix) == [block]:
                del self.blocks_of[prefix]
        self.report("evicted", hashed)

    def enter(self, name: str, block: int, prefix: Prefix) -> None:
        self.hash_of[block] = prefix
        self.blocks_of[prefix] = [block]
        self.report("published", name, [block])


class PrivateCopy(Hashed):
    """A copy stays private to its request, and blocks that follow it are published."""

    promises = Promises(
        hits_all=True, refuses_only_short=True, holds_exactly=True, one_copy=True,
        lru=True, ages_from_release=True, frees_at_once=True, counts_available=True,
    )  # fmt: skip

    def enter(self, name: str, block: int, prefix: Prefix) -> None:
        if prefix not in self.blocks_of:
            super().enter(name, block, prefix)


class Dictionary:
    """Thirty lines: a dictionary from prefixes to blocks, of which any unused one is evicted."""

    promises = Promises(hits_all=True, counts_available=True)

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size, self.free = block_size, list(range(num_blocks))
        self.cached: dict[Prefix, int] = {}
        self.running: dict[str, tuple[bytes, list[int], int]] = {}
        self.events: Any = None

    def report_to(self, events: Any) -> None:
        self.events = events

    def prefixes(self, namespace: bytes, tokens: Sequence[int]) -> list[Prefix]:
        ends = range(self.block_size, len(tokens) + 1, self.block_size)
        return [(namespace, tuple(tokens[:end])) for end in ends]

    def unused(self) -> list[Prefix]:
        used = {block for _, table, _ in self.running.values() for block in table}
        return [prefix for prefix, block in self.cached.items() if block not in used]

    def admit(self, name: str, tokens: Sequence[int], namespace: bytes) -> int | None:
        table: list[int] = []
        for prefix in self.prefixes(namespace, tokens[:-1]):
            if prefix not in self.cached:
                break
            table.append(self.cached[prefix])
        hit = len(table) * self.block_size
        self.running[name] = namespace, table, hit
        if self.append(name, tokens[hit:]):
            return hit
        del self.running[name]
        return None

    def append(self, name: str, tokens: Sequence[int]) -> bool:
        namespace, table, length = self.running[name]
        length += len(tokens)
        short = -(-length // self.block_size) - len(table)
        if short > self.available():
            return False
        for prefix in self.unused()[: max(0, short - len(self.free))]:
            self.free.append(self.cached.pop(prefix))
            if self.events:
                self.events.evicted(self.free[-1:])
                self.events.freed(self.free[-1:])
        new = [self.free.pop() for _ in range(short)]
        table += new
        self.running[name] = namespace, table, length
        if self.events:
            self.events.allocated(name, new)
        return True

    def publish(self, name: str, tokens: Sequence[int]) -> None:
        namespace, table, _ = self.running[name]
        for block, prefix in zip(table, self.prefixes(namespace, tokens), strict=False):
            if self.cached.setdefault(prefix, block) == block and self.events:
                self.publish_one(name, block)

    def publish_one(self, name: str, block: int) -> None:
        if block not in self.events.cached:
            self.events.published(name, [block])

    def release(self, name: str) -> None:
        table = self.running.pop(name)[1]
        private = [block for block in table if block not in self.cached.values()]
        self.free += private
        if self.events:
            self.events.freed(private)

    def block_table(self, name: str) -> list[int]:
        return self.running[name][1]

    def available(self) -> int:
        return len(self.free) + len(self.unused())

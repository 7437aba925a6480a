"""Simulated memory of all tiers, whose copies end when and how a test decides."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Final, TypeAlias

import numpy as np

from radixkv.kvcache import CacheManager, HostConfig, Lease, Operation, OpId, OpKind, TierStats
from radixkv.kvcache.prefix.node import Node
from radixkv.kvcache.storage.keys import StorageNamespace
from radixkv.kvcache.tiers.host_tier import HostRun, TieredNode, WritePolicy

Tag: TypeAlias = tuple[bytes, tuple[int, ...]] | None
"""What a block holds: a namespace and all tokens through its last; None is garbage."""

GARBAGE: Final = None
Results: TypeAlias = bool | Sequence[bool]


def as_list(array: np.ndarray) -> list[int]:
    return [int(item) for item in array]


class TierMemory:
    """A manager with tiers, and simulated memory for its blocks.

    Its operations are executed as `Operation` says, and as unkindly as that allows: all sources of
    one `take` are read before anything is written; a destination is garbage from then on until its
    operation ends well; what has not ended well is written with garbage once more at the fence.
    """

    def __init__(
        self,
        num_blocks: int,
        host_blocks: int,
        write: WritePolicy | None = "back",
        *,
        hits: int = 0,
        block_size: int = 1,
        storage: bool = False,
        record_events: bool = False,
    ) -> None:
        self.namespace = StorageNamespace("m", "w", "float32", block_size, (0, 1), (0, 1))
        self.manager = CacheManager(
            num_blocks,
            block_size,
            host=HostConfig(host_blocks, write, hits),
            storage=self.namespace if storage else None,
            record_events=record_events,
        )
        assert self.manager.tiers is not None
        self.tiers = self.manager.tiers
        self.device: dict[int, Tag] = {}
        self.host: dict[int, Tag] = {}
        self.storage: dict[bytes, Tag] = {}
        self.weights: Counter[bytes] = Counter()  # how often those of a namespace changed
        self.renames = 0  # changes of the namespace of storage alone
        self.kinds: Counter[OpKind] = Counter()  # operations, so far
        self.flight: dict[OpId, tuple[Operation, list[Tag]]] = {}
        self.unfenced: dict[OpId, tuple[Operation, list[bool]]] = {}
        self.counts: Counter[str] = Counter()  # what the statistics should say

    # Operations

    def take(self) -> list[Operation]:
        """Dispatch the queued operations."""
        taken = self.tiers.take_operations()
        reads = [self._read_sources(operation) for operation in taken]
        for operation, tags in zip(taken, reads, strict=True):
            self._write(operation, [GARBAGE] * operation.num_blocks)
            self.flight[operation.id] = operation, tags
            self.kinds[operation.kind] += 1
        return taken

    def finish(self, operation: Operation, ok: Results = True, *, fenced: bool = True) -> bool:
        """Report the result of a dispatched operation; a key that storage lacks fails."""
        operation, tags = self.flight.pop(operation.id)
        results = [ok] * operation.num_blocks if isinstance(ok, bool) else list(ok)
        if operation.kind in (OpKind.LOOKUP, OpKind.STORAGE_TO_HOST):
            have = [key in self.storage for key in operation.keys]
            results = [good and had for good, had in zip(results, have, strict=True)]
            tags = [self.storage.get(key) for key in operation.keys]
        elif operation.kind is OpKind.HOST_TO_STORAGE:
            tags = [self.host[block] for block in as_list(operation.sources)]
            for key, tag, good in zip(operation.keys, tags, results, strict=True):
                if good:
                    assert tag is not GARBAGE, "garbage is stored"
                    assert self.storage.setdefault(key, tag) == tag, "a key has two contents"
        self._write(operation, _where(tags, results))
        if not fenced:
            self.unfenced[operation.id] = operation, results
        is_first = self.tiers.complete(operation.id, results, fenced=fenced)
        self.counts["late_completions"] += not is_first
        if is_first and operation.kind is OpKind.HOST_TO_STORAGE:
            self.counts["stored_blocks"] += sum(results)
        if is_first and operation.kind is OpKind.STORAGE_TO_HOST:
            self.counts["fetched_blocks"] += [*results, False].index(False)
        return is_first

    def fence(self, operation: Operation) -> bool:
        """Fence an operation that has its result; it writes one last time."""
        operation, results = self.unfenced.pop(operation.id)
        lost = [place for place, good in enumerate(results) if not good]
        if len(operation.destinations):
            memory = self.device if _is_on_device(operation) else self.host
            memory.update(dict.fromkeys(as_list(operation.destinations[lost]), GARBAGE))
        is_news = self.tiers.fence(operation.id)
        self.counts["late_completions"] += not is_news
        return is_news

    def settle(self) -> None:
        """Dispatch and complete all operations, and those that follow from them."""
        while self.take() or self.flight or self.unfenced:
            for operation, _ in list(self.flight.values()):
                self.finish(operation)
            for operation, _ in list(self.unfenced.values()):
                self.fence(operation)
        self.manager.check()

    def one(self, kind: OpKind) -> Operation:
        """Dispatch the queued operations: exactly one, of this kind."""
        [operation] = self.take()
        assert operation.kind is kind
        return operation

    def one_of(self, kind: OpKind) -> Operation:
        """Dispatch the queued operations and return the one of this kind."""
        [operation] = [each for each in self.take() if each.kind is kind]
        return operation

    def _read_sources(self, operation: Operation) -> list[Tag]:
        if operation.keys:
            return [GARBAGE] * operation.num_blocks  # storage is read when the operation ends
        from_host = operation.kind is OpKind.HOST_TO_DEVICE
        memory = self.host if from_host else self.device
        return [memory[block] for block in as_list(operation.sources)]

    def _write(self, operation: Operation, tags: Sequence[Tag]) -> None:
        if len(operation.destinations):
            memory = self.device if _is_on_device(operation) else self.host
            memory.update(zip(as_list(operation.destinations), tags, strict=True))

    # Requests

    def start(self, tokens: Sequence[int], namespace: bytes = b"") -> Lease:
        """Admit a request."""
        return self.manager.admit(self.manager.match(tokens, namespace))

    def compute(
        self, lease: Lease, tokens: Sequence[int], namespace: bytes = b"", *, publish: bool = True
    ) -> None:
        """Run a step of the model on the tokens that are not ready, and publish them."""
        self.write(lease, tokens, lease.num_ready_tokens, namespace)
        if publish:
            self.manager.publish(lease, tokens)

    def write(
        self, lease: Lease, tokens: Sequence[int], first: int, namespace: bytes = b""
    ) -> None:
        """Read the KV of the tokens before first, and write the KV of the others."""
        self.read(lease, tokens[:first], namespace)
        table, size = as_list(lease.block_table), self.manager.block_size
        for block in range(first // size, -(-len(tokens) // size)):
            if block >= lease.num_shared_blocks:  # those are not written again
                self.device[table[block]] = self._tag(tokens[: (block + 1) * size], namespace)

    def read(self, lease: Lease, tokens: Sequence[int], namespace: bytes = b"") -> None:
        """Assert that the blocks of a lease hold the KV of tokens."""
        size = self.manager.block_size
        table = as_list(lease.block_table)
        for block in range(-(-len(tokens) // size)):
            tag = self.device.get(table[block])
            assert tag is not GARBAGE, f"block {block} of {tokens} is garbage"
            # A block that is not whole may hold more than is read of it.
            seen = tag[0], tag[1][: min((block + 1) * size, len(tokens))]
            assert seen == self._tag(tokens[: (block + 1) * size], namespace), f"block {block}"

    def _tag(self, tokens: Sequence[int], namespace: bytes) -> tuple[bytes, tuple[int, ...]]:
        changes = self.weights.setdefault(namespace, 0)
        return namespace + b"'" * changes, tuple(tokens)

    def reset(self, keep: Collection[bytes] = ()) -> None:
        """Change the weights of all namespaces that are not kept, which makes their KV wrong."""
        self.manager.reset(keep)
        changed = {b"", *self.weights} - set(keep)
        self.weights.update(changed)
        if self.tiers.storage is not None:
            self._name_weights()

    def rename(self) -> None:
        """Use other keys for the same KV, or storage again."""
        self.renames += 1
        self._name_weights()

    def _name_weights(self) -> None:
        revision = f"{self.weights.total()}.{self.renames}"
        self.tiers.storage = replace(self.namespace, weights_revision=revision)

    def serve(self, tokens: Sequence[int], namespace: bytes = b"") -> None:
        """Run a whole request with every copy it needs. Its whole blocks stay cached."""
        lease = self.start(tokens, namespace)
        self.settle()
        self.compute(lease, tokens, namespace)
        self.manager.release(lease)
        self.settle()

    def serve_without_copies(self, tokens: Sequence[int]) -> None:
        """Run a whole request without host hits, while other copies are in flight."""
        lease = self.start(tokens)
        assert lease.loading is None
        self.compute(lease, tokens)
        self.manager.release(lease)

    def demote(self, tokens: Sequence[int], namespace: bytes = b"") -> None:
        """Run a request, then evict all idle blocks to the host."""
        self.serve(tokens, namespace)
        self.manager.evict(self.manager.num_blocks)
        self.settle()

    # What a test looks at

    @property
    def stats(self) -> TierStats:
        """Counts of the tiers below the device."""
        stats = self.manager.stats().tiers
        assert stats is not None
        return stats

    def hit(self, tokens: Sequence[int], namespace: bytes = b"") -> tuple[int, int]:
        """Return how many blocks of tokens the device has, and how many more the host has."""
        match = self.manager.match(tokens, namespace)
        return match.num_blocks, match.num_host_blocks

    def residency(self, tokens: Sequence[int], namespace: bytes = b"") -> str:
        """Return a letter per block: d(evice), h(ost), b(oth), w (in flight or promoting)."""
        letters = ""
        node: Node | None = self.tiers.state.tree.roots.get(namespace)
        wanted, size = np.array(tokens, np.int32).tobytes(), self.tiers.state.tree.block_bytes
        while node is not None and (node := node.children.get(wanted[:size])) is not None:
            for place in range(node.num_blocks):
                block = bytes(node.tokens[place * size : (place + 1) * size])
                if wanted[:size] != block:
                    return letters
                letters += _letter(node)
                wanted = wanted[size:]
        return letters

    def drop_order(self) -> list[Tag]:
        """Return the blocks in the order in which the host would drop them."""
        runs: list[HostRun] = list(self.tiers.state.host.idle_runs())
        order: list[int] = []
        for run in runs:
            blocks = as_list(np.frombuffer(run.blocks, np.int32))
            order += blocks if self.tiers.state.host.is_redundant(run) else reversed(blocks)
        return [self.host[block] for block in order]


def _is_on_device(operation: Operation) -> bool:
    return operation.kind in (OpKind.HOST_TO_DEVICE, OpKind.DEVICE_TO_DEVICE)


def _letter(node: Node) -> str:
    assert isinstance(node, TieredNode)
    copied = node.host is not None and node.host.is_valid
    if node.device_blocks:
        return "b" if copied else "d"
    return "h" if copied else "w"


def _where(tags: Sequence[Tag], results: Sequence[bool]) -> list[Tag]:
    return [tag if good else GARBAGE for tag, good in zip(tags, results, strict=True)]

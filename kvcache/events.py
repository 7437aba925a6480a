"""KV events: which blocks entered and left each tier, in order, for a router or another consumer.

A consumer that applies every event of a manager has, after each call, exactly the blocks that the
manager can find; of storage, the last `MAX_STORED` that it learned of. The names and fields are
those of vLLM's KV events. Nothing here does I/O.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import compress, islice
from typing import Final, Generic, Literal, NamedTuple, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from .prefix.node import ITEM_BYTES, Node
from .tokens import INT32, Int32Array, as_count

Medium: TypeAlias = Literal["GPU", "CPU", "STORAGE"]
"""Tier of an event: device, host or storage."""

Payload = TypeVar("Payload")

HASH_BYTES: Final = 8

MAX_STORED: Final = 2**20
"""Blocks in storage that events name at most, the last ones that the manager learned of. Storage
may have any number; these take 130 MB of the manager's memory."""


@dataclass(frozen=True, slots=True)
class BlockStored:
    """Consecutive blocks of one path can be found in a tier from now on.

    Attributes:
        medium: the tier.
        block_hashes: 64-bit hash of each block: of its tokens, all tokens before it, and the
            namespace. The same blocks have the same hashes in every tier and process.
        parent_block_hash: hash of the block before the first one; None at the start of a sequence.
        token_ids: int32 ``[len(block_hashes) * block_size]``, the tokens of these blocks.
        block_size: tokens per block.
        namespace: namespace of the blocks.
    """

    medium: Medium
    block_hashes: tuple[int, ...]
    parent_block_hash: int | None
    token_ids: Int32Array
    block_size: int
    namespace: bytes


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """Blocks cannot be found in a tier any more; other tiers may have them.

    Storage may have them still: events name only the last `MAX_STORED` blocks in storage.
    """

    medium: Medium
    block_hashes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """No block can be found in any tier: the cache was reset."""


KVEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared
"""A change of what a tier holds: `BlockStored`, `BlockRemoved` or `AllBlocksCleared`."""


class EventBatch(NamedTuple):
    """Events in order, and the number of their batch.

    Attributes:
        seq: 0 for the first batch of a manager, and one more for each next one. A consumer that
            sees another number has missed batches.
        events: at least one.
    """

    seq: int
    events: tuple[KVEvent, ...]


class _Run(NamedTuple):
    """Consecutive blocks of a path; tokens are bytes of int32, and parent is 0 at the start."""

    namespace: bytes
    parent: int
    hashes: list[int]
    tokens: bytes


class _Names:
    """Hash of each block of a pool, and of the block before it, by block id."""

    def __init__(self, num_blocks: int) -> None:
        self._hashes: npt.NDArray[np.uint64] = np.zeros(num_blocks + 1, np.uint64)
        self._parents: npt.NDArray[np.uint64] = np.zeros(num_blocks + 1, np.uint64)

    def set(self, ids: Int32Array, hashes: Sequence[int], parent: int) -> None:
        """Name consecutive blocks of a path."""
        self._hashes[ids] = np.array(hashes, np.uint64)
        self._parents[ids] = np.array([parent, *hashes[:-1]], np.uint64)

    def copy(self, ids: Int32Array, other: _Names, other_ids: Int32Array) -> None:
        """Name blocks as those of another pool."""
        self._hashes[ids] = other._hashes[other_ids]
        self._parents[ids] = other._parents[other_ids]

    def of(self, ids: Int32Array) -> list[int]:
        """Return the hashes of some blocks."""
        names: list[int] = self._hashes[ids].tolist()
        return names

    def parent(self, block: int) -> int:
        """Return the hash of the block before one."""
        return int(self._parents[block])


class EventRecorder:
    """Records the events of a manager, as plain data, until they are taken.

    A block in a pool keeps its name, so that splitting, joining and trimming nodes costs nothing
    here.

    Attributes:
        block_size: tokens per block.
        max_stored: number of blocks in storage that events name at most.
    """

    def __init__(self, block_size: int, num_blocks: int, num_host_blocks: int) -> None:
        self.block_size = block_size
        self._block_bytes = block_size * ITEM_BYTES
        self._device = _Names(num_blocks)
        self._host = _Names(num_host_blocks)
        self.max_stored = MAX_STORED
        self._stored: OrderedDict[int, None] = OrderedDict()  # the longest known first
        self._events: list[KVEvent] = []
        self._next_seq = 0

    def take(self) -> EventBatch | None:
        """Return the events since the last call; None if nothing has happened."""
        if not self._events:
            return None
        batch = EventBatch(self._next_seq, tuple(self._events))
        self._next_seq += 1
        self._events = []
        return batch

    def cleared(self) -> None:
        """Record a reset of everything. What happened before it does not matter any more."""
        self._stored.clear()
        self._events = [AllBlocksCleared()]

    # Device

    def published(self, before: Node, tokens: bytes | bytearray, blocks: bytes) -> None:
        """Record blocks that are on the device from now on.

        Args:
            before: the node before them, on the device, or a root.
            tokens, blocks: the run, as bytes of int32.
        """
        parent = 0
        if before.parent is not None:
            parent = self._device.of(np.frombuffer(before.device_blocks, INT32)[-1:])[0]
        run = self._name(_namespace_of(before), parent, bytes(tokens))
        self._device.set(np.frombuffer(blocks, INT32), run.hashes, parent)
        self._record("GPU", run)

    def evicted(self, ids: Int32Array) -> None:
        """Record blocks that left the device."""
        self._removed("GPU", self._device.of(ids))

    # Host

    def copying(self, device_blocks: bytes, host_ids: Int32Array) -> None:
        """Name host blocks that are about to get the contents of device blocks."""
        self._host.copy(host_ids, self._device, np.frombuffer(device_blocks, INT32))

    def fetching(self, namespace: bytes, path: bytes, host_ids: Int32Array) -> None:
        """Name host blocks that hold the last blocks of a path; path is bytes of int32."""
        hashes = self._name(namespace, 0, path).hashes
        first = len(hashes) - len(host_ids)
        self._host.set(host_ids, hashes[first:], hashes[first - 1] if first else 0)

    def copied(self, node: Node, host_blocks: bytes) -> None:
        """Record that the host has a valid copy of a node, in blocks as bytes of int32."""
        self._record("CPU", self._host_run(node, host_blocks))

    def dropped(self, host_blocks: bytes) -> None:
        """Record that the host dropped valid copies, or gave them up for a load."""
        self._removed("CPU", self._host.of(np.frombuffer(host_blocks, INT32)))

    def _host_run(self, node: Node, host_blocks: bytes) -> _Run:
        ids = np.frombuffer(host_blocks, INT32)
        tokens = bytes(node.tokens[: len(ids) * self._block_bytes])
        return _Run(_namespace_of(node), self._host.parent(ids.item(0)), self._host.of(ids), tokens)

    # Storage

    def storing(self, copies: Sequence[tuple[Node, bytes]]) -> list[_Run]:
        """Return what `stored` needs of copies that are about to be written to storage.

        Args:
            copies: nodes with their host blocks as bytes of int32.
        """
        return [self._host_run(node, blocks) for node, blocks in copies]

    def stored(self, runs: Sequence[_Run], ok: Sequence[bool | None]) -> None:
        """Record the result of a write to storage, block by block."""
        place = 0
        for run in runs:
            after = place + len(run.hashes)
            self._learn_stored(run, ok[place:after])
            place = after
        hashes = [each for run in runs for each in run.hashes]
        self._bound_stored([*compress(hashes, ok)])

    def looked_up(self, namespace: bytes, path: bytes, ok: Sequence[bool | None]) -> None:
        """Record which of the last blocks of a path storage has; path is bytes of int32.

        Those after the first one that is missing cannot be found. None is no answer.
        """
        run = self._name(namespace, 0, path)
        first = len(run.hashes) - len(ok)
        num_found = next((place for place, good in enumerate(ok) if not good), len(ok))
        asked = zip(run.hashes[first:], ok, strict=True)
        missing = [each for each, good in asked if good is not None and not good]
        self._forget_stored([each for each in missing if each in self._stored])
        self._learn_stored(self._part(run, first, first + num_found), [True] * num_found)
        self._bound_stored(run.hashes[first : first + num_found])

    def forget_storage(self) -> None:
        """Record that the blocks in storage cannot be found any more: its namespace changed."""
        self._forget_stored(sorted(self._stored))

    def _learn_stored(self, run: _Run, ok: Sequence[bool | None]) -> None:
        new = [good and each not in self._stored for each, good in zip(run.hashes, ok, strict=True)]
        self._stored.update((each, None) for each, good in zip(run.hashes, ok, strict=True) if good)
        for first, last in _stretches(new):
            self._record("STORAGE", self._part(run, first, last))

    def _bound_stored(self, learned: list[int]) -> None:
        """Forget blocks if there are too many, the longest known first.

        Args:
            learned: the last ones, in the order of their paths. The last of these are forgotten
                first, because they are found through the others.
        """
        for each in reversed(learned):
            self._stored.move_to_end(each)
        excess = max(len(self._stored) - self.max_stored, 0)
        self._forget_stored([*islice(self._stored, excess)])

    def _forget_stored(self, hashes: list[int]) -> None:
        for each in hashes:
            del self._stored[each]
        self._removed("STORAGE", hashes)

    # Shared steps

    def _name(self, namespace: bytes, parent: int, tokens: bytes) -> _Run:
        """Compute the hashes of consecutive blocks."""
        hashes = _chain(parent or _root(namespace), tokens, self._block_bytes)
        return _Run(namespace, parent, hashes, tokens)

    def _part(self, run: _Run, first: int, last: int) -> _Run:
        """Return the blocks from first up to last of a run."""
        size = self._block_bytes
        parent = run.hashes[first - 1] if first else run.parent
        tokens = run.tokens[first * size : last * size]
        return _Run(run.namespace, parent, run.hashes[first:last], tokens)

    def _record(self, medium: Medium, run: _Run) -> None:
        self._events.append(
            BlockStored(
                medium,
                tuple(run.hashes),
                run.parent or None,
                np.frombuffer(run.tokens, INT32),
                self.block_size,
                run.namespace,
            )
        )

    def _removed(self, medium: Medium, hashes: list[int]) -> None:
        if hashes:
            self._events.append(BlockRemoved(medium, tuple(hashes)))


class ReplayBuffer(Generic[Payload]):
    """The last batches, for consumers that have missed some."""

    def __init__(self, num_batches: int) -> None:
        """Make an empty buffer of the last num_batches batches.

        Raises:
            CountError: if num_batches is negative.
        """
        self._batches: deque[tuple[int, Payload]] = deque(
            maxlen=as_count("num_batches", num_batches)
        )

    def add(self, seq: int, payload: Payload) -> None:
        """Keep a batch; the oldest one is dropped if there are too many."""
        self._batches.append((seq, payload))

    def since(self, seq: int) -> list[tuple[int, Payload]]:
        """Return the kept batches from number seq on; the first may have a later number."""
        return [each for each in self._batches if each[0] >= seq]


def hash_blocks(tokens: Int32Array, block_size: int, namespace: bytes = b"") -> list[int]:
    """Return the hash of each whole block of a sequence, as events name it.

    Args:
        tokens: int32 ``[num_tokens]``.
        block_size: tokens per block.
        namespace: namespace of the blocks.
    """
    whole = len(tokens) // block_size * block_size
    return _chain(_root(namespace), tokens[:whole].tobytes(), block_size * ITEM_BYTES)


def _root(namespace: bytes) -> int:
    return _hash(b"radixkv" + namespace)


def _chain(name: int, tokens: bytes, block_bytes: int) -> list[int]:
    """Return the hashes of consecutive blocks after one."""
    hashes = []
    for start in range(0, len(tokens), block_bytes):
        name = _hash(name.to_bytes(HASH_BYTES, "little") + tokens[start : start + block_bytes])
        hashes.append(name)
    return hashes


def _namespace_of(node: Node) -> bytes:
    while node.parent is not None:
        node = node.parent
    return node.key


def _hash(data: bytes) -> int:
    """Return 64 bits that are not 0, which stands for no block."""
    return int.from_bytes(blake2b(data, digest_size=HASH_BYTES).digest(), "little") or 1


def _stretches(flags: Sequence[bool | None]) -> Iterator[tuple[int, int]]:
    """Yield first and end of each longest stretch of true flags."""
    first = None
    for place, flag in enumerate([*flags, False]):
        if flag and first is None:
            first = place
        elif not flag and first is not None:
            yield first, place
            first = None

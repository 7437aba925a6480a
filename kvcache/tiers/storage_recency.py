"""Recency reports to storage, so that it evicts the end of a path before its beginning.

Storage finds a block only through the blocks before it: if it loses the first, the others are
useless. It sees writes and reads, but not hits on the device or the host. The cache therefore
reports the keys of each path in use, last block first::

    a path in use           | 1 | 2 | 3 | 4 | 5 |
    its keys, as reported     5   4   3   2   1      the last one is the most recently used

No block is then less recently used than a block that follows it. Reports have no other effect:
they hold nothing and wait for nothing, and may be late or lost.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from ..ids import KEY_BYTES
from ..prefix.node import Node
from .tiered_tree import TieredTree

REPORT_INTERVAL: Final = 1024
"""Interval between two reports of a node, in admissions and stored blocks.

A decoding request stores a block every few steps; without this interval it would report a path of
thousands of blocks each time. Blocks that storage evicts wrongly because of the interval are those
that it would evict next.
"""

_MOST_KEYS: Final = 2**14
"""Most keys that wait to be taken. The others are reported at their next use."""

_NEVER: Final = (-(2**62), -1)


class StorageRecency:
    """Collects the keys of paths in use until the driver takes them."""

    def __init__(self, tree: TieredTree) -> None:
        self._tree = tree
        self._keys: list[bytes] = []
        self._now = 0  # admissions and stored blocks

    def record_hit(self, end: Node) -> None:
        """Record that a request was admitted with a hit on the path to a node."""
        self._now += 1
        self.record_use([end])

    def record_store(self, ends: Iterable[Node], num_blocks: int) -> None:
        """Record that num_blocks blocks were stored, in another order: the last runs of paths."""
        keys, ends = self._tree.keys, list(ends)
        assert keys is not None, "blocks were stored, but the cache has no storage"
        self._now += num_blocks
        for node in ends:
            keys.reported_at.pop(node, None)
        self.record_use(ends)

    def record_use(self, ends: Iterable[Node]) -> None:
        """Record that the paths to some nodes are in use, as far as they have keys."""
        keys, now = self._tree.keys, self._now
        if keys is None or len(self._keys) >= _MOST_KEYS:
            return
        due: dict[Node, None] = {}
        for end in ends:
            node: Node = end
            while (parent := node.parent) is not None:
                reported_at, place = keys.reported_at.get(node, _NEVER)
                is_due = place == keys.num_reports or now - reported_at >= REPORT_INTERVAL
                if is_due and node in keys.known:
                    due.pop(node, None)  # a node comes after all that follow it
                    due[node] = None
                node = parent
        keys.reported_at.update(dict.fromkeys(due, (now, keys.num_reports)))
        for node in due:
            known = keys.known[node]
            places = range(len(known) - KEY_BYTES, -1, -KEY_BYTES)
            self._keys += [known[place : place + KEY_BYTES] for place in places]

    def take(self) -> list[bytes]:
        """Return each key once, least recently used first, and forget them."""
        taken, self._keys = self._keys, []
        if self._tree.keys is not None:
            self._tree.keys.num_reports += 1
        return list(dict.fromkeys(reversed(taken)))[::-1]

    def reset(self) -> None:
        """Forget the waiting keys and all earlier reports."""
        self._keys.clear()
        if self._tree.keys is not None:
            self._tree.keys.reported_at.clear()

"""Cache of the storage keys of nodes: each key is computed once, on demand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ..ids import KEY_BYTES
from ..prefix.node import Node
from ..tokens import INT32

if TYPE_CHECKING:
    from ..storage.keys import StorageNamespace


class StorageKeyCache:
    """Storage keys of nodes, 32 bytes per block, as far as they were needed.

    ::

        tokens of a node   | block | block | block | block |
        its keys, joined   | key   | key   |                  the rest on demand

    Attributes:
        namespace: namespace of the keys.
        known: keys of a node's first blocks, joined.
        reported_at: time and report in which a node was last reported: see `StorageRecency`.
        num_reports: number of reports that storage has got, and of the one that it gets next.
    """

    def __init__(self, namespace: StorageNamespace) -> None:
        self.namespace = namespace
        self.known: dict[Node, bytes] = {}
        self.reported_at: dict[Node, tuple[int, int]] = {}
        self.num_reports = 0

    def learn(self, node: Node, keys: Sequence[bytes]) -> None:
        """Set the keys of all blocks of a node."""
        self.known[node] = b"".join(keys)

    def of(self, path: Sequence[Node]) -> bytes:
        """Return the joined keys of the last node of a path that starts below the root."""
        root = path[0].parent
        assert root is not None, "a path without a root"
        parent: bytes | None = None
        for node in path:
            keys = self.known.get(node, b"")
            num_blocks = node.num_blocks
            if len(keys) < num_blocks * KEY_BYTES:
                tokens = np.frombuffer(node.tokens, INT32)
                block_size = self.namespace.block_size
                rest = tokens[len(keys) // KEY_BYTES * block_size : num_blocks * block_size]
                parent = keys[-KEY_BYTES:] or parent
                keys += b"".join(self.namespace.block_keys(rest, root.key, parent))
                self.known[node] = keys
            parent = keys[-KEY_BYTES:]
        return keys

    def each(self, path: Sequence[Node]) -> list[bytes]:
        """Return the keys of the last node of a path, one by one."""
        keys = self.of(path)
        return [keys[start : start + KEY_BYTES] for start in range(0, len(keys), KEY_BYTES)]

    def split(self, lower: Node, upper: Node, num_blocks: int) -> None:
        """Move the keys of the first num_blocks blocks of lower to upper."""
        keys = self.known.get(lower)
        if keys is not None:
            cut = num_blocks * KEY_BYTES
            self.known[upper], self.known[lower] = keys[:cut], keys[cut:]
        if lower in self.reported_at:
            self.reported_at[upper] = self.reported_at[lower]

    def are_alike(self, upper: Node, lower: Node) -> bool:
        """Return whether a node and its only child can be joined: the node is reported first.

        A child that is in the next report, from which a use moves it, is joined after it.
        """
        is_whole = len(self.known.get(upper, b"")) == upper.num_blocks * KEY_BYTES
        if not is_whole and lower in self.known:
            return False
        first, then = self.reported_at.get(upper), self.reported_at.get(lower)
        if first is None or then is None:
            return first is None
        is_movable = then[1] == self.num_reports != first[1]
        return first[0] <= then[0] and not is_movable

    def join(self, nodes: Sequence[Node]) -> None:
        """Move the keys of consecutive nodes of a path, each like the next one, to the last one.

        They are reported again when the first is due, and in the next report if it has the first.
        """
        keys = b"".join([self.known.pop(node, b"") for node in nodes])
        if keys:
            self.known[nodes[-1]] = keys
        reports = [self.reported_at.pop(node, None) for node in nodes]
        if (first := reports[0]) is not None:
            self.reported_at[nodes[-1]] = first

    def forget(self, node: Node) -> None:
        """Forget a node that left the tree."""
        self.known.pop(node, None)
        self.reported_at.pop(node, None)

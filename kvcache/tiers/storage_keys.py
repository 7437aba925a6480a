"""The storage keys of what a tree holds: each is made once, when it is wanted, and kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ..ids import KEY_BYTES
from ..prefix.node import Node
from ..tokens import INT32

if TYPE_CHECKING:
    from ..storage.keys import StorageNamespace


class NodeKeys:
    """The keys of nodes, joined: 32 bytes per block, of those that were asked for.

    ::

        tokens of a node   | block | block | block | block |
        its keys, joined   | key   | key   |                  the rest when it is wanted

    Attributes:
        namespace: whose blocks they name.
        known: what there is of the keys of a node, from its first block on.
        told_at: when, and with what, storage was last told that a node is used: `StorageUses`.
    """

    def __init__(self, namespace: StorageNamespace) -> None:
        self.namespace = namespace
        self.known: dict[Node, bytes] = {}
        self.told_at: dict[Node, tuple[int, int]] = {}

    def learn(self, node: Node, keys: Sequence[bytes]) -> None:
        """Keep the keys of all blocks of a node, which were made before it was one."""
        self.known[node] = b"".join(keys)

    def of(self, path: Sequence[Node]) -> bytes:
        """Return the keys of the last node of a path from its root on."""
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
        """Return the same keys apart."""
        keys = self.of(path)
        return [keys[start : start + KEY_BYTES] for start in range(0, len(keys), KEY_BYTES)]

    def split(self, lower: Node, upper: Node, num_blocks: int) -> None:
        """Give the keys of the first num_blocks blocks to upper."""
        keys = self.known.get(lower)
        if keys is not None:
            cut = num_blocks * KEY_BYTES
            self.known[upper], self.known[lower] = keys[:cut], keys[cut:]
        if lower in self.told_at:
            self.told_at[upper] = self.told_at[lower]

    def forget(self, node: Node) -> None:
        """Leave nothing of a node that has died."""
        self.known.pop(node, None)
        self.told_at.pop(node, None)

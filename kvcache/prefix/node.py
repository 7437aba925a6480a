"""Node of the radix tree (a run of blocks), and the result of a walk."""

from __future__ import annotations

from typing import Any, Final, Protocol, Self

ITEM_BYTES: Final = 4  # size of an int32 token or block id


class Copy(Protocol):
    """Copy of a node in a slower tier. The tree needs to know only its length."""

    @property
    def num_blocks(self) -> int:
        """Length in blocks."""


class Node:
    """A run of consecutive blocks on one path, all with the same leases and the same last use.

    Token and block ids are kept as bytes of int32: they compare with one memcmp, and a path joins
    without an object per block. The whole node is on the device, on the host, or on both. All nodes
    above a node on the device are on the device.

    Attributes:
        parent: the node before; None for a root.
        key: tokens of the first block, its key in the parent; of a root, the namespace.
        tokens: tokens of the run; after a trim, followed by the tokens that were cut off.
        device_blocks: block ids of the run on the device, in order; empty if it is not there.
        host: copy on the host, or None. Only nodes of a ``TieredTree`` can have one.
        children: nodes that continue the run, by key. Change it only by ``add_child`` and ``del``.
        refs: number of leases with the node on their path.
        colder, warmer: neighbours in the idle list.
    """

    __slots__ = (
        "children",
        "colder",
        "device_blocks",
        "key",
        "parent",
        "refs",
        "tokens",
        "warmer",
    )

    host: Copy | None = None

    def __init__(
        self, parent: Self | None, key: bytes, tokens: bytes | bytearray, device_blocks: bytes
    ) -> None:
        self.parent = parent
        self.key = key
        self.tokens = tokens
        self.device_blocks = device_blocks
        self.children: dict[bytes, Self] = NO_CHILDREN
        self.refs = 0
        self.colder: Self | None = None
        self.warmer: Self | None = None

    @property
    def num_blocks(self) -> int:
        """Length of the run in blocks."""
        if self.device_blocks or self.host is None:
            return len(self.device_blocks) // ITEM_BYTES
        return self.host.num_blocks

    def add_child(self, child: Self) -> None:
        """Add a child under its key."""
        if not self.children:
            self.children = {}  # not the dict that all leaves share
        self.children[child.key] = child

    def check(self, block_bytes: int) -> None:
        """Assert every invariant of a node that is not a root."""
        # Links agree in both directions, and the key is the first block.
        parent = self.parent
        assert parent is not None and parent.children.get(self.key) is self, "bad parent"
        assert self.key == bytes(self.tokens[:block_bytes]), "a key is not the first block"
        # Whole blocks only, at least one.
        num_bytes = self.num_blocks * block_bytes
        assert len(self.tokens) >= num_bytes > 0, "a run has too few tokens"
        assert len(self.tokens) % block_bytes == 0, "a run is not blocks"
        # A lease that uses a node uses its parents too.
        assert self.refs >= sum(c.refs for c in self.children.values()), "refs grow downwards"
        assert parent.refs >= self.refs >= 0, "a parent has fewer users than its child"
        # A node that is not in the idle list has no links to it.
        unlinked = self.colder is None and self.warmer is None
        assert unlinked or (self.refs == 0 and self.device_blocks), "a pinned idle node"
        # Above a node on the device are nodes on the device; leases use no others.
        above = parent.parent is None or parent.device_blocks
        assert above or not self.device_blocks, "a node is on the device, its parent is not"
        assert self.device_blocks or (self.refs == 0 and self.host is not None), "a node is nowhere"


NO_CHILDREN: Final[dict[bytes, Any]] = {}
"""Children of every node that never had one: most nodes need no dict of their own."""


class Walk:
    """End of a walk along tokens: after ``node``, and ``inside_blocks`` blocks into ``inside``.

    Attributes:
        node: last node that matched completely.
        num_bytes: number of token bytes that matched, `inside` included.
        inside: child that matched in part, or None.
        inside_blocks: number of its blocks that matched; 0 if `inside` is None.
    """

    __slots__ = ("inside", "inside_blocks", "node", "num_bytes")

    def __init__(
        self, node: Node, num_bytes: int, inside: Node | None = None, inside_blocks: int = 0
    ) -> None:
        self.node = node
        self.num_bytes = num_bytes
        self.inside = inside
        self.inside_blocks = inside_blocks

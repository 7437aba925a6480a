"""What a radix tree is made of: runs of blocks, and the place where a walk along them ended."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from ..tiers.host_tier import HostRun

ITEM_BYTES: Final = 4  # of an int32 token or block id


class Node:
    """A run of consecutive blocks on one path, all with the same users and the same last use.

    Token and block ids are kept as bytes of int32: they compare with one memcmp, and a path joins
    without an object per block. All of a node is on the device, on the host, or on both; above a
    node on the device, all are on the device.

    Attributes:
        parent: the node before; None for a root.
        key: the tokens of the first block, under which the parent has it; a root's namespace.
        tokens: the tokens of the run, and after a trim whatever followed them.
        device_blocks: the block ids of the run on the device, in order; empty if it is not there.
        host: its copy on the host, or None; only a `TieredNode` can have one.
        children: the nodes that continue the run, by key; to be changed by `adopt` and `del` only.
        refs: how many leases have the node on their path.
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

    host: HostRun | None = None

    def __init__(
        self, parent: Node | None, key: bytes, tokens: bytes | bytearray, device_blocks: bytes
    ) -> None:
        self.parent = parent
        self.key = key
        self.tokens = tokens
        self.device_blocks = device_blocks
        self.children = NO_CHILDREN
        self.refs = 0
        self.colder: Node | None = None
        self.warmer: Node | None = None

    @property
    def num_blocks(self) -> int:
        """The length of the run in blocks."""
        if self.device_blocks or self.host is None:
            return len(self.device_blocks) // ITEM_BYTES
        return self.host.num_blocks

    def adopt(self, child: Node) -> None:
        """Make child a child of this node, under its key."""
        if not self.children:
            self.children = {}  # it may be the one that all leaves share
        self.children[child.key] = child


class TieredNode(Node):
    """A node of a tree with a host tier: one more word, which the others do without."""

    __slots__ = ("host",)

    def __init__(
        self, parent: Node | None, key: bytes, tokens: bytes | bytearray, device_blocks: bytes
    ) -> None:
        super().__init__(parent, key, tokens, device_blocks)
        self.host: HostRun | None = None


def set_host(node: Node, run: HostRun | None) -> None:
    """Give a node a copy on the host, or take it away."""
    assert isinstance(node, TieredNode), "a node of a tree without a host tier gets a copy"
    node.host = run


NO_CHILDREN: Final[dict[bytes, Node]] = {}
"""The children of every leaf that never had one: most nodes need no dict of their own."""


class Walk:
    """Where a walk along tokens ended: after `node`, and `inside_blocks` further into `inside`.

    Attributes:
        node: the last node that matched whole.
        num_bytes: token bytes matched, `inside` included.
        inside: the child that matched in part, or None.
        inside_blocks: how many of its blocks matched; 0 if `inside` is None.
    """

    __slots__ = ("inside", "inside_blocks", "node", "num_bytes")

    def __init__(
        self, node: Node, num_bytes: int, inside: Node | None = None, inside_blocks: int = 0
    ) -> None:
        self.node = node
        self.num_bytes = num_bytes
        self.inside = inside
        self.inside_blocks = inside_blocks

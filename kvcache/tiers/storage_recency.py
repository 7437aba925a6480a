"""What storage is told of uses, so that of a path it forgets the end before the beginning.

Storage finds a block only by those before it: without the first, the others are lost room. It sees
what is written and read, but not what is hit on the device or the host. So it is told::

    a path that is used     | 1 | 2 | 3 | 4 | 5 |
    its keys, as told         5   4   3   2   1      the last is the most recently used

No block is then used less recently than one that follows it. What is told has no other effect: it
holds nothing, waits for nothing, and may be late or lost.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from ..ids import KEY_BYTES
from ..prefix.node import Node
from .tiered_tree import TieredTree

TOLD_FOR: Final = 1024
"""Of admissions and stored blocks: for so many, a use that was told stands for those that follow.

What decodes stores a block every few steps: without this, it would tell a path of thousands each
time. What storage forgets wrongly for it are blocks that it would forget next.
"""

_MOST_KEYS: Final = 2**14
"""Between two times that they are taken; more are told when they are used again."""

_NEVER: Final = (-(2**62), -1)


class StorageUses:
    """Collects the keys of paths that are used, until they are taken."""

    def __init__(self, tree: TieredTree) -> None:
        self._tree = tree
        self._keys: list[bytes] = []
        self._now = 0  # admissions and stored blocks
        self._times_taken = 0

    def hit(self, end: Node) -> None:
        """Note that a request was admitted that has hit the path to a node."""
        self._now += 1
        self.note([end])

    def stored(self, ends: Iterable[Node], num_blocks: int) -> None:
        """Note that num_blocks were written, the last runs of some paths, in another order."""
        keys, ends = self._tree.keys, list(ends)
        assert keys is not None, "what there is no storage for was stored"
        self._now += num_blocks
        for node in ends:
            keys.told_at.pop(node, None)
        self.note(ends)

    def note(self, ends: Iterable[Node]) -> None:
        """Note that the paths to some nodes are used now, as far as they have keys."""
        keys, now = self._tree.keys, self._now
        if keys is None or len(self._keys) >= _MOST_KEYS:
            return
        due: dict[Node, None] = {}
        for end in ends:
            node: Node = end
            while (parent := node.parent) is not None:
                told_at, place = keys.told_at.get(node, _NEVER)
                is_due = place == self._times_taken or now - told_at >= TOLD_FOR
                if is_due and node in keys.known:
                    due.pop(node, None)  # it comes after all that follow it
                    due[node] = None
                node = parent
        keys.told_at.update(dict.fromkeys(due, (now, self._times_taken)))
        for node in due:
            known = keys.known[node]
            places = range(len(known) - KEY_BYTES, -1, -KEY_BYTES)
            self._keys += [known[place : place + KEY_BYTES] for place in places]

    def take(self) -> list[bytes]:
        """Hand out each key once, in the order of the last use."""
        taken, self._keys = self._keys, []
        self._times_taken += 1
        return list(dict.fromkeys(reversed(taken)))[::-1]

    def reset(self) -> None:
        """Forget what was not taken, and what was told."""
        self._keys.clear()
        if self._tree.keys is not None:
            self._tree.keys.told_at.clear()

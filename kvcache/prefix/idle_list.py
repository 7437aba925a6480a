"""The idle list: the nodes that no lease uses, linked from the coldest to the warmest.

::

    sentinel ──warmer──► coldest ──► ... ──► warmest ──► sentinel       .colder leads back

The links are the nodes' own, so that a node is taken out wherever it stands.
"""

from __future__ import annotations

from itertools import repeat
from operator import itemgetter

from .node import Node


def empty_list() -> Node:
    """Return the sentinel of an idle list without nodes."""
    sentinel = Node(None, b"", b"", b"")
    sentinel.warmer = sentinel.colder = sentinel
    return sentinel


def link_before(warmer: Node, node: Node) -> None:
    """Put a node into the list that warmer is in, as its colder neighbour."""
    colder = warmer.colder
    assert colder is not None, "the idle list is not closed"
    node.colder, node.warmer = colder, warmer
    colder.warmer = warmer.colder = node


def unlink(node: Node) -> None:
    """Take a node out of the list that it is in."""
    colder, warmer = node.colder, node.warmer
    assert colder is not None and warmer is not None, "an unused node is not in the idle list"
    colder.warmer, warmer.colder = warmer, colder
    node.colder = node.warmer = None


def coldest(idle: Node, most: int) -> tuple[list[Node], Node]:
    """Return the first nodes of an idle list, as many as there are up to most, and the next."""
    nodes = []
    node = idle.warmer
    for _ in repeat(None, most):
        if node is None or node is idle:
            break
        nodes.append(node)
        node = node.warmer
    assert node is not None, "the idle list is not closed"
    return nodes, node


def cut_off(leaves: list[Node]) -> list[Node]:
    """Take leaves from their parents and clear their links; return the parents left childless."""
    first = leaves[0].parent if leaves else None
    if first is not None and _are_children(first, leaves):
        children = first.children
        for leaf in leaves:
            del children[leaf.key]
            leaf.colder = leaf.warmer = None
        return [] if children else [first]
    childless = []
    for leaf in leaves:
        parent = leaf.parent
        assert parent is not None, "a root is in the idle list"
        del parent.children[leaf.key]
        leaf.colder = leaf.warmer = None
        if not parent.children:
            childless.append(parent)
    return childless


def _are_children(parent: Node, leaves: list[Node]) -> bool:
    # Siblings can lie in a dict larger than any cache, and `del` would wait for each cache miss.
    # In a loop as tight as this lookup of all of them, the processor waits for many together.
    keys = [leaf.key for leaf in leaves]
    try:
        found = itemgetter(*keys, keys[0])(parent.children)  # of one key it would give no tuple
    except KeyError:
        return False
    # Tuples compare their nodes by identity: under another parent, another has the same key.
    return bool(found == (*leaves, leaves[0]))

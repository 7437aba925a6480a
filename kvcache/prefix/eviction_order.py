"""Eviction order: the idle list of nodes that no lease uses, coldest to warmest.

::

    sentinel ──warmer──► coldest ──► ... ──► warmest ──► sentinel       .colder leads back

The links are attributes of the nodes, so a node is removed from any position in O(1).
"""

from __future__ import annotations

from itertools import repeat
from operator import itemgetter

from .node import Node


def empty_list() -> Node:
    """Return the sentinel of an empty idle list."""
    sentinel = Node(None, b"", b"", b"")
    sentinel.warmer = sentinel.colder = sentinel
    return sentinel


def link_before(warmer: Node, node: Node) -> None:
    """Insert a node next to warmer, on its colder side."""
    colder = warmer.colder
    assert colder is not None, "the idle list is not closed"
    node.colder, node.warmer = colder, warmer
    colder.warmer = warmer.colder = node


def unlink(node: Node) -> None:
    """Remove a node from its list."""
    colder, warmer = node.colder, node.warmer
    assert colder is not None and warmer is not None, "an unused node is not in the idle list"
    colder.warmer, warmer.colder = warmer, colder
    node.colder = node.warmer = None


def coldest(idle: Node, most: int) -> tuple[list[Node], Node]:
    """Return up to most of the coldest nodes of an idle list, and the node after them."""
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
    """Remove leaves from their parents, clear their links, and return the childless parents."""
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
    # The dict of siblings can be larger than any CPU cache, and `del` waits for each cache miss.
    # A lookup of all of them in one tight loop overlaps these misses.
    keys = [leaf.key for leaf in leaves]
    try:
        found = itemgetter(*keys, keys[0])(parent.children)  # a single key would give no tuple
    except KeyError:
        return False
    # Tuples compare nodes by identity: nodes under another parent can have the same keys.
    return bool(found == (*leaves, leaves[0]))

"""Bugs to plant that change no result: calls that look at all idle blocks."""

from __future__ import annotations

from typing import Final

from .plant import bug

TREE, MANAGER = "prefix/radix_tree.py", "manager.py"

COST_BUGS: Final = (
    bug(
        "the available blocks are counted anew by each call",
        MANAGER,
        (
            "        return self._pool.num_free + self._tree.num_idle\n",
            "        return self._pool.num_free + sum(\n"
            "            node.num_blocks for node in self._tree.idle_nodes()\n        )\n",
        ),
        world="costs",
    ),
    bug(
        "a release looks for the warmest idle node from the coldest on",
        TREE,
        (
            "        warmest = idle.colder\n",
            "        warmest = [idle, *self.idle_nodes()][-1]\n",
        ),
        world="costs",
    ),
    bug(
        "an eviction counts the blocks that are left",
        TREE,
        (
            "        self.num_cached -= num_blocks\n        short",
            "        self.num_cached = sum(n.num_blocks for n in self.nodes()) - num_blocks\n"
            "        short",
        ),
        world="costs",
    ),
    bug(
        "a publication looks for an equal run in the whole tree",
        TREE,
        (
            "        self.num_cached += len(device_blocks) // ITEM_BYTES\n        run:",
            "        self.num_cached += len(device_blocks) // ITEM_BYTES\n"
            "        for other in self.nodes():\n"
            "            if other.tokens == tokens:\n"
            "                tokens = bytes(other.tokens)\n        run:",
        ),
        world="costs",
    ),
    bug(
        "a run is never joined again",
        MANAGER,
        ("        tree.join_path(node)\n", ""),
        seen_in="ours, 2026-11",
        world="costs",
    ),
)
"""Of the device tier."""

TIER_COST_BUGS: Final = (
    bug(
        "taking the operations looks for nodes without a copy in the whole tree",
        "tiers/api.py",
        (
            "        self.offloader.write_through()\n",
            "        if any(node.host is None for node in self.state.tree.nodes()):\n"
            "            self.offloader.write_through()\n"
            "        else:\n            self.offloader.write_through()\n",
        ),
        world="costs",
    ),
    bug(
        "each completion looks at all idle copies of the host",
        "tiers/state.py",
        (
            "        for parked in self.parked:\n            if not (parked.saved",
            "        waiting = [run for run in self.host.idle_runs() if not run.stored]\n"
            "        for parked in self.parked:\n            if not (waiting is None or "
            "parked.saved",
        ),
        world="costs",
    ),
)
"""Of the tiers below it."""

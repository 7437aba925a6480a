"""Bugs to plant into the radix tree: walk, pin and eviction order."""

from __future__ import annotations

from .plant import bug

TREE = "prefix/radix_tree.py"

LINK = "warmest.warmer, place.colder = place, warmest\n                warmest = place"
CLOSE = "        warmest.warmer, idle.colder = idle, warmest\n"
UP = "            place = parent\n"
"""What unpin does: append a node to the idle list, close the list, go on to the parent."""

WALK_BUGS = (
    bug(
        "a trimmed run keeps its tokens",
        TREE,
        (
            "after = position + len(child.device_blocks) // ITEM_BYTES * block_bytes",
            "after = position + len(run)",
        ),
    ),
    bug(
        "a run is found by its first block alone",
        TREE,
        ("if after > end or not run.startswith(tokens[position:after]):", "if after > end:"),
        seen_in="vLLM #12621, SGLang #2151",
    ),
    bug(
        "a block is found by its first token alone",
        TREE,
        (
            "node.children.get(tokens[position : position + block_bytes].tobytes())",
            "node.children.get(tokens[position : position + ITEM_BYTES].tobytes())",
        ),
        ("key = tokens[: self.block_bytes]", "key = tokens[:ITEM_BYTES]"),
        ("if after > end or not run.startswith(tokens[position:after]):", "if after > end:"),
        ("bytes(lower.tokens[: self.block_bytes])", "bytes(lower.tokens[:ITEM_BYTES])"),
        ("assert key not in node.children, ", "assert True, "),
        seen_in="LMCache #4086, advisory GHSA-rm76-4mrf-v9r8",
    ),
    bug(
        "the block that differs is a hit too",
        TREE,
        (
            "* ITEM_BYTES // self.block_bytes",
            "* ITEM_BYTES // self.block_bytes + bool(differs[first])",
        ),
    ),
    bug(
        "nothing is hit inside a run",
        TREE,
        (
            "return Walk(node, position + inside_blocks * block_bytes, child, inside_blocks)",
            "break",
        ),
    ),
    bug(
        "the last block is never hit",
        TREE,
        ("while position < end:", "while position + block_bytes < end:"),
    ),
    bug(
        "the runs of a path are joined from its end",
        TREE,
        ("runs.reverse()", "pass"),
    ),
    bug(
        "a hit inside an idle run is counted as evictable",
        TREE,
        ("idle = walk.inside_blocks if", "idle = 0 if"),
        seen_in="SGLang test_cache_hit_overadmission_capacity",
    ),
    bug(
        "a hit inside a run in use is counted as idle",
        TREE,
        (" and walk.inside.refs == 0 else 0", " else 0"),
    ),
    bug(
        "only the first idle node of a path is counted",
        TREE,
        ("            idle += len(node", "            idle = len(node"),
    ),
    bug(
        "two first requests of a namespace each make it",
        TREE,
        (
            '        assert namespace not in self.roots, f"namespace {namespace!r} has a root"\n'
            "        self.version += 1\n        root =",
            "        root =",
        ),
        seen_in="FastDeploy PR 6226",
    ),
)

PIN_BUGS = (
    bug(
        "a pin skips the node itself",
        TREE,
        ("node: Node | None = last", "node: Node | None = last.parent or last"),
        ("assert place.refs >= 0, ", "place.refs = max(place.refs, 0); assert True, "),
        seen_in="mini-sglang #52",
    ),
    bug(
        "pinned nodes stay evictable",
        TREE,
        ("unlink(node)", "pass"),
        (LINK, "place.warmer or link_before(idle, place)"),
        (CLOSE, ""),
        seen_in="atlas #373",
    ),
    bug(
        "a pin does not lower the count of idle blocks",
        TREE,
        ("self.num_idle -= len(", "_ = len("),
        seen_in="SGLang #35270",
    ),
    bug(
        "only the last node of a path is pinned",
        TREE,
        (
            "node.refs += 1\n            node = node.parent",
            "node.refs += 1\n            node = above",
        ),
        (UP, "            while place.parent is not None:\n                place = place.parent\n"),
        seen_in="FastDeploy PR 7097",
    ),
    bug(
        "unpin skips every other node",
        TREE,
        (UP, "            place = parent.parent or parent\n"),
        seen_in="LMCache #2785",
    ),
    bug(
        "unpin stops at the first node that others use",
        TREE,
        (
            UP,
            "            if place.refs:\n"
            "                warmest.warmer, idle.colder = idle, warmest\n"
            "                return\n" + UP,
        ),
        seen_in="LMCache #3381",
    ),
    bug(
        "unpinned blocks are not counted as idle",
        TREE,
        ("self.num_idle += len(", "_ = len("),
    ),
    bug(
        "idle blocks are counted twice when they are unpinned",
        TREE,
        ("self.num_idle += len(", "self.num_idle += 2 * len("),
        seen_in="SGLang #35270",
    ),
    bug(
        "a node with children is never put among the idle",
        TREE,
        (
            LINK,
            "if place.children:\n"
            "                    place = parent\n"
            "                    continue\n"
            "                " + LINK,
        ),
        (
            "if node.refs == 0 and node.parent is not None:",
            "if node.refs == 0 and node.warmer is not None:",
        ),
        seen_in="FastDeploy PR 7885 review",
    ),
)

ORDER_BUGS = (
    bug(
        "the most recently used leaf is evicted first",
        TREE,
        (LINK, "link_before(idle.warmer, place)"),
        (CLOSE, ""),
    ),
    bug(
        "a path is evicted from its root",
        TREE,
        ("        warmest = idle.colder\n", "        after = warmest = idle\n"),
        (LINK, "link_before(after, place)\n                after = place"),
        (CLOSE, ""),
        seen_in="FastDeploy PR 7097, vLLM #48489",
    ),
    bug(
        "a later use does not make a run warmer",
        TREE,
        (
            LINK,
            "place.use = place.use or next(_FIRST_VERSIONS)\n"
            "                link_before(next((other for other in self.idle_nodes()"
            " if other.use > place.use), idle), place)",
        ),
        (CLOSE, ""),
        elsewhere=(
            ("prefix/node.py", '"tokens",\n', '"tokens",\n        "use",\n'),
            ("prefix/node.py", "self.refs = 0\n", "self.refs = self.use = 0\n"),
        ),
        seen_in="vLLM #16825",
    ),
    bug(
        "a split makes the cold part warm",
        TREE,
        (
            "link_before(lower.warmer, upper)",
            "unlink(lower); link_before(self._idle, lower); link_before(self._idle, upper)",
        ),
        seen_in="mini-sglang #124, SGLang #38482",
    ),
)

JOIN_BUGS = (
    bug(
        "a run that a request ends with is joined with the next one",
        TREE,
        ("if upper.refs == lower.refs and len", "if len"),
        ("            and upper.refs == last.refs\n", ""),
    ),
    bug(
        "a run is joined with one of its branches",
        TREE,
        (
            "if upper.refs == lower.refs and len(upper.children) == 1:",
            "if upper.refs == lower.refs:",
        ),
        ("            and len(upper.children) == 1\n", ""),
    ),
    bug(
        "runs are joined from the end of their path",
        TREE,
        (
            "runs = [node.tokens[: node.num_blocks * self.block_bytes] for node in nodes]",
            "runs = [node.tokens[: node.num_blocks * self.block_bytes] for node in nodes[::-1]]",
        ),
    ),
    bug(
        "a joined run has the tokens that were trimmed before",
        TREE,
        ("node.tokens[: node.num_blocks * self.block_bytes] for", "bytes(node.tokens) for"),
    ),
    bug(
        "a match outlives the join of its path",
        TREE,
        ("        self.version += 1\n        first, last", "        first, last"),
    ),
)

TREE_BUGS = (*WALK_BUGS, *PIN_BUGS, *ORDER_BUGS, *JOIN_BUGS)

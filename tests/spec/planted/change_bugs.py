"""Bugs to plant into the radix tree: append, split and evict."""

from __future__ import annotations

from .plant import bug

TREE, IDLE = "prefix/radix_tree.py", "prefix/eviction_order.py"

APPEND_BUGS = (
    bug(
        "a match from before a publication stays valid",
        TREE,
        ("self.version += 1\n        self.num_cached +=", "self.num_cached +="),
    ),
    bug(
        "published blocks are not counted as cached",
        TREE,
        ("self.num_cached += len(device_blocks) // ITEM_BYTES", "pass"),
    ),
    bug(
        "a run that others use grows in place",
        TREE,
        ("if node.refs == 1 and not node.children and", "if not node.children and"),
    ),
    bug(
        "a run with children grows in place",
        TREE,
        ("if node.refs == 1 and not node.children and", "if node.refs == 1 and"),
    ),
    bug(
        "a trimmed prompt grows behind the tokens that were cut",
        TREE,
        (
            "if isinstance(node.tokens, bytearray) and node.host is None:",
            "if True:",
        ),
    ),
    bug(
        "a trim leaves the tokens of a run that grows",
        TREE,
        ("del node.tokens[kept:]", "pass"),
        ("run: bytes | bytearray = tokens", "run: bytes | bytearray = bytearray(tokens)"),
    ),
    bug(
        "a published block has a user too many",
        TREE,
        ("child.refs = 1", "child.refs = 2"),
        seen_in="LMCache #987",
    ),
)

SPLIT_BUGS = (
    bug(
        "a match from before a split stays valid",
        TREE,
        (
            'self.version += 1\n        assert lower.parent is not None, "a root',
            'assert lower.parent is not None, "a root',
        ),
        seen_in="SGLang #36696",
    ),
    bug(
        "a split leaves all blocks in the lower part",
        TREE,
        ("lower.device_blocks = lower.device_blocks[num_blocks * ITEM_BYTES :]", "pass"),
    ),
    bug(
        "a split forgets all users but one",
        TREE,
        ("upper.refs = lower.refs", "upper.refs = min(lower.refs, 1)"),
    ),
    bug(
        "a split leaves the lower part at its old parent",
        TREE,
        ("lower.parent = upper", "pass"),
        seen_in="TensorRT-LLM #16019",
    ),
    bug(
        "the parent does not learn of a split",
        TREE,
        ("lower.parent.add_child(upper)", "pass"),
    ),
    bug(
        "a split keeps the lower part under its old key",
        TREE,
        ("lower.key = bytes(lower.tokens[: self.block_bytes])", "pass"),
        seen_in="SGLang #36696",
    ),
    bug(
        "a split loses the lower part",
        TREE,
        ("upper.add_child(lower)", "pass"),
        seen_in="SGLang #16946",
    ),
)

EVICT_BUGS = (
    bug(
        "evicted blocks stay counted as idle",
        TREE,
        ("self.num_idle -= num_blocks", "pass"),
        seen_in="pymllm #656",
    ),
    bug(
        "evicted blocks stay counted as cached",
        TREE,
        ("self.num_cached -= num_blocks", "pass"),
    ),
    bug(
        "the blocks at the wrong end of a run are freed",
        TREE,
        ("run[-num_bytes:]", "run[:num_bytes]"),
    ),
    bug(
        "a run is trimmed from its head",
        TREE,
        ("run[-num_bytes:]", "run[:num_bytes]"),
        ("node.device_blocks[:-num_bytes]", "node.device_blocks[num_bytes:]"),
        seen_in="TensorRT-LLM #12933",
    ),
    bug(
        "a run that is evicted whole stays as an empty one",
        TREE,
        ("if len(run) > num_bytes:", "if len(run) >= num_bytes:"),
    ),
    bug(
        "an evicted run can still be found",
        TREE,
        ("del parent.children[node.key]", "pass"),
        seen_in="nano-vllm #163, vLLM #44237",
    ),
    bug(
        "a namespace stays when all of it is evicted",
        TREE,
        ("if parent.parent is None and not parent.children:", "if False:"),
        seen_in="Dynamo #11785",
    ),
    bug(
        "a namespace in use is dropped when all of it is evicted",
        TREE,
        ("if root.refs == 0 and not root.children:", "if not root.children:"),
    ),
    bug(
        "a namespace is dropped with its last user",
        TREE,
        ("if root.refs == 0 and not root.children:", "if root.refs == 0:"),
    ),
    bug(
        "a match stays valid after its namespace was dropped",
        TREE,
        ("del self.roots[root.key]\n            self.version += 1", "del self.roots[root.key]"),
    ),
    bug(
        "a trimmed run keeps its blocks",
        TREE,
        ("node.device_blocks = node.device_blocks[:-num_bytes]", "pass"),
        seen_in="FastDeploy PR 3710",
    ),
)
# Many leaves at once are another path. Tiny pools take it if "many" begins at one.
MANY_AT_ONCE = (
    (TREE, "_FEW: Final = 16", "_FEW: Final = 0"),
    (TREE, "_AT_ONCE: Final = 1024", "_AT_ONCE: Final = 2"),
)

MANY_BUGS = (
    bug(
        "the last of many evicted leaves is not trimmed",
        TREE,
        ("self._trim(node, -excess)", "pass"),
        elsewhere=MANY_AT_ONCE,
    ),
    bug(
        "the last of many evicted leaves loses its head",
        TREE,
        ("run[: num_bytes + excess] + node.device_blocks[excess:]", "run"),
        elsewhere=MANY_AT_ONCE,
    ),
    bug(
        "a namespace stays when many leaves of it are evicted",
        TREE,
        ("for parent in cut_off(leaves):", "for parent in cut_off(leaves) and ():"),
        elsewhere=MANY_AT_ONCE,
    ),
    bug(
        "siblings that are evicted at once can still be found",
        IDLE,
        ("del children[leaf.key]", "pass"),
        elsewhere=MANY_AT_ONCE,
        seen_in="TensorRT-LLM #16019",
    ),
    bug(
        "leaves that are evicted at once can still be found",
        IDLE,
        ("del parent.children[leaf.key]", "pass"),
        elsewhere=MANY_AT_ONCE,
        seen_in="vLLM #44237",
    ),
)

CHANGE_BUGS = (*APPEND_BUGS, *SPLIT_BUGS, *EVICT_BUGS, *MANY_BUGS)

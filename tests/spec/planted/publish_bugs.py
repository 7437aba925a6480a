"""Bugs to plant into the manager: publish."""

from __future__ import annotations

from .plant import bug
from .release_bugs import LIVE

MANAGER = "manager.py"
PUBLISHING = "prefix/deduplication.py"

PUBLISH_BUGS = (
    bug(
        "half a block is published",
        MANAGER,
        (
            "lease.num_shared_blocks, len(tokens) // self.block_size",
            "lease.num_shared_blocks, -(-len(tokens) // self.block_size)",
        ),
    ),
    bug(
        "all reserved blocks are published",
        MANAGER,
        (
            "first, last = lease.num_shared_blocks, len(tokens) // self.block_size",
            "tokens = np.resize(tokens, max(lease.num_tokens, len(tokens))) if len(tokens) "
            "else tokens\n"
            "        first, last = lease.num_shared_blocks, len(tokens) // self.block_size",
        ),
        seen_in="FastDeploy PR 7364 review",
    ),
    bug(
        "the last whole block is not published",
        MANAGER,
        (
            "lease.num_shared_blocks, len(tokens) // self.block_size",
            "lease.num_shared_blocks, max(len(tokens) - 1, 0) // self.block_size",
        ),
    ),
    bug(
        "nothing is ever published",
        MANAGER,
        ("if last <= first:", "if True:"),
        seen_in="FastDeploy PR 7364",
    ),
    bug(
        "only a prompt is published, and nothing after it",
        MANAGER,
        ("if last <= first:", "if last <= first or first > lease.num_hit_blocks:"),
        seen_in="FastDeploy PR 4535",
    ),
    bug(
        "a run is published in the blocks of the run before it",
        MANAGER,
        (
            "blocks = lease._tables.row(lease.row)[first:last].tobytes()",
            "blocks = lease._tables.row(lease.row)[max(0, 2 * first - last) :]\n"
            "            blocks = blocks[: last - first].tobytes()",
        ),
    ),
    bug(
        "published blocks are published again",
        MANAGER,
        (
            "first, last = lease.num_shared_blocks, len(tokens)",
            "first, last = lease.num_hit_blocks, len(tokens)",
        ),
        seen_in="FastDeploy PR 7364",
    ),
    bug(
        "more is published than there is room for",
        MANAGER,
        ("if len(tokens) > self.tables.num_tokens.item(lease.row):", "if False:"),
    ),
    bug(
        "a publication changes the tokens of its caller",
        MANAGER,
        (
            "first, last = lease.num_shared_blocks",
            "tokens[-1:] += 1\n        first, last = lease.num_shared_blocks",
        ),
        seen_in="FastDeploy PR 7107",
    ),
    bug(
        "a second copy takes the place of the first",
        PUBLISHING,
        (
            "while (child := lease.node.children.get(run[:block_bytes])) is not None:",
            "while False:",
        ),
        seen_in="FastDeploy PR 6226",
    ),
    bug(
        "a second copy takes the place of the first in the tree",
        "prefix/radix_tree.py",
        ("assert key not in node.children, ", "assert True, "),
        ("child = node.children.get(tokens[position", "child = {}.get(tokens[position"),
        seen_in="FastDeploy PR 6221",
    ),
    bug(
        "a second copy is kept",
        PUBLISHING,
        ("recycle(copies)", "pass"),
        seen_in="FastDeploy PR 6226",
    ),
    bug(
        "the table still names the recycled copy",
        PUBLISHING,
        ("ids[first:published] = np", "_ = np"),
        seen_in="mini-sglang #142",
    ),
    bug(
        "the published one of two copies is recycled",
        PUBLISHING,
        ("            recycle(copies)\n", ""),
        ("INT32)[first:]\n", "INT32)[first:]\n            recycle(copies)\n"),
        seen_in="FastDeploy PR 6226",
    ),
    bug(
        "only the first block of a second copy is recycled",
        PUBLISHING,
        ("copies = ids[first:published]", "copies = ids[first : first + 1]"),
        seen_in="SGLang #11970",
    ),
    bug(
        "blocks that others published are pinned from the root",
        PUBLISHING,
        ("tree.pin(walk, above=lease.node)", "tree.pin(walk)"),
        seen_in="LMCache #3381",
    ),
    bug(
        "a lease that only found copies does not know that it shares them",
        MANAGER,
        (
            "        if run:\n",
            "        if not run:\n"
            "            lease.num_shared_blocks = lease.num_hit_blocks\n"
            "        if run:\n",
        ),
        seen_in="FastDeploy PR 3710",
    ),
    bug(
        "a lease believes to share a block more than it does",
        MANAGER,
        ("lease.num_shared_blocks = last\n", "lease.num_shared_blocks = last + 1\n"),
        seen_in="FastDeploy PR 7890",
    ),
    bug(
        "a recycled duplicate is not counted",
        PUBLISHING,
        ("num_copies += len(copies)", "pass"),
    ),
    bug(
        "a lease from before a reset publishes",
        MANAGER,
        (
            "tokens = as_tokens(tokens)\n" + LIVE,
            "tokens = as_tokens(tokens)\n",
        ),
        seen_in="FastDeploy PR 5502",
    ),
    bug(
        "the next block is that of the hit, not of what is published",
        MANAGER,
        (
            "first = lease.num_shared_blocks * self.block_size",
            "first = lease.num_hit_blocks * self.block_size",
        ),
    ),
    bug(
        "the next block of a lease is known by its tokens alone",
        MANAGER,
        ("return (lease.node, block.tobytes())", "return (self._tree, block.tobytes())"),
        seen_in="nano-vllm #219",
    ),
    bug(
        "half a block can be waited for",
        MANAGER,
        ("if len(block) == self.block_size else None", "if len(block) else None"),
    ),
    bug(
        "a match names the block after its first one",
        "prefix/lease.py",
        ("self._tokens[first : first + self._block_size]", "self._tokens[: self._block_size]"),
        seen_in="nano-vllm #243",
    ),
    bug(
        "a match that ends inside a run names the block of another place",
        "prefix/lease.py",
        ("walk is None or walk.inside is not None or", "walk is None or"),
    ),
    bug(
        "a completion that comes twice publishes the rest of the table",
        MANAGER,
        (
            "if last <= first:",
            "if last == first > lease.num_hit_blocks and len(tokens) % self.block_size == 0:\n"
            "            self.tables.num_blocks[lease.row] = last\n"
            "        if last <= first:",
        ),
    ),
    bug(
        "an older publication takes shared blocks back",
        MANAGER,
        ("if last <= first:\n", "if last <= first:\n            lease.num_shared_blocks = last\n"),
    ),
    bug(
        "an older publication makes the table shorter",
        MANAGER,
        (
            "if last <= first:",
            "if last < first:\n"
            "            self.tables.num_blocks[lease.row] = last\n"
            "        if last <= first:",
        ),
    ),
)

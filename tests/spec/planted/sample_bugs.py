"""Bugs to plant into the copies of blocks between several samples of a prompt."""

from __future__ import annotations

from .plant import bug

BATCH, REQUEST = "batching/batch.py", "request.py"

SAMPLE_BUGS = (
    bug(
        "a sample copies what a step in flight computes",
        BATCH,
        (
            "and first.num_computed >= request.num_prompt_tokens",
            "and first.num_scheduled >= request.num_prompt_tokens",
        ),
    ),
    bug(
        "a sample copies the block before the last",
        BATCH,
        (
            "source = lease_of(first).block_table.item(num_blocks)",
            "source = lease_of(first).block_table.item(max(num_blocks - 1, 0))",
        ),
    ),
    bug(
        "a sample copies nothing, and computes as if it had",
        BATCH,
        (
            "        plan.copies.append(BlockCopy(first, source, "
            "lease.block_table.item(num_blocks)))\n",
            "",
        ),
    ),
    bug(
        "a sample computes again what it has copied",
        BATCH,
        ("        first.num_copies += 1\n        return num_tokens\n",
         "        first.num_copies += 1\n        return 0\n"),
    ),
    bug(
        "the blocks of a request are given up while one is copied",
        REQUEST,
        (" or self.num_copies > 0\n", "\n"),
    ),
    bug(
        "a copied block is never given up",
        BATCH,
        ("            if copy.owner.finish_reason is not None:\n"
         "                self._release_ended(copy.owner)\n", ""),
    ),
    bug(
        "a copy is in flight for ever",
        BATCH,
        ("            copy.owner.num_copies -= 1\n", ""),
    ),
    bug(
        "copied tokens are not counted as hits",
        BATCH,
        ("on_device = lease.num_hit_blocks * self.manager.block_size + num_copied",
         "on_device = lease.num_hit_blocks * self.manager.block_size"),
    ),
)  # fmt: skip

TIERED_SAMPLE_BUGS = (
    bug(
        "copied tokens are counted as loaded from the host",
        BATCH,
        ("self._transfers.count_hits(request, hit_tokens - num_copied)",
         "self._transfers.count_hits(request, hit_tokens)"),
    ),
)  # fmt: skip

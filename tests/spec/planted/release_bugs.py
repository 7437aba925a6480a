"""Bugs to plant into the manager: release, evict and reset."""

from __future__ import annotations

from .plant import bug

MANAGER = "manager.py"

LIVE = (
    "        try:\n"
    "            if self._leases.get(lease.row) is not lease:\n"
    "                raise self._not_live(lease)\n"
    "        except AttributeError:\n"
    "            raise not_a_lease(lease) from None\n"
)
"""What refuses a lease that is not live."""

LEASE_BUGS = (
    bug(
        "a lease can be released twice",
        MANAGER,
        ("return\n                raise self._not_live(lease)\n", "return\n"),
        seen_in="sglang-jax #982, FastDeploy PR 3293",
    ),
    bug(
        "a lease from before a reset is released",
        MANAGER,
        (
            "if self._leases.get(lease.row) is not lease:\n                if lease.epoch",
            "if lease.row < 0:\n                if self.epoch",
        ),
        seen_in="FastDeploy PR 6202",
    ),
    bug(
        "a release after a reset is refused",
        MANAGER,
        ("if lease.epoch != self.epoch:\n                    return\n", "pass\n"),
        seen_in="FastDeploy PR 6615",
    ),
    bug(
        "a release leaves the path pinned",
        MANAGER,
        ("self._tree.unpin(lease.node)", "pass"),
        seen_in="LMCache #2785",
    ),
    bug(
        "a release keeps the private blocks",
        MANAGER,
        ("self._pool.recycle(tables.row(row)", "np.copy(tables.row(row)"),
        seen_in="SGLang #9817",
    ),
    bug(
        "a release keeps the last block if it is not full",
        MANAGER,
        (
            "[lease.num_shared_blocks :]",
            "[lease.num_shared_blocks : lease.num_tokens // self.block_size]",
        ),
        seen_in="SGLang #4977, SGLang #6888",
    ),
    bug(
        "a release frees the shared blocks too",
        MANAGER,
        ("[lease.num_shared_blocks :]", "[:]"),
        seen_in="FastDeploy PR 3710",
    ),
    bug(
        "a release frees the blocks that its lease published",
        MANAGER,
        ("[lease.num_shared_blocks :]", "[lease.num_hit_blocks :]"),
        seen_in="FastDeploy PR 3715, SGLang #36855",
    ),
    bug(
        "a release keeps the row",
        MANAGER,
        ("        tables.give_row(row)", "        pass"),
        seen_in="SGLang #10871",
    ),
    bug(
        "a release keeps the lease",
        MANAGER,
        ("del self._leases[row]", "pass"),
    ),
    bug(
        "a released lease still shows a row",
        MANAGER,
        ("lease.row = -1", "pass"),
    ),
)

WHOLE_BUGS = (
    bug(
        "an eviction does not free its victims",
        MANAGER,
        ("self._pool.recycle(victims)", "pass"),
    ),
    bug(
        "an eviction reports the requested number, not the evicted one",
        MANAGER,
        ("return len(victims)", "return num_blocks"),
    ),
    bug(
        "an eviction frees one block at most",
        MANAGER,
        ('self._evict(as_count("num_blocks", num_blocks))', "self._evict(min(num_blocks, 1))"),
    ),
    bug(
        "blocks evicted for a new owner are not counted",
        MANAGER,
        ("self._evicted_blocks += len(victims)", "pass"),
        (
            "self._pool.recycle(victims)",
            "self._pool.recycle(victims)\n        self._evicted_blocks += len(victims)",
        ),
    ),
    bug(
        "a reset begins no epoch",
        MANAGER,
        ("Epoch(self.epoch + 1)", "Epoch(self.epoch)"),
        seen_in="vLLM #46014",
    ),
    bug(
        "a reset keeps the tree",
        MANAGER,
        ("    self._tree = RadixTree(self.block_size)\n            self._pool", "    self._pool"),
        seen_in="vllm-omni #6039",
    ),
    bug(
        "a match from before a reset stays valid",
        MANAGER,
        (
            "    self._tree = RadixTree(self.block_size)\n            self._pool",
            "    version = self._tree.version\n"
            "            self._tree = RadixTree(self.block_size)\n"
            "            self._tree.version = version\n"
            "            self._pool",
        ),
        seen_in="FastDeploy PR 4008",
    ),
    bug(
        "a reset frees nothing",
        MANAGER,
        ("self._pool.reset()", "pass"),
        seen_in="FastDeploy PR 5930",
    ),
    bug(
        "a reset keeps the rows",
        MANAGER,
        ("self.tables = BlockTables()\n        self._leases.clear()", "self._leases.clear()"),
    ),
    bug(
        "a reset keeps the leases",
        MANAGER,
        ("self._leases.clear()", "pass"),
    ),
    bug(
        "after a reset the versions of the tree begin anew",
        "prefix/radix_tree.py",
        ("count(0, 2**40)", "count(0, 0)"),
    ),
)

RELEASE_BUGS = (*LEASE_BUGS, *WHOLE_BUGS)

"""Bugs to plant into the manager: match and admit."""

from __future__ import annotations

from .plant import bug

MANAGER = "manager.py"

MATCH_BUGS = (
    bug(
        "evictable blocks do not count as available",
        MANAGER,
        ("return self._pool.num_free + self._tree.num_idle", "return self._pool.num_free"),
    ),
    bug(
        "blocks in use count as available",
        MANAGER,
        (
            "return self._pool.num_free + self._tree.num_idle",
            "return self._pool.num_free + self._tree.num_cached",
        ),
        seen_in="SGLang #35270",
    ),
    bug(
        "all namespaces share one cache",
        MANAGER,
        ("roots.get(namespace)", 'roots.get(b"")'),
        seen_in="vLLM #44701, vLLM #30931",
    ),
    bug(
        "a match sorts the tokens of its caller",
        MANAGER,
        ("if not isinstance(namespace, bytes):", "tokens.sort()\n        if False:"),
        seen_in="FastDeploy PR 7107",
    ),
    bug(
        "a namespace that is no bytes is taken",
        MANAGER,
        ("if not isinstance(namespace, bytes):", "if False:"),
    ),
    bug(
        "the blocks available after a match are counted for an outdated match",
        MANAGER,
        ("is_current = match._version == self._tree.version", "is_current = True"),
    ),
    bug(
        "the blocks available after a match include those that it pins",
        MANAGER,
        ("return self.available - pinned", "return self.available"),
        seen_in="SGLang test_cache_hit_overadmission_capacity",
    ),
)

ADMIT_BUGS = (
    bug(
        "a stale match is not done again",
        MANAGER,
        ("match._version == tree.version", "True"),
        seen_in="TensorRT-LLM #8830",
    ),
    bug(
        "a match from before an eviction stays valid",
        MANAGER,
        (
            "victims = (self._tree if tiers is None else tiers.offloader).evict(num_blocks)",
            "version = self._tree.version\n"
            "        victims = self._tree.evict(num_blocks)\n"
            "        self._tree.version = version",
        ),
        seen_in="TensorRT-LLM #12834",
    ),
    bug(
        "no block is reserved for the last tokens of a prompt",
        MANAGER,
        ("num_blocks = -(-match._length //", "num_blocks = max(match.num_blocks, match._length //"),
        seen_in="SGLang #6888",
    ),
    bug(
        "one block more than the prompt needs is reserved",
        MANAGER,
        (
            "num_blocks = -(-match._length // self.block_size)",
            "num_blocks = match._length // self.block_size + 1",
        ),
        seen_in="FastDeploy PR 8022",
    ),
    bug(
        "blocks are asked for the hit too",
        MANAGER,
        ("needed = num_blocks - match.num_blocks", "needed = num_blocks"),
        seen_in="sglang-jax evict asks for the need",
    ),
    bug(
        "a request that can never fit is refused as out of blocks for now",
        MANAGER,
        ("if num_blocks > self.num_blocks:", "if False:"),
        seen_in="FastDeploy PR 5544, vLLM #39734",
    ),
    bug(
        "a request of the whole pool is refused",
        MANAGER,
        ("if num_blocks > self.num_blocks:", "if num_blocks >= self.num_blocks:"),
    ),
    bug(
        "the hit itself counts as evictable",
        MANAGER,
        ("if needed > self.available - pinned:", "if needed > self.available:"),
        seen_in="vLLM test_computed_blocks_not_evicted",
    ),
    bug(
        "an admission that takes the last block is refused",
        MANAGER,
        ("if needed > self.available - pinned:", "if needed >= self.available - pinned:"),
    ),
    bug(
        "an admission is refused before anything is evicted",
        MANAGER,
        ("if needed > self.available - pinned:", "if True:"),
        seen_in="FastDeploy PR 7107",
    ),
    bug(
        "a refusal does not count the blocks that the hit would pin",
        MANAGER,
        (
            "raise OutOfBlocksError(needed, self.available - pinned)",
            "raise OutOfBlocksError(needed, self.available)",
        ),
    ),
    bug(
        "a refused admission leaves its hit pinned",
        MANAGER,
        (
            "if needed > self.available - pinned:",
            "if needed > self.available - pinned and (walk is None or tree.pin(walk)):",
        ),
        seen_in="LMCache #2785",
    ),
    bug(
        "a refused admission keeps its row",
        MANAGER,
        (
            "raise OutOfBlocksError(needed, self.available - pinned)",
            "self.tables.take_row()\n"
            "                raise OutOfBlocksError(needed, self.available - pinned)",
        ),
        seen_in="SGLang #10871",
    ),
    bug(
        "room is made before the hit is pinned",
        MANAGER,
        (
            "node = tree.pin(walk)",
            "self._pool.recycle(self._evict(max(0, needed - self._pool.num_free)))\n"
            "        node = tree.pin(walk)",
        ),
        seen_in="TensorRT-LLM #11879",
    ),
    bug(
        "the hit is not written to the block table",
        MANAGER,
        ("ids[: match.num_blocks] = np", "_ = np"),
    ),
    bug(
        "a table counts only its new blocks",
        MANAGER,
        (
            "tables.num_tokens[row] = match._length",
            "tables.num_tokens[row], tables.num_blocks[row] = match._length, needed",
        ),
    ),
    bug(
        "an admission makes room for whole blocks of tokens",
        MANAGER,
        (
            "tables.num_tokens[row] = match._length",
            "tables.num_tokens[row] = num_blocks * self.block_size",
        ),
    ),
    bug(
        "a table is emptied before the tables are packed",
        "prefix/block_tables.py",
        (
            "        if self._end + room > len(self._ids):\n"
            "            self._pack(room)\n"
            "        ids, start = self.row(row), self._end\n",
            "        ids = self.row(row)\n"
            "        if self._end + room > len(self._ids):\n"
            "            ids[:] = 0\n"
            "            self._pack(room)\n"
            "        start = self._end\n",
        ),
    ),
    bug(
        "a hit counts as private",
        "prefix/lease.py",
        ("self.num_shared_blocks = num_hit_blocks", "self.num_shared_blocks = 0"),
        seen_in="FastDeploy PR 3710",
    ),
    bug(
        "reserved blocks are published at once",
        MANAGER,
        (
            "self._hit_blocks += match.num_blocks",
            "self._hit_blocks += match.num_blocks\n        self.publish(lease, match._tokens)",
        ),
        seen_in="FastDeploy PR 7364 review, vLLM #43569",
    ),
    bug(
        "the hits of a refused admission are counted",
        MANAGER,
        (
            "if needed > self.available - pinned:",
            "self._hit_blocks += match.num_blocks\n"
            "            if needed > self.available - pinned:",
        ),
        seen_in="FastDeploy PR 6620",
    ),
    bug(
        "a lease claims a block more than it hit",
        "prefix/lease.py",
        ("self.num_hit_blocks = num_hit_blocks", "self.num_hit_blocks = num_hit_blocks + 1"),
    ),
    bug(
        "a lease claims a block less than it hit",
        "prefix/lease.py",
        (
            "self.num_hit_blocks = num_hit_blocks",
            "self.num_hit_blocks = max(0, num_hit_blocks - 1)",
        ),
    ),
    bug(
        "the pool has a block too many",
        MANAGER,
        ("BlockPool(self.num_blocks)", "BlockPool(self.num_blocks + 1)"),
        (
            "return self._pool.num_free + self._tree.num_idle",
            "return self._pool.num_free + self._tree.num_idle - 1",
        ),
        seen_in="FastDeploy PR 6230",
    ),
    bug(
        "a full hit leaves no token to compute",
        MANAGER,
        seen_in="nano-vllm #144",
        unclaimed=("hits_last",),
    ),
    bug(
        "an idle cache refuses a request of the whole pool",
        MANAGER,
        ("if num_blocks > self.num_blocks:", "if num_blocks >= self.num_blocks:"),
        seen_in="vLLM #45388",
        unclaimed=("refuses_only_short",),
    ),
    bug(
        "a refused admission evicts all the same",
        MANAGER,
        (
            "if needed > self.available - pinned:",
            "if needed > self.available - pinned:\n"
            "                self.evict(self.available - pinned - self._pool.num_free)",
        ),
        seen_in="vLLM test_prefill_not_enough_free_blocks_with_computed_blocks",
    ),
)

ADMISSION_BUGS = (*MATCH_BUGS, *ADMIT_BUGS)

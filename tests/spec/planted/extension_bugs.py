"""Bugs to plant into the manager: extend, extend_batch and the allocation of blocks."""

from __future__ import annotations

from .plant import bug
from .release_bugs import LIVE

MANAGER = "manager.py"

EXTEND_BUGS = (
    bug(
        "an extension rounds down",
        MANAGER,
        (
            "needed = -(-total // self.block_size) - held",
            "needed = total // self.block_size - held",
        ),
    ),
    bug(
        "an extension takes a block too early",
        MANAGER,
        (
            "needed = -(-total // self.block_size) - held",
            "needed = total // self.block_size + 1 - held",
        ),
    ),
    bug(
        "an extension does not check the available blocks",
        MANAGER,
        ("self._require_available(needed)", "needed = min(needed, self.available)"),
        seen_in="FastDeploy v1 cache manager",
    ),
    bug(
        "an extension is refused where there is something to evict",
        MANAGER,
        ("if needed > self.available:", "if needed > self._pool.num_free:"),
        seen_in="FastDeploy PR 7107",
    ),
    bug(
        "the last block is never given",
        MANAGER,
        ("if needed > self.available:", "if needed >= self.available:"),
    ),
    bug(
        "a refusal reports the free blocks, not the available ones",
        MANAGER,
        (
            "raise OutOfBlocksError(needed, self.available)",
            "raise OutOfBlocksError(needed, self._pool.num_free)",
        ),
    ),
    bug(
        "an extension does not count its tokens",
        MANAGER,
        ("tables.num_tokens[row] = total", "pass"),
    ),
    bug(
        "an extension does not count its blocks",
        MANAGER,
        (
            "self._fill(tables.grow(row, held + needed)[held:])",
            "self._fill(tables.grow(row, held + needed)[held:])\n"
            "            tables.num_blocks[row] = held",
        ),
    ),
    bug(
        "a refused extension counts its tokens",
        MANAGER,
        (
            "held = tables.num_blocks.item(row)",
            "held = tables.num_blocks.item(row)\n        tables.num_tokens[row] = total",
        ),
    ),
    bug(
        "a lease from before a reset can grow",
        MANAGER,
        (
            'as_count("num_tokens", num_tokens)\n' + LIVE,
            'as_count("num_tokens", num_tokens)\n',
        ),
        seen_in="FastDeploy PR 6615",
    ),
    bug(
        "a request can shrink",
        MANAGER,
        ('num_tokens = as_count("num_tokens", num_tokens)', "pass"),
        seen_in="FastDeploy PR 8022",
    ),
    bug(
        "a refused extension evicts all the same",
        MANAGER,
        (
            "if needed > self.available:",
            "if needed > self.available:\n            self.evict(needed)",
        ),
    ),
)

BATCH_BUGS = (
    bug(
        "a batch takes its blocks a token too early",
        MANAGER,
        (
            "crosses = num_tokens > held * self.block_size",
            "crosses = num_tokens >= held * self.block_size",
        ),
    ),
    bug(
        "a batch takes its blocks a token too late",
        MANAGER,
        (
            "crosses = num_tokens > held * self.block_size",
            "crosses = num_tokens > held * self.block_size + 1",
        ),
    ),
    bug(
        "a batch grows by as many requests as there is room for",
        MANAGER,
        (
            "self._require_available(len(crossing))",
            "crosses[np.flatnonzero(crosses)[self.available :]] = False\n"
            "            crossing = rows[crosses]",
        ),
        seen_in="FastDeploy v1 cache manager",
    ),
    bug(
        "a row may come twice in a batch",
        MANAGER,
        ("if len(rows) and np.bincount(rows).max() > 1:", "if False:"),
    ),
    bug(
        "rows of no lease are taken",
        MANAGER,
        ("if not tables.rows_are_live(rows):", "if False:"),
    ),
    bug(
        "a refused batch counts its tokens",
        MANAGER,
        (
            "crossing = rows[crosses]",
            "crossing = rows[crosses]\n        tables.num_tokens[rows] += 1",
        ),
    ),
    bug(
        "a whole batch shares one new block",
        MANAGER,
        ("tables.append(crossing, new)", "tables.append(crossing, np.full_like(new, new[0]))"),
    ),
    bug(
        "a batch does not count its blocks",
        "prefix/block_tables.py",
        ("self.num_blocks[rows] = columns + 1", "pass"),
    ),
    bug(
        "only the requests of a batch with a new block grow",
        MANAGER,
        (
            "tables.num_tokens[rows] = num_tokens",
            "tables.num_tokens[crossing] = num_tokens[crosses]",
        ),
    ),
    bug(
        "a batch asks for a block for each request",
        MANAGER,
        ("self._require_available(len(crossing))", "self._require_available(len(rows))"),
        seen_in="FastDeploy PR 8022",
    ),
)

FILL_BUGS = (
    bug(
        "a block more than is short is evicted",
        MANAGER,
        (
            "ids[-short:] = self._evict(short)",
            "self.evict(1)\n        ids[-short:] = self._evict(short)",
        ),
    ),
    bug(
        "all needed blocks are evicted, not only the missing ones",
        MANAGER,
        (
            "ids[-short:] = self._evict(short)",
            "self._pool.recycle(self._evict(len(ids)))\n"
            "        self._pool.fill(ids)\n"
            "        return",
        ),
        seen_in="FastDeploy PR 7885, sglang-jax evict asks for the need",
    ),
    bug(
        "idle blocks are taken before free ones",
        MANAGER,
        ("short = len(ids) - self._pool.num_free", "short = min(len(ids), self._tree.num_idle)"),
    ),
    bug(
        "an evicted block has a new owner and is free as well",
        MANAGER,
        (
            "ids[-short:] = self._evict(short)",
            "ids[-short:] = victims = self._evict(short)\n        self._pool.recycle(victims)",
        ),
        seen_in="FastDeploy PR 3715, FastDeploy PR 7885",
    ),
)

EXTENSION_BUGS = (*EXTEND_BUGS, *BATCH_BUGS, *FILL_BUGS)

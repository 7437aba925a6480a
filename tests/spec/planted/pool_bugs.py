"""Bugs to plant into the block pool, the block tables and the validation of input."""

from __future__ import annotations

from .plant import bug

POOL, TABLES, TOKENS = "prefix/block_pool.py", "prefix/block_tables.py", "tokens.py"

STACK_BUGS = (
    bug(
        "the padding sink is given to a request",
        POOL,
        ("np.arange(self.num_blocks, 0, -1)", "np.arange(self.num_blocks - 1, -1, -1)"),
        seen_in="tpu-inference #3449",
    ),
    bug(
        "the pool has an id past its end",
        POOL,
        ("np.arange(self.num_blocks, 0, -1)", "np.arange(self.num_blocks + 1, 1, -1)"),
    ),
    bug(
        "blocks that are given stay free",
        POOL,
        ("self.num_free = rest", "pass"),
    ),
    bug(
        "a given block is still marked as free",
        POOL,
        ("self._place[block] = 0", "pass"),
        ("and not self._place.item(block):", "and not self._place.item(block) * 0:"),
    ),
    bug(
        "blocks are taken from below the top of the stack",
        POOL,
        (
            "taken = self._stack[rest : self.num_free]",
            "taken = self._stack[max(rest - 1, 0) : max(rest - 1, 0) + num_blocks]",
        ),
    ),
    bug(
        "many blocks at once are one block",
        POOL,
        ("ids[:] = taken[::-1]", "ids[:] = taken[0]"),
    ),
    bug(
        "too many blocks are allocated in part",
        POOL,
        ("raise OutOfBlocksError(num_blocks, self.num_free)", "num_blocks = self.num_free"),
        seen_in="FastDeploy v1 cache manager",
        world="pool",
    ),
    bug(
        "no block at all is all blocks",
        POOL,
        (
            "ids = np.empty(num_blocks, np.int32)",
            "ids = np.empty(num_blocks or self.num_free, np.int32)",
        ),
        seen_in="FastDeploy PR 7097",
        world="pool",
    ),
)

RECYCLE_BUGS = (
    bug(
        "recycling does not check which blocks are free",
        POOL,
        (
            "if 1 <= block <= self.num_blocks and not self._place.item(block):",
            "if 1 <= block <= self.num_blocks:",
        ),
        seen_in="vllm-ascend #15990",
        world="pool",
    ),
    bug(
        "recycling takes the padding sink",
        POOL,
        ("if 1 <= block <= self.num_blocks and", "if 0 <= block <= self.num_blocks and"),
        (
            "self._place[-1] = _OUT_OF_RANGE",
            "self._place[-1] = _OUT_OF_RANGE\n        self._place[0] = 0",
        ),
        world="pool",
    ),
    bug(
        "one wrong id refuses all that come with it",
        POOL,
        (
            "refused = []",
            "refused = [] if (self._place.take(ids, mode='clip') == 0).all() else ids",
        ),
        ("for block in ids.tolist():", "for block in ids[: 0 if len(refused) else None].tolist():"),
        ("if refused:", "if len(refused):"),
        (
            "raise RecycleError(refused, len(ids) - len(refused))",
            "raise RecycleError(list(refused), len(ids) - len(refused))",
        ),
        seen_in="FastDeploy PR 7885",
        world="pool",
    ),
    bug(
        "wrong ids are passed over in silence",
        POOL,
        ("if refused:", "if False:"),
        seen_in="FastDeploy PR 7097",
        world="pool",
    ),
    bug(
        "many ids at once may be free already",
        POOL,
        ('if np.count_nonzero(self._place.take(ids, mode="clip")):', "if False:"),
        seen_in="vllm-ascend #14301",
        world="pool",
    ),
    bug(
        "many ids at once may come twice",
        POOL,
        ("if np.count_nonzero(self._place.take(ids) == places) < len(ids):", "if False:"),
        seen_in="UCM #1053",
        world="pool",
    ),
    bug(
        "an id that came twice among many is lost",
        POOL,
        ("self._place[ids] = 0  #", "pass  #"),
        seen_in="SGLang #38981",
        world="pool",
    ),
    bug(
        "many ids at once are lost",
        POOL,
        ("self.num_free = num_free", "pass"),
    ),
    bug(
        "a recycled block is not marked as free",
        POOL,
        ("self._place[block] = self.num_free", "pass"),
    ),
    bug(
        "a single id is recycled without a check",
        POOL,
        (
            "if 1 <= block <= self.num_blocks and not self._place.item(block):",
            "if 1 <= block <= self.num_blocks and (len(ids) == 1 or not self._place.item(block)):",
        ),
        world="pool",
    ),
)

TABLE_BUGS = (
    bug(
        "two requests share a row",
        TABLES,
        ("self._free_rows.pop()", "self._free_rows[-1]"),
    ),
    bug(
        "a row is never used again",
        TABLES,
        ("self._free_rows.append(row)", "pass"),
        seen_in="SGLang #16067",
    ),
    bug(
        "a row that is given back keeps its ids",
        TABLES,
        ("ids = self.row(row)\n        ids[:] = 0", "ids = self.row(row)"),
        seen_in="tpu-inference #3449",
    ),
    bug(
        "a row that is given back keeps its blocks",
        TABLES,
        ("self.num_blocks[row] = 0", "pass"),
    ),
    bug(
        "a row that is given back keeps its tokens",
        TABLES,
        ("self.num_tokens[row] = 0", "pass"),
    ),
    bug(
        "a row that is given back stays live",
        TABLES,
        ("self.live[row] = False", "pass"),
    ),
    bug(
        "a row that is taken is not live",
        TABLES,
        ("self.live[row] = True", "pass"),
    ),
    bug(
        "new rows push the old ones down",
        TABLES,
        ("_FIRST_ROWS: Final = 64", "_FIRST_ROWS: Final = 1"),
        (
            "np.concatenate([column, np.zeros_like(column)])",
            "np.concatenate([np.zeros_like(column), column])",
        ),
    ),
    bug(
        "new rows are taken for old ones",
        TABLES,
        ("_FIRST_ROWS: Final = 64", "_FIRST_ROWS: Final = 1"),
        ("range(2 * rows - 1, rows - 1, -1)", "range(rows, -1, -1)"),
    ),
    bug(
        "a wider table is an empty one",
        TABLES,
        ("self._ids[start : start + len(ids)] = ids", "pass"),
    ),
    bug(
        "a table that is packed is empty",
        TABLES,
        ("packed[start : start + len(ids)] = ids", "pass"),
    ),
    bug(
        "a table that is packed is read where it was",
        TABLES,
        (
            "self._starts, self._rooms, self._end = packed, starts,",
            "_, self._rooms, self._end = packed, starts,",
        ),
    ),
    bug(
        "tables overlap after they were packed",
        TABLES,
        (
            "starts = np.cumsum(rooms) - rooms",
            "starts = np.cumsum(self.num_blocks) - self.num_blocks",
        ),
    ),
    bug(
        "a free row keeps a segment that was packed away",
        TABLES,
        (
            "rooms = np.where(self.live, np.maximum(rooms, _LEAST_ROOM), 0)",
            "rooms = np.where(self.live, np.maximum(rooms, _LEAST_ROOM), self._rooms)",
        ),
        ("end = int(rooms.sum())", "end = int(rooms[self.live].sum())"),
    ),
    bug(
        "a table that moves leaves its ids behind",
        TABLES,
        ("        ids[:] = 0\n        self._starts[row]", "        self._starts[row]"),
    ),
    bug(
        "the tables never shrink",
        TABLES,
        ("if len(self._ids) > _KEPT_IDS and len(self._ids) > self._most_ids():", "if False:"),
    ),
    bug(
        "one dead row among live ones is not noticed",
        TABLES,
        ("self.live[rows].all()", "self.live[rows].any()"),
    ),
    bug(
        "a row is counted from the end",
        TABLES,
        ("in_range = int(rows.min()) >= 0 and", "in_range ="),
        ("_FIRST_ROWS: Final = 64", "_FIRST_ROWS: Final = 1"),
    ),
)

DOOR_BUGS = (
    bug(
        "a token outside int32 is wrapped",
        TOKENS,
        (
            'np.frombuffer(struct.pack(f"{len(values)}i", *values), INT32)',
            "np.array([int(value) for value in values], np.int64).astype(INT32)",
        ),
    ),
    bug(
        "a token of a wider array is wrapped",
        TOKENS,
        ("if np.count_nonzero(narrow != array):", "if False:"),
    ),
    bug(
        "a negative count is taken",
        TOKENS,
        ("if value < minimum:", "if False:"),
    ),
    bug(
        "a token of another kind is taken",
        TOKENS,
        (
            'np.frombuffer(struct.pack(f"{len(values)}i", *values), INT32)',
            "np.array(values, INT32)",
        ),
    ),
    bug(
        "tokens are cut to 16 bits",
        TOKENS,
        ('("token", tokens, TokenError)', '("token", tokens, TokenError) & 0xFFFF'),
        seen_in="SGLang #25462",
    ),
)

POOL_BUGS = (*STACK_BUGS, *RECYCLE_BUGS, *TABLE_BUGS, *DOOR_BUGS)

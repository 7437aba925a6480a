"""Bugs to plant into parking, prefetch and reset."""

from __future__ import annotations

from .plant import bug

PARKING, PREFETCH = "parking.py", "prefetch.py"
TIERS, MANAGER = "tiers.py", "manager.py"

PARKING_BUGS = (
    bug(
        "a parked lease is released when its copy is decided",
        PARKING,
        (
            "    tiers.parked[parked] = None\n    if sources:\n",
            "    tiers.parked[parked] = None\n    if sources:\n        lease.parking = False\n"
            "        manager.release(lease)\n",
        ),
        elsewhere=(
            (
                PARKING,
                "        parked.lease.parking = False\n"
                "        self._tiers.manager.release(parked.lease)\n",
                "",
            ),
        ),
        seen_in="FastDeploy v1, FastDeploy PR 7107 review, vLLM #52360",
        world="tiers",
    ),
    bug(
        "a parked lease is never released",
        PARKING,
        ("        self._tiers.manager.release(parked.lease)\n", ""),
        world="tiers",
    ),
    bug(
        "a park that failed is marked as good",
        PARKING,
        ("        parked.failed = not all(ok)\n", "        parked.failed = False\n"),
        seen_in="SGLang #27108, FastDeploy v1",
        world="tiers",
    ),
    bug(
        "a tail that was not saved is loaded",
        PARKING,
        ("if parked.tail_block is not None and not ok[-1]:", "if False:"),
        world="tiers",
    ),
    bug(
        "a tail that was not saved is free before the fence",
        PARKING,
        (
            "            self._lost_tail, parked.tail_block = parked.tail_block, None\n",
            "            self._tiers.host.pool.recycle(np.array([parked.tail_block], np.int32))\n"
            "            parked.tail_block = None\n",
        ),
        world="tiers",
    ),
    bug(
        "a tail that was not saved is never free",
        PARKING,
        ("        tiers.host.pool.recycle(np.array(self.own_host_blocks(), np.int32))\n", ""),
        world="tiers",
    ),
    bug(
        "what is parked may be dropped",
        PARKING,
        (
            "    tiers.let_go(held)\n    lease.parking = True\n",
            "    tiers.let_go(held)\n    tiers.let_go(parked.runs)\n    lease.parking = True\n",
        ),
        world="tiers",
    ),
    bug(
        "making room for a park drops what the request has there already",
        PARKING,
        (
            "    held = host.hold([node.host for node in path if node.host is not None])\n"
            "    missing",
            "    held = host.hold([])\n    missing",
        ),
        world="tiers",
    ),
    bug(
        "a park that is refused keeps its hold",
        PARKING,
        ("        tiers.let_go(held)\n        return None", "        return None"),
        world="tiers",
    ),
    bug(
        "a request is not parked if it takes the last host block",
        PARKING,
        (
            "if len(sources) // ITEM_BYTES > host.available:",
            "if len(sources) // ITEM_BYTES >= host.available:",
        ),
        world="tiers",
    ),
    bug(
        "a request is parked without its unfinished block",
        PARKING,
        (
            "tail_tokens = max(len(tokens) - lease.num_shared_blocks * manager.block_size, 0)",
            "tail_tokens = 0",
        ),
        seen_in="vLLM #18631",
        world="tiers",
    ),
    bug(
        "a resumed request lets go of nothing",
        PARKING,
        (
            "        tiers.operations.cancel(parked.op_id)\n    tiers.let_go(parked.runs)",
            "        tiers.operations.cancel(parked.op_id)",
        ),
        world="tiers",
    ),
    bug(
        "a parked request that is given up is saved all the same",
        PARKING,
        ("        tiers.operations.cancel(parked.op_id)\n", "        pass\n"),
        world="tiers",
    ),
    bug(
        "a tail that is of no use is never free",
        PARKING,
        ("        _recycle_tail(tiers, parked)\n        return None, 0", "        return None, 0"),
        world="tiers",
    ),
    bug(
        "a parked request that is given up keeps its tail",
        PARKING,
        (
            "    _end(tiers, parked)\n    _recycle_tail(tiers, parked)\n",
            "    _end(tiers, parked)\n",
        ),
        seen_in="SGLang #9874",
        world="tiers",
    ),
    bug(
        "a tail is loaded behind a hit that ends before it",
        PARKING,
        (
            "if parked.tail_block is None or num_blocks != whole or",
            "if parked.tail_block is None or",
        ),
        world="tiers",
    ),
    bug(
        "a tail of before a reset is loaded",
        PARKING,
        (" or parked.epoch != tiers.manager.epoch:", ":"),
        seen_in="FastDeploy PR 6202",
        world="tiers",
    ),
    bug(
        "a parked request can be given up twice",
        PARKING,
        ("if tiers is None or parked not in tiers.parked:", "if tiers is None:"),
        elsewhere=(
            (PARKING, "    del tiers.parked[parked]\n", "    tiers.parked.pop(parked, None)\n"),
        ),
        world="tiers",
    ),
    bug(
        "what is parked in storage may be dropped before it is stored",
        PARKING,
        ("parked.saved and all(run.stored for run in parked.runs)", "parked.saved"),
        seen_in="FastDeploy PR 7107 review",
        world="tiers",
    ),
    bug(
        "a fetch counts blocks behind the first bad one",
        PREFETCH,
        ("        self._num_good = leading(ok)\n", "        self._num_good = sum(ok)\n"),
        seen_in="FastDeploy file store",
        world="tiers",
    ),
    bug(
        "a prefetch inserts a block that failed",
        PREFETCH,
        ("        self._num_good = leading(ok)\n", "        self._num_good = len(ok)\n"),
        seen_in="vLLM #19330, FastDeploy v1",
        world="tiers",
    ),
    bug(
        "a prefetch loads what was not found",
        PREFETCH,
        ("        self._num_found = leading(ok)\n", "        self._num_found = len(ok)\n"),
        seen_in="FastDeploy file store",
        world="tiers",
    ),
    bug(
        "a prefetch asks for what is cached, too",
        PREFETCH,
        (
            "tiers.storage.block_keys(tokens, namespace)[have:]",
            "tiers.storage.block_keys(tokens, namespace)",
        ),
        world="tiers",
    ),
    bug(
        "a prefetch asks for nothing",
        PREFETCH,
        ("if tiers.storage is None or have == whole:", "if True:"),
        seen_in="FastDeploy PR 7107",
        world="tiers",
    ),
    bug(
        "a cancelled prefetch goes on when storage has answered",
        PREFETCH,
        ("wanted = self.wanted and self._epoch", "wanted = self._epoch"),
        elsewhere=((TIERS, "        self.operations.cancel(prefetch.op_id)\n", ""),),
        seen_in="SGLang #9874, SGLang #30053",
        world="tiers",
    ),
    bug(
        "an answer of before a reset is loaded after it",
        PREFETCH,
        ("wanted = self.wanted and self._epoch == tiers.manager.epoch", "wanted = self.wanted"),
        seen_in="FastDeploy v1",
        world="tiers",
    ),
    bug(
        "a fetch of before a reset enters the tree",
        PREFETCH,
        (
            "good = self._num_good if self._epoch == tiers.manager.epoch else 0",
            "good = self._num_good",
        ),
        seen_in="FastDeploy PR 6202",
        world="tiers",
    ),
    bug(
        "the blocks of a failed fetch are never free",
        PREFETCH,
        ("        tiers.host.pool.recycle(np.setdiff1d(self.ids, kept))\n", ""),
        seen_in="SGLang #9874",
        world="tiers",
    ),
    bug(
        "a prefetch keeps its hold",
        PREFETCH,
        ("        self._tiers.let_go(self.runs)\n", ""),
        seen_in="SGLang #16369, SGLang #40262",
        world="tiers",
    ),
    bug(
        "a prefetch without room waits forever",
        PREFETCH,
        ("            self.end(0)\n            return\n", "            return\n"),
        seen_in="FastDeploy storage",
        world="tiers",
    ),
    bug(
        "a reset lets operations go on",
        MANAGER,
        ("            self.tiers.cancel_all()\n", "            pass\n"),
        seen_in="FastDeploy PR 6202, FastDeploy PR 4008",
        world="tiers",
    ),
    bug(
        "a reset keeps what it should drop, and drops what it should keep",
        MANAGER,
        ("if name not in keep]", "if name in keep]"),
        world="tiers",
    ),
    bug(
        "a reset forgets what it was to keep",
        MANAGER,
        ("if name not in keep]", "]"),
        world="tiers",
    ),
    bug(
        "a reset keeps everything",
        MANAGER,
        (
            "for namespace in [name for name in self._tree.roots if name not in keep]:",
            "for namespace in []:",
        ),
        seen_in="FastDeploy v1",
        world="tiers",
    ),
)

"""Bugs to plant into prefetch, reset, and loads that outlive their request."""

from __future__ import annotations

from .plant import bug

PREFETCH, TIERS, MANAGER = "prefetch.py", "tiers.py", "manager.py"
READER = "host_reader.py"

PREFETCH_BUGS = (
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
    bug(
        "what the host gave up for a request that ends while it is loaded is lost",
        READER,
        ("        if is_left and not promotion.is_void:\n", "        if False:\n"),
        world="tiers",
    ),
    bug(
        "what arrives for a request that has ended is freed, not published",
        READER,
        (
            "            tiers.reader.promoted(self, self._num_good, self._tail_tokens)\n",
            "            num_good = 0 if self in tiers.reader.heirs else self._num_good\n"
            "            tiers.reader.promoted(self, num_good, self._tail_tokens)\n",
        ),
        world="tiers",
    ),
    bug(
        "what was moved for a request that has ended stays pinned",
        "cache.py",
        ("        self._tree.unpin(heir.node)\n", ""),
        world="tiers",
    ),
)

"""Bugs to plant into prefetch, reset, and loads that outlive their request."""

from __future__ import annotations

from .plant import bug

PREFETCH, TIERS, MANAGER = "tiers/prefetch.py", "tiers/api.py", "manager.py"
LOADER = "tiers/load.py"

PREFETCH_BUGS = (
    bug(
        "a fetch counts blocks behind the first bad one",
        PREFETCH,
        ("good = self._state, leading(ok)", "good = self._state, sum(ok)"),
        seen_in="FastDeploy file store",
        world="tiers",
    ),
    bug(
        "a prefetch inserts a block that failed",
        PREFETCH,
        ("good = self._state, leading(ok)", "good = self._state, len(ok)"),
        seen_in="vLLM #19330, FastDeploy v1",
        world="tiers",
    ),
    bug(
        "a prefetch loads blocks that were not found",
        PREFETCH,
        ("self._prefetch.load(leading(ok))", "self._prefetch.load(len(ok))"),
        seen_in="FastDeploy file store",
        world="tiers",
    ),
    bug(
        "a prefetch looks up cached blocks too",
        PREFETCH,
        (
            "storage_keys.namespace.block_keys(tokens[have * block_size :], namespace, parent)",
            "storage_keys.namespace.block_keys(tokens, namespace)",
        ),
        world="tiers",
    ),
    bug(
        "a prefetch looks up nothing",
        PREFETCH,
        ("if storage_keys is None or have == whole:", "if True:"),
        seen_in="FastDeploy PR 7107",
        world="tiers",
    ),
    bug(
        "a cancelled prefetch goes on",
        TIERS,
        ("        self.state.operations.cancel(prefetch.op_id)\n", "        pass\n"),
        seen_in="SGLang #9874, SGLang #30053",
        world="tiers",
    ),
    bug(
        "a fetch from before a reset enters the tree",
        PREFETCH,
        ("        self._ids = ids\n", "        self._ids, self._e = ids, state.cache.epoch\n"),
        (
            "        self._state.host.pool.recycle(self._ids)\n",
            "        if self._e != self._state.cache.epoch:\n"
            "            path = self._namespace, self._tokens\n"
            "            self._state.tree.attach(*path, self._ids, self._keys)\n"
            "            return\n"
            "        self._state.host.pool.recycle(self._ids)\n",
        ),
        seen_in="FastDeploy PR 6202",
        world="tiers",
    ),
    bug(
        "the blocks of a failed fetch are never free",
        PREFETCH,
        ("        self._state.host.pool.recycle(self._ids)\n", "        pass\n"),
        seen_in="SGLang #9874",
        world="tiers",
    ),
    bug(
        "the blocks of a failed fetch are free while they are written",
        PREFETCH,
        (
            "        self._prefetch.end(good)\n",
            "        self._prefetch.end(good)\n"
            "        state.host.pool.recycle(self._ids)\n"
            "        self._ids = come[:0]\n",
        ),
        world="tiers",
    ),
    bug(
        "a block that was fetched twice is never free",
        PREFETCH,
        ("            state.host.pool.recycle(loaded[: good - attached])\n", ""),
        world="tiers",
    ),
    bug(
        "the answer to a lookup is ignored before its fence",
        PREFETCH,
        (
            "        self._prefetch.load(leading(ok))\n",
            "        self._num_found = leading(ok)\n",
        ),
        (
            '        """See CompletionHandler. A lookup has no blocks."""\n',
            "        self._prefetch.load(self._num_found)\n",
        ),
        seen_in="FastDeploy storage",
        world="tiers",
    ),
    bug(
        "a prefetch never unpins its host blocks",
        PREFETCH,
        ("        self._state.release_hold(self.runs)\n", ""),
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
        "a reset swaps the namespaces to keep and to drop",
        MANAGER,
        ("if name not in keep]", "if name in keep]"),
        world="tiers",
    ),
    bug(
        "a reset ignores the namespaces to keep",
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
        "blocks moved for a request that ends during its load are lost",
        LOADER,
        ("        if is_left and not completion.ended_by_reset:\n", "        if False:\n"),
        world="tiers",
    ),
    bug(
        "blocks that arrive for an ended request are freed, not published",
        LOADER,
        (
            "            loader.publish_loaded(self, self._num_good, self._tail_tokens)\n",
            "            num_good = 0 if self in loader.detached else self._num_good\n"
            "            loader.publish_loaded(self, num_good, self._tail_tokens)\n",
        ),
        world="tiers",
    ),
    bug(
        "blocks moved for an ended request stay pinned",
        LOADER,
        ("            self.state.tree.unpin(detached.node)\n", ""),
        world="tiers",
    ),
)

"""Bugs to plant into the host tier: its LRU lists and copies, offload and promotion."""

from __future__ import annotations

from .plant import bug

HOST, OFFLOADER, TREE = "tiers/host_tier.py", "tiers/offload.py", "tiers/tiered_tree.py"

HOST_BUGS = (
    bug(
        "a copy is valid when it is decided",
        HOST,
        (
            "        run = HostRun(node, ids.tobytes(), in_flight=True)\n",
            "        run = HostRun(node, ids.tobytes())\n"
            "        self.num_cached += run.num_blocks\n",
        ),
        (
            '        assert run.in_flight and run.node is not None, "a run that is not in flight '
            'was written"\n'
            "        run.in_flight = False\n        self.num_cached += run.num_blocks\n",
            "",
        ),
        seen_in="FastDeploy v1",
        world="tiers",
    ),
    bug(
        "a host block that was taken is still in the pool",
        "prefix/block_pool.py",
        (
            "        self.fill(ids)\n        return ids",
            "        self.fill(ids)\n        self.num_free += num_blocks\n        return ids",
        ),
        seen_in="FastDeploy v1",
        world="tiers",
    ),
    bug(
        "a run in flight to the host can be matched",
        HOST,
        ("return not (self.in_flight or self.promoting)", "return not self.promoting"),
        seen_in="FastDeploy v1, TensorRT-LLM #8813",
        world="tiers",
    ),
    bug(
        "a run in flight to the device can be matched",
        HOST,
        ("return not (self.in_flight or self.promoting)", "return not self.in_flight"),
        world="tiers",
    ),
    bug(
        "a split forgets what pins the upper half",
        HOST,
        ("        run.holders = list(self.holders)\n", ""),
        seen_in="SGLang #16946",
        world="tiers",
    ),
    bug(
        "a split puts the upper half behind the lower in its holder",
        HOST,
        ("holder.insert(holder.index(self), run)", "holder.insert(holder.index(self) + 1, run)"),
        world="tiers",
    ),
    bug(
        "a split forgets that a run was stored",
        HOST,
        ("        run.stored = self.stored\n", ""),
        seen_in="vLLM #45704",
        world="tiers",
    ),
    bug(
        "half of a run in flight can be matched after a split",
        HOST,
        ("        run.in_flight, run.promoting = self.in_flight, self.promoting\n", ""),
        seen_in="SGLang #16946",
        world="tiers",
    ),
    bug(
        "the halves of a split are counted twice",
        HOST,
        ("            self.num_idle -= part.num_blocks  # counted already\n", ""),
        seen_in="pymllm #656",
        world="tiers",
    ),
    bug(
        "a drop leaves the run in the list",
        HOST,
        (
            "        if run.is_idle:\n            self._unlink(run)\n        run.node.host = None",
            "        run.node.host = None",
        ),
        seen_in="FastDeploy PR 7885 review",
        world="tiers",
    ),
    bug(
        "a dropped run frees its blocks while something pins it",
        HOST,
        (
            "            self.num_cached -= run.num_blocks\n        if not run.holders:\n",
            "            self.num_cached -= run.num_blocks\n        if True:\n",
        ),
        seen_in="SGLang #26728",
        world="tiers",
    ),
    bug(
        "a run that was dropped while pinned never frees its blocks",
        HOST,
        (
            "                if run.node is None:\n                    self._recycle(run)\n"
            "                else:",
            "                if run.node is not None:",
        ),
        world="tiers",
    ),
    bug(
        "an unpinned run cannot be dropped any more",
        HOST,
        (
            "                    self._link_path(run)\n        holder.clear()",
            "                    pass\n        holder.clear()",
        ),
        seen_in="FastDeploy v1",
        world="tiers",
    ),
    bug(
        "a pinned run stays in the list of runs to drop",
        HOST,
        (
            "            if run.is_idle:\n                self._unlink(run)\n"
            "            run.holders",
            "            run.holders",
        ),
        elsewhere=(
            (
                HOST,
                "                else:",
                "                elif run.warmer is None:",
            ),
        ),
        seen_in="SGLang #26728",
        world="tiers",
    ),
    bug(
        "the run that was used last is dropped first",
        HOST,
        (
            "run = next(self.idle_runs(), None)",
            "run = self._list.colder",
        ),
        world="tiers",
    ),
    bug(
        "the host forgets a use",
        HOST,
        (
            "        if run.is_idle:\n            self._unlink(run)\n            self._link(run)\n",
            "        pass\n",
        ),
        world="tiers",
    ),
    bug(
        "a copy is dropped after its parent",
        HOST,
        (
            "                self.touch(above.host)\n            above = above.parent",
            "                pass\n            above = above.parent",
        ),
        seen_in="FastDeploy v1",
        world="tiers",
    ),
    bug(
        "runs that leave the host keep their blocks there",
        HOST,
        (
            "        self._unlink(run)\n        self._forget(run)\n        run.promoting = True",
            "        self._unlink(run)\n        self.num_cached -= run.num_blocks\n"
            "        run.promoting = True",
        ),
        world="tiers",
    ),
    bug(
        "an eviction copies nothing to the host",
        OFFLOADER,
        (
            "needed + idle - self._host.available)",
            "needed + idle)",
        ),
        world="tiers",
    ),
    bug(
        "an eviction fails when the host is full",
        OFFLOADER,
        (
            "        victims = self._drop_coldest(victims, needed + idle - self._host.available)\n",
            "        assert needed + idle <= self._host.available, 'the host is full'\n",
        ),
        seen_in="FastDeploy v1, LMCache #2942",
        world="tiers",
    ),
    bug(
        "an eviction drops the warmest when the host is full",
        OFFLOADER,
        (
            "        for node in nodes:\n            stays",
            "        for node in reversed(nodes):\n            stays",
        ),
        world="tiers",
    ),
    bug(
        "an eviction with write-through copies all the same",
        OFFLOADER,
        (
            '        if self._config.write == "through":\n            self._drop_coldest',
            "        if False:\n            self._drop_coldest",
        ),
        world="tiers",
    ),
    bug(
        "redundant copies are dropped last",
        "tiers/state.py",
        ('redundant_first=config.write != "through"', "redundant_first=False"),
        world="tiers",
    ),
    bug(
        "a copy is dropped first although its block has left the device",
        OFFLOADER,
        (
            "        copies = self._host.hold([n.host for n in victims if n.host is not None and "
            "_is_idle(n)])\n",
            "        copies = self._host.hold([])\n",
        ),
        world="tiers",
    ),
    bug(
        "a copy is not dropped first although its block is on the device",
        "tiers/api.py",
        ("        self.state.host.relink(adopted.host)\n", ""),
        world="tiers",
    ),
    bug(
        "the copies of evicted blocks do not count as room that is taken",
        OFFLOADER,
        ("needed + idle - self._host.available", "needed - self._host.available"),
        world="tiers",
    ),
    bug(
        "making room drops one block too many",
        OFFLOADER,
        (
            "                else:\n                    tree.split(node, run.num_blocks - short)\n",
            "",
        ),
        world="tiers",
    ),
    bug(
        "making room drops the device's block with the copy",
        OFFLOADER,
        (
            "            if not node.device_blocks:\n                tree.remove(node)\n",
            '            if True:\n                node.device_blocks = b""\n'
            "                tree.remove(node)\n",
        ),
        seen_in="FastDeploy hierarchical mode",
        world="tiers",
    ),
    bug(
        "write-through copies at the first hit, whatever the threshold",
        OFFLOADER,
        (
            "self.tree.hits[node] < self._config.hits or node.num_blocks > room",
            "node.num_blocks > room",
        ),
        world="tiers",
    ),
    bug(
        "published blocks are not written through",
        OFFLOADER,
        (
            "            self.tree.published[node] = None\n\n    def record_hit",
            "            pass\n\n    def record_hit",
        ),
        world="tiers",
    ),
    bug(
        "with write-back, what is published is copied to the host at once",
        OFFLOADER,
        (
            'if self._config.write == "through" and self._config.hits == 0:',
            'if self._config.write != "exclusive" and self._config.hits == 0:',
        ),
        world="tiers",
    ),
    bug(
        "hits are not counted",
        OFFLOADER,
        ("                hits[place] += 1\n", "                pass\n"),
        world="tiers",
    ),
    bug(
        "a split forgets the hits of its upper half",
        TREE,
        ("            self.hits[upper] = self.hits[lower]\n", "            pass\n"),
        world="tiers",
    ),
    bug(
        "the rest of a path is not written through after an eviction",
        OFFLOADER,
        ("                self.tree.published[node.parent] = None\n", "                pass\n"),
        world="tiers",
    ),
)

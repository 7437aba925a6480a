"""Bugs to plant into operations: late, repeated, failed, cancelled and unfenced results."""

from __future__ import annotations

from .plant import bug

OPERATIONS, LOADER = "tiers/operations.py", "tiers/load.py"
COMPLETIONS = "tiers/completion_handlers.py"

OPERATION_BUGS = (
    bug(
        "a completion that comes twice is applied twice",
        OPERATIONS,
        (
            "        if op_id not in self._open or op_id in self._queued:\n"
            "            self.late_completions += 1\n"
            "            if fenced:\n"
            "                self._end_quarantine(op_id)\n            return False\n"
            "        operation, _ = self._open[op_id]\n",
            "        if op_id not in self._open or op_id in self._queued:\n"
            "            self.late_completions += 1\n"
            "            done = self.__dict__.setdefault('done', {})\n"
            "            if op_id in done:\n                done[op_id].on_result(ok)\n"
            "            if fenced:\n"
            "                self._end_quarantine(op_id)\n            return False\n"
            "        operation, handler = self._open[op_id]\n"
            "        self.__dict__.setdefault('done', {})[op_id] = handler\n",
        ),
        seen_in="vLLM #46014, FastDeploy PR 5338",
        world="tiers",
    ),
    bug(
        "a late completion is taken for the first",
        OPERATIONS,
        (
            "                self._end_quarantine(op_id)\n            return False\n",
            "                self._end_quarantine(op_id)\n            return True\n",
        ),
        world="tiers",
    ),
    bug(
        "the late completion of a cancelled operation does not end its quarantine",
        OPERATIONS,
        ("            if fenced:\n                self._end_quarantine(op_id)\n", ""),
        seen_in="SGLang #9874, SGLang #30053",
        world="tiers",
    ),
    bug(
        "blocks of a cancelled operation are freed before its fence",
        OPERATIONS,
        ("fenced=not dispatched)", "fenced=True)"),
        seen_in="SGLang #24527, vLLM #45357",
        world="tiers",
    ),
    bug(
        "blocks of an operation are freed with its result, not with its fence",
        OPERATIONS,
        (
            "        if fenced:\n            handler.on_fence()\n",
            "        if True:\n            handler.on_fence()\n",
        ),
        seen_in="FastDeploy PR 7965",
        world="tiers",
    ),
    bug(
        "a fence is applied twice",
        OPERATIONS,
        ("handler = self._quarantined.pop(op_id, None)", "handler = self._quarantined.get(op_id)"),
        world="tiers",
    ),
    bug(
        "an operation that was cancelled before it was taken is handed out",
        OPERATIONS,
        (
            "        dispatched = self._queued.pop(op_id, None) is None\n",
            "        dispatched = op_id not in self._queued\n",
        ),
        world="tiers",
    ),
    bug(
        "the driver does not learn which operations were cancelled",
        OPERATIONS,
        ("            self._cancelled.append(op_id)\n", "            pass\n"),
        world="tiers",
    ),
    bug(
        "cancelled operations are reported to the driver again and again",
        OPERATIONS,
        ("cancelled, self._cancelled = self._cancelled, []", "cancelled = list(self._cancelled)"),
        world="tiers",
    ),
    bug(
        "operations are handed out twice",
        OPERATIONS,
        ("        self._queued.clear()\n", "        pass\n"),
        world="tiers",
    ),
    bug(
        "a result of another length is taken for some of the blocks",
        OPERATIONS,
        ("if len(ok) != operation.num_blocks:", "if len(ok) > operation.num_blocks:"),
        world="tiers",
    ),
    bug(
        "a result is counted by its good blocks, not by those before the first bad one",
        COMPLETIONS,
        ("            return place\n", "            return sum(ok)\n"),
        seen_in="FastDeploy file store, SGLang #27108",
        world="tiers",
    ),
    bug(
        "a failed write-back counts as done",
        COMPLETIONS,
        ("leading(ok[place:after]))", "run.num_blocks)"),
        seen_in="SGLang #27108",
        world="tiers",
    ),
    bug(
        "both runs of a copy get the result of the first",
        COMPLETIONS,
        (
            "            arrived += complete_run(state, run, leading(ok[place:after]))\n"
            "            place = after\n",
            "            arrived += complete_run(state, run, leading(ok[place:after]))\n",
        ),
        seen_in="SGLang #16946",
        world="tiers",
    ),
    bug(
        "destination blocks are freed with the result, not with the fence",
        COMPLETIONS,
        (
            "        store_runs(state, [run for run in arrived if run.node is not None])\n",
            "        store_runs(state, [run for run in arrived if run.node is not None])\n"
            "        self._state.release_hold(self.runs)\n",
        ),
        world="tiers",
    ),
    bug(
        "blocks copied to the host are not stored",
        COMPLETIONS,
        ("        store_runs(state, [run for run in arrived if run.node is not None])\n", ""),
        seen_in="FastDeploy PR 7107",
        world="tiers",
    ),
    bug(
        "the host source of a store is unpinned when the store is decided",
        COMPLETIONS,
        (
            '"""Hold valid runs."""\n        self._state = state\n'
            "        self.runs = state.host.hold(runs)\n",
            '"""Hold valid runs."""\n        self._state = state\n'
            "        self.runs = state.host.hold(runs)\n"
            "        state.host.release_hold(self.runs)\n",
        ),
        seen_in="vLLM #52360, FastDeploy PR 7107 review",
        world="tiers",
    ),
    bug(
        "the host source of a store is unpinned with its result, not with its fence",
        COMPLETIONS,
        (
            "        self._state.stored_blocks += num_stored\n",
            "        self._state.stored_blocks += num_stored\n"
            "        self._state.release_hold(self.runs)\n",
        ),
        world="tiers",
    ),
    bug(
        "the source of a store is never unpinned",
        COMPLETIONS,
        (
            "        self._state.release_hold(self.runs)\n        self._state.release_saved()\n",
            "        self._state.release_saved()\n",
        ),
        seen_in="Mooncake #849, LMCache #1898",
        world="tiers",
    ),
    bug(
        "a store that failed in part counts as stored",
        COMPLETIONS,
        ("all(ok[place:after])", "any(ok[place:after])"),
        world="tiers",
    ),
    bug(
        "a promotion is published with its result, before its fence",
        LOADER,
        (
            "            self._num_good -= 1\n"
            "            self._tail_tokens = self.plan.tail_tokens\n",
            "            self._num_good -= 1\n"
            "            self._tail_tokens = self.plan.tail_tokens\n"
            "        if self.lease is not None:\n"
            "            self._loader.publish_loaded(self, self._num_good, self._tail_tokens)\n"
            "            self.lease = None\n",
        ),
        seen_in="TensorRT-LLM #8813",
        world="tiers",
    ),
    bug(
        "a promotion is published when it is decided",
        LOADER,
        (
            "        self.loading[lease.loading] = completion\n",
            "        self.loading[lease.loading] = completion\n"
            "        whole = len(plan.tokens) // self.state.tree.block_bytes\n"
            "        self.publish_loaded(completion, whole, plan.tail_tokens)\n"
            "        completion.lease = None\n",
        ),
        seen_in="FastDeploy v1",
        world="tiers",
    ),
    bug(
        "a tail is restored after a load that came in part",
        LOADER,
        ("if self.plan.tail_tokens and self._num_good == len(ok):", "if self.plan.tail_tokens:"),
        elsewhere=(
            (
                LOADER,
                "            self._num_good -= 1\n",
                "            self._num_good -= self._num_good == len(ok)\n",
            ),
        ),
        world="tiers",
    ),
    bug(
        "a tail that has come is restored although a block before it has not",
        LOADER,
        (
            "if self.plan.tail_tokens and self._num_good == len(ok):",
            "if self.plan.tail_tokens and ok[-1]:",
        ),
        elsewhere=(
            (
                LOADER,
                "            self._num_good -= 1\n",
                "            self._num_good -= self._num_good == len(ok)\n",
            ),
        ),
        world="tiers",
    ),
    bug(
        "all blocks of a load count as arrived",
        LOADER,
        ("        self._num_good = leading(ok)\n", "        self._num_good = len(ok)\n"),
        seen_in="FastDeploy v1",
        world="tiers",
    ),
    bug(
        "a load leaves out the first block that it is to write",
        LOADER,
        ("ids = lease.block_table[first : first", "ids = lease.block_table[first + 1 : first"),
        world="tiers",
    ),
    bug(
        "a promotion keeps the host copies that it read",
        LOADER,
        (
            "        state.release_hold(self.runs)\n        state.host.pool",
            "        state.host.pool",
        ),
        seen_in="FastDeploy PR 7107",
        world="tiers",
    ),
    bug(
        "a failed load leaves its host copies marked as moving to the device",
        LOADER,
        ("                state.tree.remove(run.node)\n", "                pass\n"),
        seen_in="FastDeploy PR 7107",
        world="tiers",
    ),
    bug(
        "a tail that was loaded keeps its host block",
        LOADER,
        ("        state.host.pool.recycle(np.array(self.owned_host_blocks(), np.int32))\n", ""),
        world="tiers",
    ),
    bug(
        "the blocks of a request that ends during its load are never freed",
        LOADER,
        ("            state.device_pool.recycle(self.quarantined)\n", "            pass\n"),
        seen_in="FastDeploy PR 7965, SGLang #9874",
        world="tiers",
    ),
    bug(
        "the blocks of a request that ends during its load are freed at once",
        "manager.py",
        (
            "            self.tiers.loader.detach(lease)\n",
            "            self.tiers.loader.detach(lease)\n"
            "            ids = self.tables.row(row)[lease.num_shared_blocks :]\n"
            "            self._pool.recycle(ids.copy())\n",
        ),
        seen_in="SGLang #35049, vLLM #45357",
        world="tiers",
    ),
    bug(
        "a load goes on when its request has ended",
        LOADER,
        ("            self.state.operations.cancel(lease.loading)\n", ""),
        world="tiers",
    ),
)

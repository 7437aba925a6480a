"""Bugs to plant into the scheduler: steps and admission."""

from __future__ import annotations

from .plant import bug

BATCH, LEASES, POLICY = "batching/batch.py", "batching/leases.py", "policy.py"
PREEMPTION, QUEUES, REQUEST = "batching/preemption.py", "batching/queues.py", "request.py"

STEP_BUGS = (
    bug(
        "a prefill chunk may take the whole budget",
        BATCH,
        ("start, self.token_budget - plan.num_tokens)", "start, self.token_budget)"),
        seen_in="TensorRT-LLM #12665",
    ),
    bug(
        "a step decodes more requests than it may",
        BATCH,
        (
            "return num_taken == self.max_running or",
            "return num_taken > self.max_running or",
        ),
        unclaimed=("bounds_running", "reserves"),
    ),
    bug(
        "one more than max_running may run",
        BATCH,
        (
            "return num_taken == self.max_running or",
            "return num_taken > self.max_running or",
        ),
        seen_in="FastDeploy PR 5805",
    ),
    bug(
        "a request that was just admitted is planned twice",
        BATCH,
        (
            """        if plan.num_decode < len(self.queues.running):
            for request in self.queues.running:
                if request.num_scheduled < request.num_prefill_tokens:
                    self._plan_prefill(plan, request)
        if not (plan.preempted or self.is_paused):
            self._admit(plan)
""",
            """        if not (plan.preempted or self.is_paused):
            self._admit(plan)
        for request in self.queues.running:
            if request.num_scheduled < request.num_prefill_tokens:
                self._plan_prefill(plan, request)
""",
        ),
        seen_in="FastDeploy: requests moved to the front while they are scanned",
    ),
    bug(
        "the last to decode is not grown",
        PREEMPTION,
        ("self._manager.extend_batch(rows)", "self._manager.extend_batch(rows[:-1])"),
    ),
    bug(
        "a request at the end of a block gets no new one",
        PREEMPTION,
        (
            "self._manager.extend_batch(rows)",
            "used = self._manager.tables.num_tokens[rows] % self._manager.block_size\n"
            "                self._manager.extend_batch(rows[used > 0])",
        ),
        (
            "self._manager.tables.num_tokens[rows] - 1",
            "np.array([request.num_scheduled for request in decoding], np.int32)",
        ),
        seen_in="FastDeploy v1: allocate returns nothing and the request runs",
    ),
    bug(
        "a decoding request gets its blocks a token too early",
        BATCH,
        (
            "lease = request.lease = self._leases.reserve(request, match)",
            "lease = request.lease = self.manager.admit(match); "
            "self.manager.available and self.manager.extend(lease, 1)",
        ),
    ),
    bug(
        "a chunk is never longer than three",
        BATCH,
        (
            "length = min(request.num_tokens - start, self.token_budget",
            "length = min(3, request.num_tokens - start, self.token_budget",
        ),
    ),
    bug(
        "a whole hit leaves nothing to compute",
        BATCH,
        (
            "hit_tokens = min(lease.num_ready_tokens + num_copied, request.num_tokens - 1)",
            "hit_tokens = lease.num_ready_tokens + num_copied",
        ),
        seen_in="vLLM test_full_cache_hit, FastDeploy PR 3292",
    ),
    bug(
        "a resumed request goes on where it was",
        BATCH,
        (
            "request.num_computed = request.num_scheduled = hit_tokens",
            "was = min(request.num_computed, request.num_tokens - 1)\n"
            "        request.num_computed = request.num_scheduled = max(hit_tokens, was)",
        ),
        elsewhere=((PREEMPTION, "victim.num_computed = victim.num_scheduled = 0", "pass"),),
        seen_in="vLLM #18631",
    ),
    bug(
        "the token after half a prompt is used",
        BATCH,
        ("is_whole = request.num_computed == request.num_tokens", "is_whole = True"),
        seen_in="FastDeploy PR 3292",
    ),
    bug(
        "a half computed prompt counts as computed",
        BATCH,
        (
            "request.num_computed = start + length",
            "request.num_computed = start + max(length, 2)",
        ),
        seen_in="FastDeploy PR 3292: the worker and the scheduler disagree",
    ),
    bug(
        "more is published than was computed",
        LEASES,
        ("request.tokens[: request.num_computed])", "request.tokens)"),
        seen_in="FastDeploy 7364",
    ),
    bug(
        "what a request generates is not published",
        LEASES,
        (
            "if self._prefix_cache:",
            "if self._prefix_cache and request.num_computed <= request.num_prompt_tokens:",
        ),
        unclaimed=("policy", "reserves", "leaders"),
        seen_in="FastDeploy 7364",
    ),
    bug(
        "a prompt is published when it is complete",
        LEASES,
        (
            "if self._prefix_cache:",
            "if self._prefix_cache and not request.is_prefilling:",
        ),
        unclaimed=("policy", "reserves", "leaders"),
        seen_in="FastDeploy 7364: P publishes nothing",
    ),
    bug(
        "a request is matched in no namespace",
        BATCH,
        (
            "request.tokens, request.namespace, max_hit_tokens",
            "request.tokens, max_hit_tokens",
        ),
    ),
)

ADMISSION_BUGS = (
    bug(
        "priorities are upside down",
        POLICY,
        (
            "return (request.priority, request.arrival)",
            "return (-request.priority, request.arrival)",
        ),
    ),
    bug(
        "a request that does not fit is overtaken",
        BATCH,
        (
            "match.num_blocks, available):\n                    return",
            "match.num_blocks, available):\n                    place += 1\n"
            "                    continue",
        ),
        seen_in="SGLang, which guards against it: small requests starve a large one",
    ),
    bug(
        "small requests pass a large one for ever",
        BATCH,
        (
            "match.num_blocks, available):\n                    return",
            "match.num_blocks, available):\n                    place += 1\n"
            "                    continue",
        ),
        unclaimed=("policy", "reserves"),
        seen_in="SGLang guards against it: the longest prefix goes first",
    ),
    bug(
        "the last to come is tried first",
        QUEUES,
        (
            "insort(self.waiting, request, key=self.policy.order)",
            "self.waiting.insert(0, request)",
        ),
    ),
    bug(
        "new ones starve those that came before",
        QUEUES,
        (
            "insort(self.waiting, request, key=self.policy.order)",
            "self.waiting.insert(0, request)",
        ),
        unclaimed=("policy", "reserves", "leaders"),
    ),
    bug(
        "new ones start beside preempted ones",
        BATCH,
        (
            "match.num_blocks, available):\n                    return",
            "match.num_blocks, available):\n                    break",
        ),
        (
            "            if queue:\n                return",
            "            if False:\n                return",
        ),
        seen_in="SGLang, which guards against it: small requests starve a parked one",
    ),
    bug(
        "new ones are tried before preempted ones",
        BATCH,
        (
            "for queue in (queues.preempted, queues.waiting):",
            "for queue in (queues.waiting, queues.preempted):",
        ),
        seen_in="SGLang, which guards against it: small requests starve a parked one",
    ),
    bug(
        "a victim is admitted again in the same step",
        BATCH,
        ("        if not (plan.preempted or self.is_paused):\n", "        if True:\n"),
        seen_in="vLLM #25538",
    ),
    bug(
        "followers of a request of the same step do not wait",
        BATCH,
        ("                in_progress |= {self._next_block(request)} - {None}\n", ""),
        seen_in="SGLang: a batch of equal prompts is computed twice",
    ),
    bug(
        "hits are counted again when resumed",
        BATCH,
        (
            "self._stats.resumed_hit_tokens += hit_tokens",
            "self._stats.hit_tokens += hit_tokens",
        ),
        seen_in="FastDeploy PR 6620",
    ),
    bug(
        "a request of the whole pool is refused at the door",
        BATCH,
        ("if needed > num_blocks:", "if needed >= num_blocks:"),
    ),
    bug(
        "a request that can never fit is taken",
        BATCH,
        ("if needed > num_blocks:", "if False:"),
        seen_in="vLLM #39734, FastDeploy PR 5544",
    ),
    bug(
        "the last token is thought to need a block",
        REQUEST,
        (
            "self.max_kv_tokens = len(prompt) + self.max_new_tokens - 1",
            "self.max_kv_tokens = len(prompt) + self.max_new_tokens",
        ),
        ("self.num_tokens > self.max_kv_tokens else", "self.num_tokens >= self.max_kv_tokens else"),
    ),
)

"""Bugs to plant into a scheduler that runs ahead of the device, with several steps in flight."""

from __future__ import annotations

from .plant import bug

BATCH, PREEMPTION = "batching/batch.py", "batching/preemption.py"

AHEAD_BUGS = (
    bug(
        "the first of two steps in flight gives up the blocks",
        BATCH,
        (
            "        if not request.is_in_flight:\n            self._leases.release(request)\n\n"
            "    def is_next(",
            "        self._leases.release(request)\n\n    def is_next(",
        ),
        seen_in="vllm-ascend #14055",
    ),
    bug(
        "a request is preempted while a step in flight computes it",
        PREEMPTION,
        ("                if is_ahead:\n                    raise\n", ""),
        seen_in="vLLM PR 45357",
    ),
    bug(
        "duplicates are recycled while a step in flight reads them",
        BATCH,
        ("            self.manager.begin_step()\n", ""),
        ("        self.manager.end_step()\n", ""),
    ),
    bug(
        "a step ahead computes the last token again",
        PREEMPTION,
        (
            "self._manager.tables.num_tokens[rows] - 1",
            "np.array([request.num_computed for request in decoding], np.int32)",
        ),
    ),
    bug(
        "a step ahead goes past the limit of a request",
        PREEMPTION,
        (
            "request.num_prefill_tokens <= request.num_scheduled < request.max_kv_tokens",
            "request.num_prefill_tokens <= request.num_scheduled",
        ),
    ),
    bug(
        "a token after a stop token is kept",
        BATCH,
        (
            "        if not request.is_in_flight:\n            self._leases.release(request)\n\n"
            "    def is_next(",
            '        if request.finish_reason == "stop":\n'
            "            request.append(0)\n"
            "        if not request.is_in_flight:\n            self._leases.release(request)\n\n"
            "    def is_next(",
        ),
    ),
    bug(
        "blocks are published when their step is planned",
        BATCH,
        (
            "            plan.add_prefill(Chunk(request, start, length))\n",
            "            plan.add_prefill(Chunk(request, start, length))\n"
            "            if self.prefix_cache and self.depth > 1:\n"
            "                self.manager.publish(\n"
            "                    lease_of(request), request.tokens[: start + length]\n"
            "                )\n",
        ),
        seen_in="vLLM PR 45357",
    ),
    bug(
        "steps are updated in any order",
        BATCH,
        (
            "return bool(self.in_flight) and plan is self.in_flight[0]",
            "return any(plan is each for each in self.in_flight)",
        ),
    ),
    bug(
        "a scheduler does not run ahead",
        BATCH,
        (
            "        plan = StepPlan()\n",
            "        plan = StepPlan()\n        if self.in_flight:\n            return plan\n",
        ),
    ),
)

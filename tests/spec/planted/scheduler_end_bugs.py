"""Bugs to plant into the scheduler: preemption, ends, reservation and counts."""

from __future__ import annotations

from .plant import bug

BATCH, LEASES, PREEMPTION = "batching/batch.py", "batching/leases.py", "batching/preemption.py"
REQUEST, RESERVATION = "request.py", "reservation.py"

PREEMPTION_BUGS = (
    bug(
        "the first is the victim",
        PREEMPTION,
        ("victim = max(running,", "victim = min(running,"),
    ),
    bug(
        "a prefilling request is preempted for a waiting one",
        BATCH,
        (
            "        if not self._plan_decode(plan):\n",
            "        running = self.queues.running\n"
            "        again = self.queues.preempted and all(r.is_prefilling for r in running)\n"
            "        while again and running and not (self.prefix_cache or self.in_flight):\n"
            "            self.preemption.preempt(plan)\n"
            "        if not self._plan_decode(plan):\n",
        ),
        ("        if not (plan.preempted or self.is_paused):\n", "        if True:\n"),
        elsewhere=(
            (PREEMPTION, '        assert len(running) > 1, f"{victim!r} does not fit alone"\n', ""),
        ),
        unclaimed=(
            "policy",
            "reserves",
            "resumed_first",
            "running_first",
            "exact",
            "never_preempts",
            "preempts_when_short",
        ),
        seen_in="vLLM #25538",
    ),
    bug(
        "the victim is the request that was admitted last",
        PREEMPTION,
        ("victim = max(running, key=self._queues.policy.order)", "victim = running[-1]"),
        seen_in="vLLM: priorities and preemption",
    ),
    bug(
        "preempts as soon as the pool is low",
        PREEMPTION,
        (
            "            try:\n                self._manager.extend_batch(rows)",
            "            try:\n"
            "                low = self._manager.available < len(rows) and len(rows) > 1\n"
            "                if low and not (is_ahead or plan.preempted):\n"
            "                    raise OutOfBlocksError(0, 0)\n"
            "                self._manager.extend_batch(rows)",
        ),
        seen_in="FastDeploy PR 8022",
    ),
    bug(
        "a victim loses what it generated",
        PREEMPTION,
        (
            "        victim.num_computed = victim.num_scheduled = 0\n",
            "        victim.num_computed = victim.num_scheduled = 0\n"
            "        victim.num_tokens = victim.num_prompt_tokens\n"
            "        victim.output_tokens.clear()\n",
        ),
        seen_in="FastDeploy PR 3071",
    ),
    bug(
        "a victim's blocks are forgotten",
        PREEMPTION,
        (
            "        self._leases.release(victim)\n",
            "        keep = len(self._queues.running) > 2\n        if not keep:\n"
            "            self._leases.release(victim)\n        victim.lease = None\n",
        ),
    ),
    bug(
        "a victim's lease is released twice",
        LEASES,
        (
            "            self._manager.release(request.lease)\n            request.lease = None",
            "            self._manager.release(request.lease)",
        ),
        seen_in="FastDeploy PR 3293",
    ),
)

END_BUGS = (
    bug(
        "an ended request stays among those that run",
        BATCH,
        (
            "        self.queues.remove(request)\n",
            "        self.queues.remove(request)\n"
            "        if reason != 'abort':\n            self.queues.running.append(request)\n",
        ),
    ),
    bug(
        "an abort in a step never gives the blocks back",
        BATCH,
        (
            "self._release_ended(request)\n                continue\n            if stop %",
            "continue\n            if stop %",
        ),
        (
            "self._release_ended(request)\n                continue\n            if request.num_c",
            "continue\n            if request.num_c",
        ),
        seen_in="SGLang #9817",
    ),
    bug(
        "an abort takes the blocks of a running step",
        BATCH,
        (
            "        self._release_ended(request)\n\n",
            "        self._leases.release(request)\n\n",
        ),
        seen_in="vllm-ascend #14055, vLLM #52360",
    ),
    bug(
        "a preempted request cannot be aborted",
        BATCH,
        (
            "        if request is None:\n            return False",
            "        if request is None or request.status is RequestStatus.PREEMPTED:\n"
            "            return False",
        ),
        seen_in="FastDeploy: abort covers only who decodes",
    ),
    bug(
        "a request that ends by a stop token leaks its blocks",
        BATCH,
        (
            "        self._release_ended(request)\n\n",
            "        if reason == 'stop':\n            request.lease = None\n"
            "        else:\n            self._release_ended(request)\n\n",
        ),
    ),
    bug(
        "an aborted request leaks its blocks, unseen",
        BATCH,
        (
            "        self._release_ended(request)\n\n",
            "        if reason == 'abort':\n            request.lease = None\n"
            "        else:\n            self._release_ended(request)\n\n",
        ),
        unclaimed=("exact",),
        seen_in="llm-d #1138",
    ),
    bug(
        "stop tokens are not looked at",
        REQUEST,
        ("if token in self.stop_token_ids:", "if False:"),
    ),
    bug(
        "one token more than the limit",
        REQUEST,
        (
            "self.num_tokens > self.max_kv_tokens else None",
            "self.num_tokens > self.max_kv_tokens + 1 else None",
        ),
    ),
    bug(
        "the plan of a step is not asked for",
        BATCH,
        ("        if not self.is_next(plan):", "        if False:"),
        seen_in="vLLM #45497: stale messages",
    ),
    bug(
        "a request may be added twice",
        BATCH,
        ("if request.status is not RequestStatus.WAITING or request.output_tokens:", "if False:"),
    ),
)

RESERVATION_BUGS = (
    bug(
        "an admitted request reserves nothing for itself",
        RESERVATION,
        ("growth = self._growth + self._growth_of(request, held)", "growth = self._growth"),
        seen_in="FastDeploy 7107: no blocks are kept for running decodes",
    ),
    bug(
        "nobody's growth is reserved",
        RESERVATION,
        ("return left >= growth and", "return left >= 0 and"),
        unclaimed=("reserves",),
        seen_in="FastDeploy 7107",
    ),
    bug(
        "no request is guaranteed to finish",
        RESERVATION,
        (" and left >= neediest - (self._private + private)", ""),
        seen_in="vLLM #45388",
    ),
    bug(
        "shared blocks count as given back",
        RESERVATION,
        ("self._private += private", "self._private += held"),
        seen_in="sglang over-admission: evictable that the same batch locked",
    ),
    bug(
        "one block is kept for nobody",
        RESERVATION,
        ("return left >= growth and", "return left - (self._private > 0) >= growth and"),
        seen_in="FastDeploy PR 8022: over-reservation",
    ),
    bug(
        "the room of a request stays reserved when it has left",
        "batching/queues.py",
        ("        self.num_departures += queue is self.running\n", ""),
    ),
    bug(
        "the last block is never promised",
        RESERVATION,
        ("return left >= growth and", "return left > growth and"),
        ("return left >= self._lack_of", "return left > self._lack_of"),
        elsewhere=(
            (
                BATCH,
                "assert plan.num_chunks or not self.queues or self._is_waiting(), (",
                "assert True, (",
            ),
        ),
    ),
)

COUNT_BUGS = (
    bug(
        "tokens computed again are counted as new",
        BATCH,
        ("self._stats.recomputed_tokens += max(lost, 0)", "self._stats.recomputed_tokens += 0"),
    ),
    bug(
        "empty steps are counted",
        BATCH,
        (
            "        if plan.num_chunks:\n",
            "        self._stats.steps += not plan.num_chunks\n        if plan.num_chunks:\n",
        ),
    ),
)

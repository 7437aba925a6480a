"""Bugs to plant into the scheduler where it meets the tiers: parking, prefetch, copies, reset."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from .plant import Bug, bug
from .sample_bugs import TIERED_SAMPLE_BUGS

BATCH, LEASES = "batching/batch.py", "batching/leases.py"
PREEMPTION, TRANSFERS = "batching/preemption.py", "batching/transfers.py"
DECODE, DECODE_SIDE = "decode.py", "handoff/decode_side.py"

_BUGS = (
    bug(
        "storage keys survive new weights",
        TRANSFERS,
        (
            "            self.tiers.storage = replace(",
            "            self.tiers.state.tree.keys.namespace = replace(",
        ),
    ),
    bug(
        "storage is not told of new weights",
        TRANSFERS,
        (
            "        if self.tiers.storage is not None:\n            self.tiers.storage = replace(",
            "        if False:\n            self.tiers.storage = replace(",
        ),
    ),
    bug(
        "a reset forgets the parked requests",
        BATCH,
        (
            "for request in (*running, *queues.preempted, *queues.waiting):",
            "for request in (*running, *queues.waiting):",
        ),
    ),
    bug(
        "a reset keeps the prefetches of waiting requests",
        BATCH,
        (
            "for request in (*running, *queues.preempted, *queues.waiting):",
            "for request in (*running, *queues.preempted):",
        ),
    ),
    bug(
        "an aborted request counts as ahead in the prefetches",
        TRANSFERS,
        (
            "        self.drop_prefetch(request)\n        request.prefetch_is_put_off = False",
            "        request.prefetch = request.fetches_after = None\n"
            "        request.prefetch_is_put_off = False",
        ),
    ),
    bug(
        "a decode step waits for blocks while any copy is in flight",
        PREEMPTION,
        (
            "return needed <= self._manager.num_blocks - held",
            "return self._transfers is not None and self._transfers.is_busy",
        ),
    ),
    bug(
        "a decode step preempts though copies will free its blocks",
        PREEMPTION,
        ("return needed <= self._manager.num_blocks - held", "return False"),
    ),
    bug(
        "a loaded request begins when no copy is in flight",
        BATCH,
        ("        if self._may_load:\n", "        if self._may_load and not self._is_waiting():\n"),
    ),
    bug(
        "a request begins before it is loaded",
        LEASES,
        ("return lease_of(request).loading is None", "return True"),
    ),
    bug(
        "what was loaded from the host is computed again",
        BATCH,
        (
            "hit_tokens = min(lease.num_ready_tokens + num_copied, request.num_tokens - 1)",
            "on_device = lease.num_hit_blocks * self.manager.block_size\n"
            "        hit_tokens = min(on_device, request.num_tokens - 1)",
        ),
    ),
    bug(
        "an aborted request stays parked",
        TRANSFERS,
        (
            "            self.tiers.unpark(request.parked)\n            request.parked = None",
            "            request.parked = None",
        ),
    ),
    bug(
        "a request resumes before its KV is saved",
        TRANSFERS,
        (
            "saving = request.parked is not None and not request.parked.saved",
            "saving = False",
        ),
    ),
    bug(
        "a request waits for every prefetch",
        TRANSFERS,
        (
            "fetching = request.prefetch is not None and not request.prefetch.done",
            "fetching = any(not each.done for each in self._fetching.values())",
        ),
    ),
    bug(
        "hits on the host are counted as hits on the device",
        BATCH,
        (
            "self._stats.hit_tokens += request.num_hit_tokens",
            "self._stats.hit_tokens += hit_tokens",
        ),
    ),
    bug(
        "a request is prefetched only when it is first",
        BATCH,
        (
            "        self.queues.add(request)\n        if self._transfers is not None:\n",
            "        self.queues.add(request)\n"
            "        if self._transfers is not None and len(self.queues.waiting) == 1:\n",
        ),
    ),
)

_DECODE_BUGS = (
    bug(
        "a decode node grants blocks while a preempted request waits",
        DECODE,
        ("if queues.preempted:", "if False:"),
    ),
    bug(
        "a decode node grants blocks before they are loaded",
        DECODE_SIDE,
        ("        if lease.loading is None:\n", "        if True:\n"),
    ),
    bug(
        "a decode node never grants what it had to load",
        DECODE_SIDE,
        (
            "if attempt.state is DecodeState.LOADING and attempt.lease.loading is None:",
            "if False:",
        ),
    ),
    bug(
        "the parked tail of a request counts as loaded though its copy has failed",
        BATCH,
        (
            "hit_tokens = min(lease.num_ready_tokens + num_copied, request.num_tokens - 1)",
            "ready = lease.num_ready_tokens if not lease.num_promoted_blocks else max(\n"
            "            lease.num_ready_tokens, request.num_lost_tokens)\n"
            "        hit_tokens = min(ready, request.num_tokens - 1)",
        ),
    ),
    bug(
        "a decode node publishes nothing that it receives",
        DECODE_SIDE,
        ("        self._manager.publish(attempt.lease, attempt.tokens)\n", ""),
    ),
    bug(
        "a decode node asks for blocks that it has",
        DECODE_SIDE,
        (
            "num_cached = attempt.lease.num_shared_blocks * block_size",
            "num_cached = attempt.lease.num_hit_blocks // 2 * block_size",
        ),
    ),
)
"""Bugs of a decode node over tiers; its prompts arrive from prefill nodes."""

TIERED_SCHEDULER_BUGS: Final[tuple[Bug, ...]] = tuple(
    replace(bug, world="tiered_scheduler") for bug in (*_BUGS, *_DECODE_BUGS, *TIERED_SAMPLE_BUGS)
)

"""Bugs of the prefill and decode schedulers, as substitutions in their source."""

from __future__ import annotations

from typing import Final

from .bugs import D, P, bug
from .decode_bugs import DECODE_BUGS
from .deferred_bugs import DEFERRED_BUGS

PREFILL: Final = "prefill.py"

PREFILL_BUGS: Final = [
    bug(
        "P computes before D has granted",
        PREFILL,
        (
            "return self._side.may_compute(key) and lease_of(request)",
            "return lease_of(request)",
        ),
    ),
    bug(
        "calls during a step of P take effect at once",
        PREFILL,
        (
            "        if self._batch.in_flight:\n            self._deferred",
            "        if False:\n            self._deferred",
        ),
    ),
    bug(
        "calls during a step of P are lost",
        PREFILL,
        ("        for call in deferred:\n", "        for call in deferred[:0]:\n"),
    ),
    bug(
        "P releases the lease of a hand-off itself",
        PREFILL,
        (
            "        request.lease = None\n",
            "        if request.lease is not None:\n"
            "            self._side._manager.release(request.lease)\n"
            "        request.lease = None\n",
        ),
    ),
    bug(
        "P does not report the sampled token",
        PREFILL,
        (
            "            self._side.sampled("
            "prompt.key, request.output_tokens[0], Hits.of(request), record)",
            "            pass",
        ),
    ),
    bug(
        "P commits before the token has its log probabilities",
        PREFILL,
        ("        append_logprobs()\n", ""),
        ("        deferred, self._d", "        append_logprobs()\n        deferred, self._d"),
    ),
    bug(
        "P records no log probabilities",
        PREFILL,
        ("            logprobs=request.logprobs,\n", ""),
    ),
    bug(
        "P counts host hits as device hits",
        PREFILL,
        (
            "Hits.of(request), record",
            "Hits(request.num_hit_tokens + request.num_host_hit_tokens, 0, "
            "request.num_storage_hit_tokens), record",
        ),
    ),
    bug(
        "P forgets host hits",
        PREFILL,
        (
            "Hits.of(request), record",
            "Hits(request.num_hit_tokens, 0, request.num_storage_hit_tokens), record",
        ),
    ),
    bug(
        "P admits prompts while it drains",
        PREFILL,
        ("        self._batch.is_paused = True\n", ""),
    ),
    bug(
        "P resets the cache while D reads it",
        PREFILL,
        ("        if self._side.num_open:\n", "        if False:\n"),
    ),
    bug(
        "an older attempt stays queued beside a newer one on P",
        PREFILL,
        ("            if open_key >= key:", "            if False:"),
    ),
    bug(
        "a waiting attempt cannot be given up",
        PREFILL,
        (
            "            self._drop(key)\n"
            "            self._actions.append(PrefillFailed(key, reason))",
            "            pass",
        ),
    ),
    bug(
        "P needs room for what D will generate",
        PREFILL,
        (
            "            request.prompt,\n            1,\n",
            "            request.prompt,\n            request.max_new_tokens,\n",
        ),
    ),
    bug(
        "an attempt that D refuses counts as admitted",
        "batching/batch.py",
        ("            self._stats.admitted += 1\n", ""),
        (
            "        lease = request.lease = self._leases.reserve(request, match)\n",
            "        lease = request.lease = self._leases.reserve(request, match)\n"
            "        self._stats.admitted += request.status is RequestStatus.WAITING\n",
        ),
    ),
    bug(
        "groups of layers may be skipped",
        PREFILL,
        (
            "if not self._batch.is_next(plan) or group != self._num_written:",
            "if not self._batch.is_next(plan):",
        ),
    ),
]

ORDER_BUGS: Final = [
    bug(
        "P offers before D has granted",
        P,
        (
            "        if attempt.state is PrefillState.COMPUTING:\n            self._offer",
            "        if True:\n            self._offer",
        ),
    ),
    bug(
        "P asks before computing in either order",
        P,
        ('        if self.order == "early":', "        if True:"),
    ),
    bug(
        "a computed prompt is given up when it is refused",
        P,
        ("        if is_busy and attempt.sampled is not None:", "        if False:"),
    ),
    bug(
        "a computed prompt is never committed",
        P,
        (
            "        if attempt.sampled is not None:\n            self._commit",
            "        if False:\n            self._commit",
        ),
    ),
    bug(
        "P aborts at D an attempt that D does not know",
        P,
        ("            if attempt.state is not PrefillState.PREPARING:", "            if True:"),
    ),
    bug(
        "P accepts messages of any D",
        P,
        ("if attempt is None or attempt.peer != peer or", "if attempt is None or"),
    ),
    bug(
        "D accepts messages of any P",
        D,
        ("            attempt.peer == peer and header.grant in", "            header.grant in"),
    ),
    bug(
        "the same attempt of another P gets the grant",
        D,
        ("if peer != attempt.peer or header.epoch != ", "if header.epoch != "),
    ),
    bug(
        "a temporary refusal is final",
        P,
        ("is_final=not is_busy, is_busy=is_busy)", "is_final=True)"),
    ),
    bug(
        "refusals count as failures",
        "gateway/retries.py",
        ("            request.num_failed -= is_busy\n", ""),
    ),
]

SCHEDULER_BUGS: Final = [*PREFILL_BUGS, *DECODE_BUGS, *ORDER_BUGS, *DEFERRED_BUGS]

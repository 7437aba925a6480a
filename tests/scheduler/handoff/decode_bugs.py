"""Bugs of the decode scheduler, as substitutions in its source."""

from __future__ import annotations

from typing import Final

from .bugs import ATTEMPTS, BATCH, DECODE, D, bug

RESERVATION: Final = "reservation.py"
FAIRNESS: Final = "fairness.py"

DECODE_BUGS: Final = [
    bug(
        "D grants while a preempted request waits",
        DECODE,
        ("num_before = len(queues.preempted) or self", "num_before = self"),
    ),
    bug(
        "requests being received take no slot",
        DECODE,
        (
            "num_taken = len(queues.running) + len(receiving)",
            "num_taken = len(queues.running)",
        ),
    ),
    bug(
        "nothing is reserved for requests being received",
        DECODE,
        ("receiving=lambda: side.receiving,", "receiving=lambda: (),"),
        seen_in="FastDeploy PR 7107, vLLM #45388",
    ),
    bug(
        "D reserves nothing",
        DECODE,
        ("        if needed > available:\n", "        if False:\n"),
    ),
    bug(
        "D grants what could never finish",
        D,
        ("if needed > self._manager.num_blocks:", "if False:"),
    ),
    bug(
        "the handed-over token has no slot",
        RESERVATION,
        (
            "self._growth + self._growth_of(request, held, num_more=1)",
            "self._growth + self._growth_of(request, held)",
        ),
    ),
    bug(
        "the guard counts on blocks of the new request",
        RESERVATION,
        (
            "    neediest = blocks(request.max_kv_tokens) - blocks(request.num_tokens) - freed\n",
            "    freed += blocks(request.num_tokens)\n"
            "    neediest = blocks(request.max_kv_tokens) - blocks(request.num_tokens) - freed\n",
        ),
    ),
    bug(
        "requests being received keep a preempted one waiting",
        RESERVATION,
        ("        if not self._num_running:", "        if False:"),
        seen_in="own",
    ),
    bug(
        "the guard is left out",
        RESERVATION,
        ("match.num_blocks + max(neediest, 0)", "match.num_blocks"),
    ),
    bug(
        "the guard ignores requests being received",
        RESERVATION,
        ("    for each in receiving:\n", "    for each in receiving[:0]:\n"),
    ),
    bug(
        "the guard counts on blocks whose pulls may still write",
        RESERVATION,
        ("for each in (*receiving, *quarantined)]", "for each in receiving]"),
    ),
    bug(
        "the guard counts on no published block",
        RESERVATION,
        (
            "freed = held - count_held(fixed, match)",
            "freed = sum(r.lease.num_blocks - r.lease.num_shared_blocks for r in running)",
        ),
        (
            "lack - (held - count_held([*fixed, lease], match))",
            "lack - freed",
        ),
    ),
    bug(
        "a stop ends a newer attempt",
        DECODE,
        ("if request is None or self._keys[request] != key:", "if request is None:"),
    ),
    bug(
        "a stop is ignored",
        DECODE,
        (
            "        self._batch.abort(key.request_id)\n        if request.lease is None:",
            "        if request.lease is None:",
        ),
    ),
    bug(
        "the end of an attempt is not reported to the side",
        DECODE,
        ("        self._side.finished(key)\n", ""),
    ),
    bug(
        "a preempted request counts as ended",
        DECODE,
        (
            "        for chunk in plan.chunks:\n",
            "        for request in plan.preempted:\n"
            "            self._report_end(request)\n"
            "        for chunk in plan.chunks:\n",
        ),
    ),
    bug(
        "stop tokens are lost on the way",
        ATTEMPTS,
        ("            tuple(sorted(request.stop_token_ids)),\n", "            (),\n"),
    ),
    bug(
        "stop tokens are ignored after the hand-off",
        DECODE,
        ("        request.stop_token_ids = frozenset(commit.stop_token_ids)\n", ""),
    ),
    bug(
        "D ignores the sampling parameters",
        DECODE,
        ("        request.sampling = commit.sampling\n", ""),
    ),
    bug(
        "a start is reported twice",
        DECODE,
        (
            "        self._actions.append(Started(start.key, request, start.num_cached_tokens))\n",
            "        told = Started(start.key, request, start.num_cached_tokens)\n"
            "        self._actions += [told, told]\n",
        ),
    ),
    bug(
        "the first token is never the last",
        DECODE,
        ("        if reason is not None:\n", "        if False:\n"),
    ),
    bug(
        "D computes the last token of the prompt again",
        BATCH,
        (
            "request.num_prefill_tokens = request.num_computed = request.num_prompt_tokens",
            "request.num_prefill_tokens = request.num_prompt_tokens\n"
            "        request.num_computed = request.num_prompt_tokens - 1",
        ),
    ),
    bug(
        "D counts hits again",
        BATCH,
        ("        request.has_begun = True  # the prefill node counted its hits\n", ""),
    ),
    bug(
        "D grants while it drains",
        DECODE,
        ("        if self._is_draining:\n", "        if False:\n"),
    ),
    bug(
        "D resets the cache while pulls write",
        DECODE,
        ("        if self.num_receiving:\n", "        if False:\n"),
    ),
    bug(
        "a large request starves",
        FAIRNESS,
        ("count += refused.num_overtaken >= self._max_overtaken", "count += 0"),
    ),
    bug(
        "a request that has gone still blocks others",
        FAIRNESS,
        ("            del self._refused[each]\n", "            pass\n"),
    ),
    bug(
        "an admitted request stays among the refused ones",
        FAIRNESS,
        ("        self._refused.pop(request_id, None)\n", ""),
    ),
]

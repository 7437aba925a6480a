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
        ("        if queues.preempted:\n", "        if False:\n"),
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
        ("        if max(growth, guard) > available:\n", "        if False:\n"),
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
        "the end of a request is reported by the first of two steps in flight",
        DECODE,
        (
            "if request.finish_reason is not None and request.lease is None:",
            "if request.finish_reason is not None and request in self._keys:",
        ),
    ),
    bug(
        "each step in flight reports the end of a request",
        DECODE,
        ("        key = self._keys.pop(request)\n", "        key = self._keys[request]\n"),
        (
            "if request.finish_reason is not None and request.lease is None:",
            "if request.finish_reason is not None:",
        ),
    ),
    bug(
        "a stopped request gives up blocks that steps in flight use",
        DECODE,
        (
            "        if request.lease is None:  # otherwise steps in flight use its blocks\n"
            "            self._report_end(request)\n",
            "        if request.lease is None:\n"
            "            self._report_end(request)\n"
            "        else:\n"
            "            self.manager.release(request.lease)\n"
            "            request.lease = None\n",
        ),
        (
            "if request.finish_reason is not None and request.lease is None:",
            "if request.finish_reason is not None and not any(\n"
            "                request is each.request\n"
            "                for later in self._batch.in_flight\n"
            "                for each in later.chunks\n"
            "            ):",
        ),
    ),
    bug(
        "a preempted request counts as ended",
        DECODE,
        (
            "        for request in plan.requests:\n",
            "        for request in plan.preempted:\n"
            "            self._report_end(request)\n"
            "        for request in plan.requests:\n",
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
        "the log probabilities of the first token are lost on the way",
        ATTEMPTS,
        ("            record,\n        )", '            b"",\n        )'),
    ),
    bug(
        "D records log probabilities of the first token alone",
        DECODE,
        ("            request.logprobs = len(record.top)\n", ""),
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
            "request.num_computed = request.num_scheduled = request.num_prompt_tokens",
            "request.num_computed = request.num_scheduled = request.num_prompt_tokens - 1",
        ),
    ),
    bug(
        "D counts hits again",
        BATCH,
        ("        request.has_begun = True  # its hits are counted\n", ""),
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
        ("            if now - refused", "            if False and now - refused"),
    ),
    bug(
        "a request that has gone still blocks others",
        FAIRNESS,
        ("if now - refused.asked_at < refused.patience_s:", "if True:"),
    ),
    bug(
        "D waits for each refused request equally long",
        FAIRNESS,
        ("        known.patience_s = max(known.patience_s, 2 * (now - known.asked_at))\n", ""),
    ),
    bug(
        "a refused request that asks late loses its place",
        FAIRNESS,
        (
            "        known.asked_at = now\n",
            "        if now - known.asked_at >= self._patience_s:\n"
            "            known.num_overtaken = -self._num_new\n"
            "        known.asked_at = now\n",
        ),
    ),
    bug(
        "running requests grow into the room that is set aside",
        DECODE,
        (
            "full = Reservation(queues.running, manager.block_size, None, receiving)",
            "full = self._batch.reservation()",
        ),
    ),
    bug(
        "no slot is set aside",
        DECODE,
        (" or num_taken + len(set_aside) >= self.max_running:", ":"),
    ),
    bug(
        "only slots are set aside",
        DECODE,
        ("max(growth, guard) + sum(set_aside) <= available", "max(growth, guard) <= available"),
    ),
    bug(
        "D remembers any number of refused requests",
        FAIRNESS,
        ("        if len(self._refused) > MAX_REMEMBERED:\n", "        if False:\n"),
    ),
    bug(
        "an admitted request stays among the refused ones",
        FAIRNESS,
        ("        del self._refused[request_id]\n", ""),
    ),
]

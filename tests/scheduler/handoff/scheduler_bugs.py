"""Bugs that the schedulers of both roles could have, as substitutions in their source."""

from __future__ import annotations

from typing import Final

from .bugs import ATTEMPTS, LIVE_P, D, P, bug

PREFILL: Final = "prefill.py"
DECODE: Final = "decode.py"
RESERVATION: Final = "reservation.py"
LINE: Final = "line.py"

PREFILL_BUGS: Final = [
    bug(
        "P computes before D has granted",
        PREFILL,
        (
            "return self._side.may_compute(_as_prompt(request).key) and super()",
            "return super()",
        ),
    ),
    bug(
        "what P is told within a step counts at once",
        PREFILL,
        (
            "        if self._in_flight is not None:\n            self._told",
            "        if False:\n            self._told",
        ),
    ),
    bug(
        "what P is told within a step is forgotten",
        PREFILL,
        ("        for call in told:\n", "        for call in told[:0]:\n"),
    ),
    bug(
        "P gives the lease of a hand-off back itself",
        PREFILL,
        ("        request.lease = None  # it is the side's", "        super()._release(request)"),
    ),
    bug(
        "P does not say what it has sampled",
        PREFILL,
        (
            "            self._side.sampled(prompt.key, request.output_tokens[0], hits)",
            "            pass",
        ),
    ),
    bug(
        "P counts hits of the host as its device's",
        PREFILL,
        (
            "Hits(device, request.num_host_hit_tokens, ",
            "Hits(device + request.num_host_hit_tokens, 0, ",
        ),
    ),
    bug(
        "P forgets hits of the host",
        PREFILL,
        ("Hits(device, request.num_host_hit_tokens, ", "Hits(device, 0, "),
    ),
    bug(
        "P begins hand-offs while it drains",
        PREFILL,
        ("        if not self._is_draining:\n", "        if True:\n"),
    ),
    bug(
        "P resets the cache while D reads it",
        PREFILL,
        ("        if self._side.num_open:\n", "        if False:\n"),
    ),
    bug(
        "an older attempt goes on waiting beside a newer one on P",
        PREFILL,
        ("            if open_key >= key:", "            if False:"),
    ),
    bug(
        "one who waits cannot be given up",
        PREFILL,
        (
            "            self._drop(key)\n            self._actions.append(Failed(key, reason))",
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
        "batch_scheduler.py",
        ("            self._stats.admitted += 1\n", ""),
        (
            "        lease = request.lease = self._take_blocks(request, match)\n",
            "        lease = request.lease = self._take_blocks(request, match)\n"
            "        self._stats.admitted += request.status is RequestStatus.WAITING\n",
        ),
    ),
    bug(
        "groups of layers may be left out",
        PREFILL,
        (
            "if plan is not self._in_flight or group != self._num_written:",
            "if plan is not self._in_flight:",
        ),
    ),
]

DECODE_BUGS: Final = [
    bug(
        "D lets others in while one waits to be resumed",
        DECODE,
        ("num_before = len(self._parked) or self", "num_before = self"),
    ),
    bug(
        "what is received takes no slot",
        DECODE,
        (
            "num_taken = len(self._running) + len(receiving)",
            "num_taken = len(self._running)",
        ),
    ),
    bug(
        "nothing is kept for what is received",
        DECODE,
        (
            "    def _receiving(self) -> list[Request]:\n        return self._side.receiving",
            "    def _receiving(self) -> list[Request]:\n        return []",
        ),
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
        "the guard counts on what the new one holds",
        RESERVATION,
        (
            "    neediest = blocks(request.max_kv_tokens) - blocks(request.num_tokens) - freed\n",
            "    freed += blocks(request.num_tokens)\n"
            "    neediest = blocks(request.max_kv_tokens) - blocks(request.num_tokens) - freed\n",
        ),
    ),
    bug(
        "the guard is left out",
        RESERVATION,
        ("match.num_blocks + max(neediest, 0)", "match.num_blocks"),
    ),
    bug(
        "the guard forgets who is received",
        RESERVATION,
        ("    for each in receiving:\n", "    for each in receiving[:0]:\n"),
    ),
    bug(
        "the guard counts on blocks whose pulls may still write",
        RESERVATION,
        ("for each in (*receiving, *fenced_off)]", "for each in receiving]"),
    ),
    bug(
        "the guard counts on no block that is published",
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
        ("if request is not None and self._keys[request] == key:", "if request is not None:"),
    ),
    bug(
        "a stop is not heeded",
        DECODE,
        ("                        super().abort(key[0])\n", ""),
    ),
    bug(
        "the side is not told that an attempt has ended",
        DECODE,
        ("        self._side.finished(key)\n", ""),
    ),
    bug(
        "a preempted request counts as ended",
        DECODE,
        ("        if request.finish_reason is None:\n", "        if False:\n"),
    ),
    bug(
        "stop tokens are lost on the way",
        ATTEMPTS,
        ("            tuple(sorted(request.stop_token_ids)),\n", "            (),\n"),
    ),
    bug(
        "stop tokens are not heeded after the hand-off",
        DECODE,
        ("        request.stop_token_ids = frozenset(commit.stop_token_ids)\n", ""),
    ),
    bug(
        "D samples in its own way",
        DECODE,
        ("        request.sampling = commit.sampling\n", ""),
    ),
    bug(
        "a start is told twice",
        DECODE,
        (
            "        self._actions.append(Started(start.key, request, start.num_own_tokens))\n",
            "        told = Started(start.key, request, start.num_own_tokens)\n"
            "        self._actions += [told, told]\n",
        ),
    ),
    bug(
        "the first token is never the last",
        DECODE,
        (
            "        if reason is None:\n            self._running",
            "        if True:\n            self._running",
        ),
    ),
    bug(
        "D computes the last token of the prompt again",
        DECODE,
        (
            "request.num_prefill_tokens = request.num_computed = request.num_prompt_tokens",
            "request.num_prefill_tokens = request.num_prompt_tokens\n"
            "        request.num_computed = request.num_prompt_tokens - 1",
        ),
    ),
    bug(
        "D counts hits once more",
        DECODE,
        ("        request.has_begun = True  # its hits were counted by P\n", ""),
    ),
    bug(
        "D takes hand-offs on while it drains",
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
        LINE,
        ("count += place.num_overtaken >= MAX_OVERTAKEN", "count += 0"),
    ),
    bug(
        "who has gone holds others up",
        LINE,
        ("            del self._places[each]\n", "            pass\n"),
    ),
    bug(
        "a line of one's own: whoever was refused goes first",
        LINE,
        ("        self._places.pop(request_id, None)\n", ""),
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
        "P asks first in either order",
        P,
        ('        if self.order == "early":', "        if True:"),
    ),
    bug(
        "a computed prompt that is refused is given up",
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
        "P tells D of an attempt that D knows nothing of",
        LIVE_P,
        ("            if attempt.state is not PrefillState.PREPARING:", "            if True:"),
    ),
    bug(
        "P believes any D",
        P,
        ("if attempt is None or attempt.peer != peer or", "if attempt is None or"),
    ),
    bug(
        "D believes any P",
        D,
        ("            attempt.peer == peer and head.grant in", "            head.grant in"),
    ),
    bug(
        "a twin of another P gets the grant",
        D,
        ("if peer != attempt.peer or head.epoch != ", "if head.epoch != "),
    ),
    bug(
        "a refusal for now is for good",
        P,
        ("is_final=not is_busy, is_busy=is_busy)", "is_final=True)"),
    ),
    bug(
        "refusals count as failures",
        "handoff/front_desk.py",
        ("            request.num_failed -= is_busy\n", ""),
    ),
]

SCHEDULER_BUGS: Final = [*PREFILL_BUGS, *DECODE_BUGS, *ORDER_BUGS]

"""Planted bugs of the hand-off, as substitutions in its source."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

P: Final = "handoff/prefill_side.py"
D: Final = "handoff/decode_side.py"
ATTEMPTS: Final = "handoff/attempts.py"
CUT: Final = "handoff/part_cut.py"
DECODE: Final = "decode.py"
BATCH: Final = "batching/batch.py"
GATEWAY: Final = "gateway/gateway.py"


@dataclass(frozen=True)
class Bug:
    """A planted bug: its name, the file, and pairs of the original and the changed text.

    `seen_in` is where somebody had this bug, or "own".
    """

    name: str
    file: str
    edits: tuple[tuple[str, str], ...]
    seen_in: str = "own"


def bug(name: str, file: str, *edits: tuple[str, str], seen_in: str = "own") -> Bug:
    """Return a bug."""
    return Bug(name, file, edits, seen_in)


BUGS: Final = [
    bug(
        "D releases a grant before its pulls are fenced",
        D,
        (
            "        if attempt.pulls:\n            self._move",
            "        if False:\n            self._move",
        ),
        seen_in="SGLang #35049, vLLM #46283",
    ),
    bug(
        "P releases offered blocks before the fence",
        P,
        (
            "        if attempt.sends:\n            self._move",
            "        if False:\n            self._move",
        ),
        seen_in="SGLang #24527, SGLang #35049",
    ),
    bug(
        "an ACK that is lost leaks P's lease",
        P,
        (
            "if attempt.state in (PrefillState.PREPARING, PrefillState.WITHDRAWN):",
            "if attempt.state not in (PrefillState.ASKING, PrefillState.COMPUTING):",
        ),
    ),
    bug(
        "a repeated ASK is admitted twice",
        D,
        (
            "        if attempt is not None:\n            self._asked_again",
            "        if False:\n            self._asked_again",
        ),
        seen_in="FastDeploy PR 5338",
    ),
    bug(
        "a repeated GRANT is accepted twice",
        P,
        ("case Grant() if asking:", "case Grant():"),
    ),
    bug(
        "COMMIT before the last SEND starts decoding",
        D,
        (
            "if commit is None or attempt.pulls or len(",
            "if commit is None or attempt.pulls or 0 * len(",
        ),
        ("if not attempt.is_complete() or commit", "if commit"),
    ),
    bug(
        "COMMIT before the last pull starts decoding",
        D,
        ("if commit is None or attempt.pulls or len(", "if commit is None or len("),
    ),
    bug(
        "a part that failed counts as arrived",
        D,
        (
            'self._give_up(attempt, f"part {part_id.part} could not be pulled: {reason}")',
            "attempt.pulls.pop(part_id.part, None)\n            self._start_if_complete(attempt)",
        ),
    ),
    bug(
        "a repeated COMMIT starts twice",
        D,
        (
            "            self._post_end(attempt)\n        elif isinstance(message, Abort)",
            "            self._receiving(attempt, message)\n"
            "        elif isinstance(message, Abort)",
        ),
        ("case Commit() if attempt.commit is None:", "case Commit():"),
    ),
    bug(
        "a stale attempt is accepted",
        D,
        ("if any(header.key < each for each in others):", "if False:"),
    ),
    bug(
        "an older attempt goes on beside a newer one",
        D,
        (
            "        for older in known:\n            self._give_up(older, ",
            "        for older in known[:0]:\n            self._give_up(older, ",
        ),
    ),
    bug(
        "a message for an older epoch of D is accepted",
        D,
        ("or header.peer_epoch not in (None, self.epoch)", ""),
    ),
    bug(
        "a newer epoch of D speaks for the older",
        P,
        ("if known.peer_epoch is not None and header.epoch != known.peer_epoch:", "if False:"),
    ),
    bug(
        "D publishes at the grant",
        D,
        (
            "        self._move(attempt, DecodeState.RECEIVING)\n",
            "        self._manager.publish(attempt.lease, attempt.tokens)\n"
            "        self._move(attempt, DecodeState.RECEIVING)\n",
        ),
        seen_in="FastDeploy PR 7364 review, vLLM #43569",
    ),
    bug(
        "D publishes nothing",
        D,
        ("        self._manager.publish(attempt.lease, attempt.tokens)\n", ""),
    ),
    bug(
        "P publishes nothing that it computed",
        P,
        ("            self._manager.publish(lease, tokens)\n", "            pass\n"),
        (
            "            self._manager.publish(attempt.lease, "
            "attempt.tokens[: attempt.num_computed])\n",
            "            pass\n",
        ),
        seen_in="FastDeploy PR 7364",
    ),
    bug(
        "P publishes nothing before its hand-off has ended",
        P,
        ("            self._manager.publish(lease, tokens)\n", "            pass\n"),
    ),
    bug(
        "P keeps each prompt to its request",
        P,
        (
            "self._manager.match(request.prompt, request.namespace)",
            "self._manager.match(request.prompt, request.request_id.encode())",
        ),
    ),
    bug(
        "D keeps each prompt to its request",
        DECODE,
        (
            "match = manager.match(request.prompt, request.namespace)",
            "match = manager.match(request.prompt, request.request_id.encode())",
        ),
    ),
    bug(
        "D asks for blocks that it has",
        D,
        ("num_cached = attempt.lease.num_shared_blocks * block_size", "num_cached = 0"),
    ),
    bug(
        "P computes again what it hits",
        BATCH,
        (
            "hit_tokens = min(lease.num_ready_tokens + num_copied, request.num_tokens - 1)",
            "hit_tokens = 0",
        ),
    ),
    bug(
        "the namespace is lost in ASK",
        ATTEMPTS,
        ("        namespace=ask.namespace,\n", ""),
    ),
    bug(
        "the namespace is lost in RunPrefill",
        "handoff/gateway_messages.py",
        ("            namespace=self.namespace,\n", ""),
    ),
    bug(
        "P counts the hits of refused attempts",
        BATCH,
        (
            "        request.match = None\n"
            "        if request.status is not RequestStatus.WAITING:\n",
            "        request.match = None\n"
            "        if not self._leases.is_ready(request):\n"
            "            self._stats.hit_tokens += lease.num_hit_blocks\n"
            "        if request.status is not RequestStatus.WAITING:\n",
        ),
    ),
    bug(
        "the cache of P counts the hits of refused attempts",
        P,
        ("admit(match, count_hit=False)", "admit(match)"),
        ("        self._manager.count_hit(attempt.lease)\n", ""),
    ),
    bug(
        "the cache of P counts no hits",
        P,
        ("        self._manager.count_hit(attempt.lease)\n", ""),
    ),
    bug(
        "the answer has no hits",
        GATEWAY,
        ("            request.num_hit_tokens = hits.device\n", ""),
    ),
    bug(
        "P publishes at admission: a refused prompt stays matchable",
        P,
        (
            "        ask = make_ask(",
            "        self._manager.publish(lease, request.prompt)\n        ask = make_ask(",
        ),
    ),
    bug(
        "P publishes a chunk when its first group of layers is written",
        P,
        (
            "        if attempt.group == 0:\n            attempt.num_computed = num_tokens\n",
            "        if group == 0:\n            attempt.num_computed = num_tokens\n",
        ),
    ),
    bug(
        "P recycles offered blocks that another request has published",
        P,
        (
            "if self._num_groups == 1 or not attempt.sends or match.num_tokens <= published:",
            "if True:",
        ),
    ),
    bug(
        "ABORT counts as a fence",
        P,
        ("if message.fenced and attempt.state", "if attempt.state"),
    ),
    bug(
        "D says that its pulls are fenced while they write",
        D,
        (
            "self._post(attempt, self._abort(attempt, fenced=False))",
            "self._post(attempt, self._abort(attempt, fenced=True))",
        ),
    ),
    bug(
        "a failed pull counts as fenced",
        D,
        (
            "self._ended_pull(part_id) if fenced else self._pulling(part_id)",
            "self._ended_pull(part_id)",
        ),
    ),
    bug(
        "a failed pull counts as arrived",
        D,
        (
            'self._give_up(attempt, f"part {part_id.part} could not be pulled: {reason}")',
            "self._start_if_complete(attempt)",
        ),
    ),
    bug(
        "D never gives up a silent P",
        D,
        ("elif now - attempt.heard_at >= timing.silence_s:", "elif False:"),
        seen_in="FastDeploy PR 7965",
    ),
    bug(
        "P never stops asking",
        P,
        (
            "if attempt.state is not PrefillState.COMPUTING and (is_silent",
            "if False and (is_silent",
        ),
        seen_in="FastDeploy: P asks every 50 ms for ever",
    ),
    bug(
        "a pull never times out",
        D,
        ("if any(now - each >= timing.transfer_s for each in started):", "if False:"),
    ),
    bug(
        "ASK is not repeated",
        P,
        ("                    self._post(attempt, attempt.ask)", "                    pass"),
    ),
    bug(
        "COMMIT is not repeated",
        P,
        (
            "self._post(attempt, attempt.commit or Renew(attempt.header))",
            "self._post(attempt, Renew(attempt.header))",
        ),
    ),
    bug(
        "P sends parts that it does not offer",
        P,
        ("            self._actions.append(offer)\n", ""),
    ),
    bug(
        "a lost part is not sent again",
        P,
        ("self._post(attempt, attempt.sends[part])", "pass"),
    ),
    bug(
        "D does not name missing parts",
        ATTEMPTS,
        ("return tuple(islice(missing, MAX_MISSING))", "return ()"),
    ),
    bug(
        "a partial last block is not sent",
        CUT,
        ("        if stop == self.num_tokens:\n", "        if False:\n"),
    ),
    bug(
        "a part ends within a block of D",
        CUT,
        ("stop // self._common * self._common //", "stop //"),
        ("is_end = stop == self.num_blocks or self._is_common(stop)", "is_end = True"),
        ("is_start = first == self.first_block or self._is_common(first)", "is_start = True"),
    ),
    bug(
        "D writes the tokens that it has into its next blocks",
        CUT,
        ("            start - first * self.sent_block_size,\n", "            0,\n"),
    ),
    bug(
        "D writes a part from the first block on that the part touches",
        CUT,
        (
            "start = max(first * self.sent_block_size, self.num_cached_tokens)",
            "start = first * self.sent_block_size",
        ),
    ),
    bug(
        "a part may be written into shared blocks",
        CUT,
        ("is_start = first == self.first_block or", "is_start ="),
        ("return self.first_block <= first < stop", "return 0 <= first < stop"),
    ),
    bug(
        "D starts an incomplete prompt",
        D,
        ("if not attempt.is_complete() or commit", "if commit"),
    ),
    bug(
        "D decodes from a token outside the vocabulary",
        D,
        ("self._vocab_size is None or 0 <= token < self._vocab_size", "True"),
    ),
    bug(
        "the seed is lost in COMMIT",
        ATTEMPTS,
        ("            request.sampling,\n", "            type(request.sampling)(),\n"),
    ),
    bug(
        "D leaks the lease of an aborted attempt",
        D,
        ("        self._manager.release(lease)\n", ""),
        seen_in="SGLang #9817, FastDeploy PR 7965",
    ),
    bug(
        "P leaks the lease of an ended attempt",
        P,
        ("        self._manager.release(attempt.lease)\n", ""),
    ),
    bug(
        "a request is answered twice",
        "gateway/retries.py",
        ("request = self._requests.pop(request_id)", "request = self._requests[request_id]"),
    ),
    bug(
        "a request without attempts left is not answered",
        "gateway/retries.py",
        (
            "            self._answer(request_id, None, reason)\n            return",
            "            del self._requests[request_id]\n            return",
        ),
    ),
]

"""Planted bugs of deferred ASKs."""

from __future__ import annotations

from typing import Final

from .bugs import DECODE, D, P, bug

DEFERRED: Final = "handoff/deferred_asks.py"

DEFERRED_BUGS: Final = [
    bug(
        "a block is granted for two prompts at once",
        D,
        ("if has_room and self._is_in_flight(request):", "if False:"),
    ),
    bug(
        "deferred ASKs are not answered",
        D,
        ("        for deferred in self._deferred.all():\n            self._asked(deferred)\n", ""),
    ),
    bug(
        "a repeated ASK loses its place",
        DEFERRED,
        (
            "        self._by_request[deferred.key.request_id] = deferred",
            "        self.remove(deferred.key.request_id)\n"
            "        self._by_request[deferred.key.request_id] = deferred",
        ),
    ),
    bug(
        "an ASK stays deferred after its P has aborted",
        D,
        ("        if isinstance(message, Abort):\n", "        if False:\n"),
    ),
    bug(
        "any node may abort another node's ASK",
        D,
        ("(deferred.peer, deferred.key) == (peer, header.key)", "deferred.key == header.key"),
    ),
    bug(
        "an ASK stays deferred for a silent P",
        D,
        ("if now - deferred.heard_at >= timing.silence_s:", "if False:"),
    ),
    bug(
        "an ASK stays deferred after a cancel",
        D,
        ("        if deferred is not None and deferred.key == key:\n", "        if False:\n"),
    ),
    bug(
        "an older attempt replaces a newer deferred one",
        D,
        (
            "        if deferred is not None:\n            others",
            "        if False:\n            others",
        ),
    ),
    bug(
        "prompts of two namespaces count as the same",
        D,
        (" if each.namespace == request.namespace]", "]"),
    ),
    bug(
        "a prompt waits for one that shares little",
        DEFERRED,
        (" if 2 * num_shared * block_size >= max(len(one), len(other)) else 0", ""),
    ),
    bug(
        "any number of ASKs is deferred",
        DEFERRED,
        ("len(self._by_request) < MAX_DEFERRED", "True"),
    ),
    bug(
        "D grants before storage has answered",
        DECODE,
        ("if may_wait and self._batch.is_fetching(request):", "if False:"),
    ),
    bug(
        "an ASK waits for storage for ever",
        D,
        ("return self._now - asked.fetches_at < self._timing.silence_s", "return True"),
    ),
    bug(
        "D asks storage again at each ASK",
        D,
        ("            asked = deferred\n", "            pass\n"),
    ),
    bug(
        "an ended attempt goes on fetching",
        D,
        ("            self._forget(deferred.request)\n", "            pass\n"),
    ),
    bug(
        "RENEW is sent at each tick to a request that has fetched",
        D,
        ("            asked.is_fetching = False\n", ""),
    ),
    bug(
        "D forgets to count what storage had",
        "batching/batch.py",
        ("            self._transfers.count_hits(request, num_cached)\n", "            pass\n"),
    ),
    bug(
        "the hits of P are those of D",
        DECODE,
        ("        request.num_storage_hit_tokens = commit.hits.storage\n", ""),
    ),
    bug(
        "P aborts a grant because of an earlier RENEW",
        P,
        ("Grant | Renew) and header.grant:", "Grant | Renew):"),
    ),
    bug(
        "a long deferred ASK counts as a failure",
        P,
        ("case Renew() if asking:", "case Renew() if False:"),
    ),
]

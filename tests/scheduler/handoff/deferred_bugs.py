"""Planted bugs of deferred ASKs."""

from __future__ import annotations

from typing import Final

from .bugs import D, P, bug

DEFERRED: Final = "handoff/deferred_asks.py"

DEFERRED_BUGS: Final = [
    bug(
        "a block is granted to two at once",
        D,
        ("if self._is_in_flight(request) and self._deferred.has_room:", "if False:"),
    ),
    bug(
        "who is held is not answered when it may go on",
        D,
        ("        for deferred in self._deferred.all():\n            self._asked(deferred)\n", ""),
    ),
    bug(
        "who asks again loses its place",
        DEFERRED,
        (
            "        self._by_request[deferred.key.request_id] = deferred",
            "        self.remove(deferred.key.request_id)\n"
            "        self._by_request[deferred.key.request_id] = deferred",
        ),
    ),
    bug(
        "an ASK is held after its P has given it up",
        D,
        ("            self._deferred.abort(peer, header.key)\n", "            pass\n"),
    ),
    bug(
        "any node may give up what another asks for",
        DEFERRED,
        ("(deferred.peer, deferred.key) == (peer, key)", "deferred.key == key"),
    ),
    bug(
        "an ASK is held for a P that is silent",
        D,
        ("if now - deferred.heard_at >= timing.silence_s:", "if False:"),
    ),
    bug(
        "an ASK is held though the gateway has given it up",
        D,
        ("        if deferred is not None and deferred.key == key:\n", "        if False:\n"),
    ),
    bug(
        "an older attempt is held in the place of a newer one",
        D,
        (
            "        if deferred is not None:\n            others",
            "        if False:\n            others",
        ),
    ),
    bug(
        "prompts of two namespaces are one",
        D,
        (" if each.namespace == request.namespace]", "]"),
    ),
    bug(
        "one waits for much that is of no use to it",
        DEFERRED,
        (" if 2 * num_shared * block_size >= max(len(one), len(other)) else 0", ""),
    ),
    bug(
        "any number of prompts is held",
        DEFERRED,
        ("return len(self._by_request) < MAX_DEFERRED", "return True"),
    ),
    bug(
        "P ends what was granted for what D said before",
        P,
        ("Grant | Renew) and header.grant:", "Grant | Renew):"),
    ),
    bug(
        "who was held for too long has failed",
        P,
        ("case Renew() if asking:", "case Renew() if False:"),
    ),
]

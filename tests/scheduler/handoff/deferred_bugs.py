"""Bugs that a decode node could have where others wait for what one is sent."""

from __future__ import annotations

from typing import Final

from .bugs import D, P, bug

HELD: Final = "handoff/deferred_asks.py"

DEFERRED_BUGS: Final = [
    bug(
        "a block is granted to two at once",
        D,
        ("if self._is_on_its_way(request) and self._held.has_room:", "if False:"),
    ),
    bug(
        "who is held is not answered when it may go on",
        D,
        ("        for held in self._held.all():\n            self._asked(held)\n", ""),
    ),
    bug(
        "who asks again loses its place",
        HELD,
        (
            "        self._by_request[held.key.request_id] = held",
            "        self.drop(held.key.request_id)\n"
            "        self._by_request[held.key.request_id] = held",
        ),
    ),
    bug(
        "an ASK is held after its P has given it up",
        D,
        ("            self._held.end(peer, header.key)\n", "            pass\n"),
    ),
    bug(
        "any node may give up what another asks for",
        HELD,
        ("(held.peer, held.key) == (peer, key)", "held.key == key"),
    ),
    bug(
        "an ASK is held for a P that is silent",
        D,
        ("if now - held.heard_at >= self._timing.silence_s:", "if False:"),
    ),
    bug(
        "an ASK is held though the gateway has given it up",
        D,
        ("        if held is not None and held.key == key:\n", "        if False:\n"),
    ),
    bug(
        "an older attempt is held in the place of a newer one",
        D,
        (" + ([held.key] if held is not None else [])", ""),
    ),
    bug(
        "prompts of two namespaces are one",
        D,
        (" if each.namespace == request.namespace]", "]"),
    ),
    bug(
        "one waits for much that is of no use to it",
        HELD,
        (" if 2 * num_shared * block_size >= max(len(one), len(other)) else 0", ""),
    ),
    bug(
        "any number of prompts is held",
        HELD,
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

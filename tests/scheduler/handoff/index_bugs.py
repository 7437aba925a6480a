"""Planted bugs of the gateway's index of what nodes have cached."""

from __future__ import annotations

from typing import Final

from .bugs import bug

INDEX: Final = "gateway/cache_index.py"
REMOTE: Final = "gateway/network_gateway.py"
ROUTER: Final = "gateway/router.py"

INDEX_BUGS: Final = [
    bug(
        "the index drops the host tier",
        INDEX,
        ("        host.update(_unpack(update.host_stored))\n", ""),
        seen_in="SGLang issue 38720",
    ),
    bug(
        "blocks that have left the device stay in the index",
        INDEX,
        ("        device.difference_update(_unpack(update.device_removed))\n", ""),
    ),
    bug(
        "a missing update is not seen",
        INDEX,
        ("if update.number > self.next_number and not update.is_first:", "if False:"),
    ),
    bug(
        "an update that comes again counts again",
        INDEX,
        ("        if update.number < self.next_number:\n", "        if False:\n"),
    ),
    bug(
        "the first of all blocks does not clear the index",
        INDEX,
        (
            "        if update.is_first:\n            self.held",
            "        if False:\n            self.held",
        ),
    ),
    bug(
        "a reset is not reported",
        INDEX,
        (
            "                        held.clear()\n                    self._begin_anew()",
            "                        held.clear()",
        ),
        seen_in="llm-d-kv-cache issue 593",
    ),
    bug(
        "a replay begins with what is kept, not with what is missing",
        INDEX,
        ("if kept and kept[0][0] == ask.number:", "if kept:"),
    ),
    bug(
        "a replay is never answered by all blocks",
        INDEX,
        ("        else:\n            self._begin_anew()", "        else:\n            pass"),
    ),
    bug(
        "all blocks are those of the device",
        INDEX,
        (
            "{medium: dict.fromkeys(held, True) for medium, held in self._held.items()}",
            "{'GPU': dict.fromkeys(self._held['GPU'], True), 'CPU': {}}",
        ),
    ),
    bug(
        "a block that has come and gone between two updates stays",
        INDEX,
        (
            "self._changed[medium].update(dict.fromkeys(hashes, False))",
            "[self._changed[medium].setdefault(name, False) for name in hashes]",
        ),
    ),
    bug(
        "what does not fit one update is forgotten",
        INDEX,
        (
            "            for name in part:\n                del changed[name]\n",
            "            changed.clear()\n",
        ),
    ),
    bug(
        "the gateway does not ask for the last updates",
        REMOTE,
        ("self._gateway.next_update(peer) < num_updates", "False"),
    ),
    bug(
        "a node that restarts keeps its index",
        ROUTER,
        (
            "        nodes[node_id] = _Node(CacheManager(*size))",
            "        self.old = getattr(self, 'old', {})\n"
            "        nodes[node_id] = _Node(CacheManager(*size))\n"
            "        index = self.old.setdefault(node_id, CacheIndex())\n"
            "        nodes[node_id].index = index",
        ),
    ),
]

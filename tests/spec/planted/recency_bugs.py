"""Bugs to plant into recency reports to storage."""

from __future__ import annotations

from .plant import Bug, bug

RECENCY, TIERS, LOADER, COMPLETIONS = (
    "tiers/storage_recency.py",
    "tiers/api.py",
    "tiers/load.py",
    "tiers/completion_handlers.py",
)


def _bug(name: str, file: str, old: str, new: str, seen_in: str = "own") -> Bug:
    return bug(name, file, (old, new), seen_in=seen_in, world="tiers")


RECENCY_BUGS = (
    _bug(
        "storage is told nothing",
        RECENCY,
        "        return list(dict.fromkeys(reversed(taken)))[::-1]",
        "        return []",
        seen_in="own, at first",
    ),
    _bug(
        "storage is told of what it is written alone, and not of hits",
        LOADER,
        "        self.state.recency.record_hit(end)\n",
        "        self.state.recency._now += 1\n",
    ),
    _bug(
        "storage is told of the hit on the device alone",
        LOADER,
        "        end = plan.runs[-1].node if plan is not None and plan.runs else lease.node\n",
        "        end = lease.node\n",
    ),
    _bug(
        "storage is told of the end of a path alone",
        RECENCY,
        "                node = parent\n",
        "                break\n",
    ),
    _bug(
        "storage is not told of what was read from it",
        "tiers/prefetch.py",
        "                state.recency.record_use([node])\n",
        "                pass\n",
    ),
    _bug(
        "storage is not told of what was written, which has the order of the writes",
        COMPLETIONS,
        "        self._state.recency.record_store(ends, sum(ok))\n",
        "        self._state.recency.record_store([], sum(ok))\n",
        seen_in="own, at first",
    ),
    _bug(
        "what is written anew counts as told",
        RECENCY,
        "            keys.reported_at.pop(node, None)\n",
        "            pass\n",
    ),
    _bug(
        "storage is told once of a path, and never again",
        RECENCY,
        "now - reported_at >= REPORT_INTERVAL",
        "reported_at < 0",
    ),
    _bug(
        "storage is told of each use again",
        RECENCY,
        "now - reported_at >= REPORT_INTERVAL",
        "True",
    ),
    _bug(
        "storage is told from the beginning of a run to its end",
        RECENCY,
        "range(len(known) - KEY_BYTES, -1, -KEY_BYTES)",
        "range(0, len(known), KEY_BYTES)",
    ),
    _bug(
        "storage is told of what two paths share with the first of them",
        RECENCY,
        "                    due.pop(node, None)  # a node comes after all that follow it\n",
        "",
    ),
    _bug(
        "what was told in the same go stays where it was",
        RECENCY,
        "place == self._num_reports or ",
        "",
    ),
    _bug(
        "of what is told twice in one go, the first counts",
        RECENCY,
        "list(dict.fromkeys(reversed(taken)))[::-1]",
        "list(dict.fromkeys(taken))",
    ),
    _bug(
        "a block is told of twice in one go",
        RECENCY,
        "list(dict.fromkeys(reversed(taken)))[::-1]",
        "taken",
    ),
    _bug(
        "what was told is told again",
        RECENCY,
        "        taken, self._keys = self._keys, []\n",
        "        taken = self._keys\n",
    ),
    _bug(
        "the upper half of a run counts as never told",
        "tiers/storage_key_cache.py",
        "            self.reported_at[upper] = self.reported_at[lower]\n",
        "            pass\n",
    ),
    _bug(
        "what was to be told outlives a reset",
        RECENCY,
        "        self._keys.clear()\n",
        "",
    ),
    _bug(
        "what a reset has lost counts as told",
        RECENCY,
        "            self._tree.keys.reported_at.clear()\n",
        "            pass\n",
    ),
    _bug(
        "what a block follows makes room for it in storage",
        COMPLETIONS,
        "    state.recency.record_use(parents)\n",
        "",
    ),
    _bug(
        "a use keeps its path from eviction",
        RECENCY,
        "        keys.reported_at.update(",
        "        for node in due:\n            node.refs += 1\n        keys.reported_at.update(",
    ),
)

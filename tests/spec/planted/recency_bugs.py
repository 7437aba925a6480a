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
        "no use is reported to storage",
        RECENCY,
        "        return list(dict.fromkeys(reversed(taken)))[::-1]",
        "        return []",
        seen_in="own, at first",
    ),
    _bug(
        "writes are reported to storage, hits are not",
        LOADER,
        "        self.state.recency.record_hit(end)\n",
        "        self.state.recency._now += 1\n",
    ),
    _bug(
        "only device hits are reported to storage",
        LOADER,
        "        end = plan.runs[-1].node if plan is not None and plan.runs else lease.node\n",
        "        end = lease.node\n",
    ),
    _bug(
        "only the last block of a path is reported to storage",
        RECENCY,
        "                node = parent\n",
        "                break\n",
    ),
    _bug(
        "fetched blocks are not reported to storage",
        "tiers/prefetch.py",
        "                state.recency.record_use([node])\n",
        "                pass\n",
    ),
    _bug(
        "stored blocks are not reported to storage, and keep the order of the writes",
        COMPLETIONS,
        "        self._state.recency.record_store(ends, num_stored)\n",
        "        self._state.recency.record_store([], num_stored)\n",
        seen_in="own, at first",
    ),
    _bug(
        "newly stored blocks count as reported",
        RECENCY,
        "            keys.reported_at.pop(node, None)\n",
        "            pass\n",
    ),
    _bug(
        "a path is reported to storage once, and never again",
        RECENCY,
        "now - reported_at >= REPORT_INTERVAL",
        "reported_at < 0",
    ),
    _bug(
        "every use is reported to storage, without an interval",
        RECENCY,
        "now - reported_at >= REPORT_INTERVAL",
        "True",
    ),
    _bug(
        "a report lists a run from its beginning to its end",
        RECENCY,
        "range(len(known) - KEY_BYTES, -1, -KEY_BYTES)",
        "range(0, len(known), KEY_BYTES)",
    ),
    _bug(
        "the common prefix of two paths is reported with the first of them",
        RECENCY,
        "                    due.pop(node, None)  # a node comes after all that follow it\n",
        "",
    ),
    _bug(
        "a block that a report names already keeps its place",
        RECENCY,
        "place == keys.num_reports or ",
        "",
    ),
    _bug(
        "the first place of a block in a report counts, not the last",
        RECENCY,
        "list(dict.fromkeys(reversed(taken)))[::-1]",
        "list(dict.fromkeys(taken))",
    ),
    _bug(
        "a report names a block twice",
        RECENCY,
        "list(dict.fromkeys(reversed(taken)))[::-1]",
        "taken",
    ),
    _bug(
        "a report repeats the previous one",
        RECENCY,
        "        taken, self._keys = self._keys, []\n",
        "        taken = self._keys\n",
    ),
    _bug(
        "the upper half of a split run counts as never reported",
        "tiers/storage_key_cache.py",
        "            self.reported_at[upper] = self.reported_at[lower]\n",
        "            pass\n",
    ),
    _bug(
        "pending reports outlive a reset",
        RECENCY,
        "        self._keys.clear()\n",
        "",
    ),
    _bug(
        "blocks that a reset dropped count as reported",
        RECENCY,
        "            self._tree.keys.reported_at.clear()\n",
        "            pass\n",
    ),
    _bug(
        "storage evicts the parent of a block to make room for it",
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

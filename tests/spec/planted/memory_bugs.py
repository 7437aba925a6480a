"""Bugs to plant that keep what has ended, and so grow without bound."""

from __future__ import annotations

from typing import Final

from .plant import bug

MEMORY_BUGS: Final = (
    bug(
        "ended leases are kept",
        "manager.py",
        (
            "        del self._leases[row]\n        lease.row = -1\n",
            "        del self._leases[row]\n        lease.row = -1\n"
            '        self.__dict__.setdefault("_ended", []).append(lease)\n',
        ),
    ),
    bug(
        "namespaces are remembered",
        "prefix/radix_tree.py",
        (
            '        root = self.roots[namespace] = self._node_type(None, namespace, b"", b"")\n',
            "        root = self.roots[namespace] = self._node_type(None, namespace, b"
            '"", b"")\n'
            '        self.__dict__.setdefault("_names", set()).add(namespace)\n',
        ),
        seen_in="own: a tenant's salt is a namespace",
    ),
)
"""Of the device tier."""

TIER_MEMORY_BUGS: Final = (
    bug(
        "ended operations are kept, with their handlers",
        "tiers/operations.py",
        (
            "        _, handler = self._open.pop(op_id)\n",
            "        operation, handler = self._open.pop(op_id)\n"
            '        self.__dict__.setdefault("_ended", {})[op_id] = operation, handler\n',
        ),
        world="tiers",
    ),
    bug(
        "fenced operations stay in quarantine, as None",
        "tiers/operations.py",
        (
            "        handler = self._quarantined.pop(op_id, None)\n",
            '        fenced = self.__dict__.setdefault("_fenced", set())\n'
            "        handler = self._quarantined.pop(op_id, None)\n"
            "        fenced.add(op_id)\n",
        ),
        world="tiers",
    ),
    bug(
        "ended parked requests are kept",
        "tiers/parking.py",
        (
            "def _end(state: TierState, parked: Parked) -> None:\n    del state.parked[parked]\n",
            "def _end(state: TierState, parked: Parked) -> None:\n    del state.parked[parked]\n"
            '    state.__dict__.setdefault("_ended", []).append(parked)\n',
        ),
        world="tiers",
    ),
    bug(
        "storage keys of prefetches are kept",
        "tiers/prefetch.py",
        (
            "        self._state.release_hold(self.runs)\n\n\nclass _LookupCompletion",
            "        self._state.release_hold(self.runs)\n"
            '        known = self._state.__dict__.setdefault("_asked", set())\n'
            "        known.update(self._keys)\n\n\nclass _LookupCompletion",
        ),
        world="tiers",
    ),
)
"""Of the tiers below it."""

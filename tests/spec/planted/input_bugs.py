"""Bugs to plant that change what a call is given: 7107's in every call that takes tokens or ids."""

from __future__ import annotations

from typing import Final

from .plant import bug

INPUT_BUGS: Final = (
    bug(
        "an admission changes the tokens of its match",
        "manager.py",
        (
            "        self._leases[row] = lease\n        self._admitted += 1\n",
            "        self._leases[row] = lease\n        self._admitted += 1\n"
            "        if match._tokens.flags.writeable:\n            match._tokens[-1:] += 1\n",
        ),
    ),
    bug(
        "an extension changes the tokens of waiting matches",
        "manager.py",
        (
            "        tokens = as_tokens(tokens)\n        if not isinstance(namespace, bytes):\n",
            "        tokens = as_tokens(tokens)\n"
            "        if not isinstance(tokens.base, np.ndarray) and tokens.flags.writeable:\n"
            "            self._last = tokens\n"
            "        if not isinstance(namespace, bytes):\n",
        ),
        (
            'num_tokens = as_count("num_tokens", num_tokens)\n',
            'num_tokens = as_count("num_tokens", num_tokens)\n        self._last[:1] += 1\n',
        ),
    ),
    bug(
        "a batch of rows is sorted in place",
        "manager.py",
        (
            "        tables.num_tokens[rows] = num_tokens\n",
            "        tables.num_tokens[rows] = num_tokens\n"
            "        if rows.flags.writeable:\n            rows[::-1].sort()\n",
        ),
    ),
    bug(
        "the next block is cut out of the caller's list",
        "manager.py",
        (
            "        first = lease.num_shared_blocks * self.block_size\n        block = ",
            "        first = lease.num_shared_blocks * self.block_size\n"
            "        if isinstance(tokens, list):\n"
            "            del tokens[first + self.block_size :]\n        block = ",
        ),
    ),
    bug(
        "recycled ids are sorted in place",
        "prefix/block_pool.py",
        (
            '        ids = as_ids("block id", ids)\n',
            '        ids = as_ids("block id", ids)\n'
            "        if ids.flags.writeable:\n            ids.sort()\n",
        ),
        world="pool",
    ),
)
"""Of the device tier."""


SCHEDULER_INPUT_BUGS: Final = (
    bug(
        "a request overwrites the prompt of its caller",
        "request.py",
        (
            "        self._tokens = np.empty(len(prompt) + self.max_new_tokens, np.int32)\n"
            "        self._tokens[: len(prompt)] = prompt\n",
            "        self._tokens = np.empty(len(prompt) + self.max_new_tokens, np.int32)\n"
            "        self._tokens[: len(prompt)] = prompt\n"
            "        if prompt.flags.writeable:\n            prompt[-1:] += 1\n",
        ),
        seen_in="FastDeploy PR 7107 review",
    ),
    bug(
        "an update takes the tokens out of the list of its caller",
        "batching/batch.py",
        (
            "        tokens = list(map(int, next_tokens))\n",
            "        tokens = list(map(int, next_tokens))\n"
            "        if isinstance(next_tokens, list):\n"
            "            next_tokens.clear()\n",
        ),
    ),
)
"""Of the scheduler."""

TIER_INPUT_BUGS: Final = (
    bug(
        "parking overwrites the tokens of its caller",
        "tiers/parking.py",
        (
            "    path = state.tree.path(lease.node)\n",
            "    if tokens.flags.writeable:\n        tokens[:1] += 1\n"
            "    path = state.tree.path(lease.node)\n",
        ),
        seen_in="FastDeploy PR 7107 review",
        world="tiers",
    ),
    bug(
        "a prefetch overwrites the tokens of its caller",
        "tiers/prefetch.py",
        (
            "    parent = _last_key(state, match)\n",
            "    parent = _last_key(state, match)\n"
            "    if tokens.flags.writeable:\n        tokens[have * block_size :] += 1\n",
        ),
        world="tiers",
    ),
    bug(
        "a fork appends to the list of its caller",
        "tiers/api.py",
        (
            "        tokens = as_tokens(tokens)\n        cache.publish(lease, tokens)\n",
            "        given, tokens = tokens, as_tokens(tokens)\n"
            "        cache.publish(lease, tokens)\n",
        ),
        (
            "        tail_tokens = len(tokens) - other.num_shared_blocks * cache.block_size\n",
            "        tail_tokens = len(tokens) - other.num_shared_blocks * cache.block_size\n"
            "        if isinstance(given, list):\n            given.append(0)\n",
        ),
        world="tiers",
    ),
    bug(
        "a match overwrites what the host lacks",
        "tiers/load.py",
        (
            "        rest = as_bytes(match._tokens)[walk.num_bytes :]\n",
            "        rest = as_bytes(match._tokens)[walk.num_bytes :]\n"
            "        if match._tokens.flags.writeable:\n            match._tokens[-1:] += 1\n",
        ),
        world="tiers",
    ),
    bug(
        "a completion clears the results of its caller",
        "tiers/completion_handlers.py",
        (
            "        ends = [run.node for run in self.runs if run.node is not None]\n",
            "        ends = [run.node for run in self.runs if run.node is not None]\n"
            "        ok.clear()\n",
        ),
        world="tiers",
    ),
    bug(
        "a reset empties the list of the namespaces to keep",
        "manager.py",
        (
            "        self.epoch = Epoch(self.epoch + 1)\n        self.tables",
            "        if isinstance(keep, list):\n            keep.clear()\n"
            "        self.epoch = Epoch(self.epoch + 1)\n        self.tables",
        ),
        world="tiers",
    ),
)
"""Of the tiers below it."""

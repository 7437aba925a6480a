"""Prefetch: what storage has of a request's tokens is brought to the host before it is admitted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from .effects import leading
from .host_tier import HostRun
from .operations import Effect, OpId, OpKind
from .tokens import Tokens, as_tokens

if TYPE_CHECKING:
    from .tiers import Tiers


class Prefetch:
    """A request's question to storage, and then its answer on the way to the host.

    ::

        LOOKUP ── none there ─────────────────────────► done
           └───── n leading keys ──► STORAGE_TO_HOST ──► done: the good ones are in the tree

    Attributes:
        done: it has ended, and the request can be matched.
        first_block: the place of the first block that was asked for.
        num_blocks: how many blocks came to the host, from that one on.
    """

    def __init__(self, tiers: Tiers, tokens: bytes, namespace: bytes, keys: list[bytes]) -> None:
        self.done = False
        self.first_block = len(tokens) // tiers.tree.block_bytes - len(keys)
        self.num_blocks = 0
        self.wanted = True
        self.op_id: OpId
        self.runs: list[HostRun] = []  # held: the blocks on the host that they follow
        self._tiers = tiers
        self._epoch = tiers.manager.epoch
        self._tokens = tokens
        self._namespace = namespace
        self._keys = keys

    def load(self, num_blocks: int) -> None:
        """Load the first num_blocks that were asked for, as far as the host has room."""
        tiers = self._tiers
        wanted = self.wanted and self._epoch == tiers.manager.epoch
        num_blocks = min(num_blocks, tiers.host.available) if wanted else 0
        if num_blocks == 0:
            self.end(0)
            return
        missing_bytes = (len(self._keys) - num_blocks) * tiers.tree.block_bytes
        tokens = self._tokens[: len(self._tokens) - missing_bytes]
        ids, _ = tiers.writer.land({}, num_blocks)
        fetch = _Fetch(tiers, self, tokens, self._namespace, ids.tobytes())
        keys = self._keys[:num_blocks]
        self.op_id = tiers.submit(
            OpKind.STORAGE_TO_HOST, fetch, destinations=ids.tobytes(), keys=keys
        )

    def end(self, num_blocks: int) -> None:
        """Say how many blocks came."""
        self.done = True
        self.num_blocks = num_blocks
        self._tiers.let_go(self.runs)


class _Lookup(Effect):
    """Storage says which keys it has."""

    def __init__(self, prefetch: Prefetch) -> None:
        self._prefetch = prefetch
        self.runs = prefetch.runs
        self._num_found = 0

    def end(self, ok: Sequence[bool]) -> None:
        """See Effect."""
        self._num_found = leading(ok)

    def fenced(self) -> None:
        """See Effect."""
        self._prefetch.load(self._num_found)


class _Fetch(Effect):
    """Blocks are copied from storage to the host, and enter the tree when they have arrived."""

    def __init__(
        self, tiers: Tiers, prefetch: Prefetch, tokens: bytes, namespace: bytes, ids: bytes
    ) -> None:
        self._tiers = tiers
        self._prefetch = prefetch
        self.runs = prefetch.runs
        self._tokens = tokens
        self._namespace = namespace
        self._epoch = tiers.manager.epoch
        self.ids = np.frombuffer(ids, np.int32)
        self._num_good = 0

    def end(self, ok: Sequence[bool]) -> None:
        """See Effect."""
        self._num_good = leading(ok)

    def fenced(self) -> None:
        """See Effect."""
        tiers = self._tiers
        good = self._num_good if self._epoch == tiers.manager.epoch else 0
        attached = 0
        if good:
            lost_bytes = (len(self.ids) - good) * tiers.tree.block_bytes
            tokens = self._tokens[: len(self._tokens) - lost_bytes]
            attached = tiers.tree.attach(self._namespace, tokens, self.ids[:good])
        kept = self.ids[good - attached : good]
        tiers.host.pool.recycle(np.setdiff1d(self.ids, kept))
        tiers.fetched_blocks += good
        self._prefetch.end(good)

    def own_host_blocks(self) -> list[int]:
        """See Effect."""
        return [int(block) for block in self.ids]


def prefetch(tiers: Tiers, tokens: Tokens, namespace: bytes) -> Prefetch | None:
    """See `Tiers.prefetch`."""
    tokens = as_tokens(tokens)
    match = tiers.manager.match(tokens, namespace)
    block_size = tiers.manager.block_size
    have, whole = match.num_blocks + match.num_host_blocks, len(tokens) // block_size
    if tiers.storage is None or have == whole:
        return None
    keys = tiers.storage.block_keys(tokens, namespace)[have:]
    path = tokens[: whole * block_size].tobytes()
    asked = Prefetch(tiers, path, namespace, keys)
    asked.runs = tiers.host.hold(match.host_runs)
    asked.op_id = tiers.submit(OpKind.LOOKUP, _Lookup(asked), keys=keys)
    return asked

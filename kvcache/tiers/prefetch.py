"""Prefetch: what storage has of a request's tokens is brought to the host before it is admitted."""

from __future__ import annotations

from collections.abc import Sequence

from ..ids import KEY_BYTES, OpId
from ..prefix.lease import Match
from ..prefix.node import Node
from ..tokens import (
    Int32Array,
    Tokens,
    as_tokens,
)
from .completions import leading
from .host_tier import HostRun
from .offload import HostWriter
from .operations import Effect, OpKind
from .state import TierState


class Prefetch:
    """A request's question to storage, and then its answer on the way to the host.

    ::

        LOOKUP ── none there ─────────────────────────► done
           └───── n leading keys ──► STORAGE_TO_HOST ──► done: the good ones are in the tree

    Its request waits for the answers, not for their fences: those of a storage that never lets go
    never come.

    Attributes:
        done: it has ended, and the request can be matched.
        first_block: the place of the first block that was asked for.
        num_blocks: how many blocks came to the host, from that one on.
    """

    def __init__(
        self,
        tiers: TierState,
        writer: HostWriter,
        tokens: bytes,
        namespace: bytes,
        keys: list[bytes],
    ) -> None:
        self.done = False
        self.first_block = len(tokens) // tiers.tree.block_bytes - len(keys)
        self.num_blocks = 0
        self.op_id: OpId
        self.runs: list[HostRun] = []  # held: the blocks on the host that they follow
        self._tiers = tiers
        self._writer = writer
        self._tokens = tokens
        self._namespace = namespace
        self._keys = keys

    def load(self, num_blocks: int) -> None:
        """Load the first num_blocks that were asked for, as far as the host has room."""
        tiers = self._tiers
        num_blocks = min(num_blocks, tiers.host.available)
        if num_blocks == 0:
            self.end(0)
            return
        missing_bytes = (len(self._keys) - num_blocks) * tiers.tree.block_bytes
        tokens = self._tokens[: len(self._tokens) - missing_bytes]
        ids, _ = self._writer.land({}, num_blocks)
        keys = self._keys[:num_blocks]
        fetch = _Fetch(tiers, self, tokens, self._namespace, ids, keys)
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

    def end(self, ok: Sequence[bool]) -> None:
        """See Effect."""
        self.runs = []  # the load holds them now
        self._prefetch.load(leading(ok))

    def fenced(self) -> None:
        """See Effect: it has no blocks."""


class _Fetch(Effect):
    """Blocks are copied from storage to the host, and enter the tree when they have arrived.

    What has not arrived is held until nobody can write it any more.
    """

    def __init__(
        self,
        tiers: TierState,
        prefetch: Prefetch,
        tokens: bytes,
        namespace: bytes,
        ids: Int32Array,
        keys: list[bytes],
    ) -> None:
        self._tiers = tiers
        self._prefetch = prefetch
        self.runs = prefetch.runs
        self._tokens = tokens
        self._namespace = namespace
        self._ids = ids
        self._keys = keys

    def end(self, ok: Sequence[bool]) -> None:
        """See Effect."""
        tiers, good = self._tiers, leading(ok)
        come, self._ids = self._ids[:good], self._ids[good:]
        if good:
            lost_bytes = len(self._ids) * tiers.tree.block_bytes
            tokens = self._tokens[: len(self._tokens) - lost_bytes]
            node = tiers.tree.attach(self._namespace, tokens, come, self._keys[:good])
            attached = 0 if node is None else node.num_blocks
            tiers.host.pool.recycle(come[: good - attached])
            if node is not None:
                tiers.uses.note([node])
            tiers.fetched_blocks += good
        self._prefetch.end(good)

    def fenced(self) -> None:
        """See Effect."""
        self._tiers.host.pool.recycle(self._ids)

    def own_host_blocks(self) -> list[int]:
        """See Effect."""
        return [int(block) for block in self._ids]


def prefetch(
    tiers: TierState, writer: HostWriter, tokens: Tokens, namespace: bytes
) -> Prefetch | None:
    """See `Tiers.prefetch`."""
    tokens = as_tokens(tokens)
    match = tiers.cache.match(tokens, namespace)
    block_size = tiers.cache.block_size
    have, whole = match.num_blocks + match.num_host_blocks, len(tokens) // block_size
    storage_keys = tiers.tree.keys
    if storage_keys is None or have == whole:
        return None
    parent = _last_key(tiers, match)
    keys = storage_keys.namespace.block_keys(tokens[have * block_size :], namespace, parent)
    path = tokens[: whole * block_size].tobytes()
    asked = Prefetch(tiers, writer, path, namespace, keys)
    asked.runs = tiers.host.hold(match.host_runs)
    asked.op_id = tiers.submit(OpKind.LOOKUP, _Lookup(asked), keys=keys)
    return asked


def _last_key(tiers: TierState, match: Match) -> bytes | None:
    """Return the key of the last block of a match; None if it has no block."""
    walk, keys = match._walk, tiers.tree.keys
    if walk is None or keys is None:
        return None
    node: Node | None
    if match.host_runs:
        excess = sum([run.num_blocks for run in match.host_runs]) - match.num_host_blocks
        last = match.host_runs[-1]
        node, num_blocks = last.node, last.num_blocks - excess
        assert node is not None, "a match names a dropped copy"
    elif walk.inside is not None:
        node, num_blocks = walk.inside, walk.inside_blocks
    else:
        node, num_blocks = walk.node, walk.node.num_blocks
    if num_blocks == 0:  # it is the root
        return None
    end = num_blocks * KEY_BYTES
    return keys.of(tiers.tree.path(node))[end - KEY_BYTES : end]

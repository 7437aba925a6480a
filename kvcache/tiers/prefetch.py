"""Prefetch: load blocks of a request from storage to the host before it is admitted."""

from __future__ import annotations

from collections.abc import Sequence

from ..ids import KEY_BYTES, OpId
from ..prefix.lease import Match
from ..prefix.node import Node
from ..tokens import Int32Array, Tokens, as_tokens
from .completion_handlers import leading
from .host_tier import HostRun
from .offload import Offloader
from .operations import CompletionHandler, OpKind
from .state import TierState


class Prefetch:
    """A lookup in storage for a request, and then the load of the blocks that were found.

    ::

        LOOKUP ── none found ─────────────────────────► done
           └───── n leading keys ──► STORAGE_TO_HOST ──► done: good blocks are in the tree

    The request waits for the results, not for the fences: storage that hangs never fences.

    Attributes:
        done: whether it has ended and the request can be matched.
        first_block: index of the first block that was looked up.
        num_blocks: number of blocks loaded to the host, from that one on.
    """

    def __init__(
        self,
        state: TierState,
        offloader: Offloader,
        tokens: bytes,
        namespace: bytes,
        keys: list[bytes],
    ) -> None:
        self.done = False
        self.first_block = len(tokens) // state.tree.block_bytes - len(keys)
        self.num_blocks = 0
        self.op_id: OpId
        self.runs: list[HostRun] = []  # held: the host blocks before them
        self._state = state
        self._offloader = offloader
        self._tokens = tokens
        self._namespace = namespace
        self._keys = keys

    def record(self, ok: Sequence[bool | None]) -> None:
        """Record which of the blocks that were looked up storage has."""
        if self._state.events is not None:
            self._state.events.looked_up(self._namespace, self._tokens, ok)

    def load(self, num_blocks: int) -> None:
        """Load the first num_blocks blocks that were looked up, as far as the host has room."""
        state = self._state
        num_blocks = min(num_blocks, state.host.available)
        if num_blocks == 0:
            self.end(0)
            return
        missing_bytes = (len(self._keys) - num_blocks) * state.tree.block_bytes
        tokens = self._tokens[: len(self._tokens) - missing_bytes]
        ids, _ = self._offloader.allocate({}, num_blocks)
        keys = self._keys[:num_blocks]
        fetch = _FetchCompletion(state, self, tokens, self._namespace, ids, keys)
        self.op_id = state.submit(
            OpKind.STORAGE_TO_HOST, fetch, destinations=ids.tobytes(), keys=keys
        )

    def end(self, num_blocks: int) -> None:
        """End the prefetch: num_blocks blocks were loaded."""
        self.done = True
        self.num_blocks = num_blocks
        self._state.release_hold(self.runs)


class _LookupCompletion(CompletionHandler):
    """Handler of the lookup: loads the keys that storage has."""

    def __init__(self, prefetch: Prefetch) -> None:
        self._prefetch = prefetch
        self.runs = prefetch.runs

    def on_result(self, ok: Sequence[bool | None]) -> None:
        """See CompletionHandler."""
        self.runs = []  # the load holds them now
        self._prefetch.record(ok)
        self._prefetch.load(leading(ok))

    def on_fence(self) -> None:
        """See CompletionHandler. A lookup has no blocks."""


class _FetchCompletion(CompletionHandler):
    """Handler of a load from storage to the host: blocks that arrived enter the tree.

    Blocks that did not arrive stay quarantined until the fence.
    """

    def __init__(
        self,
        state: TierState,
        prefetch: Prefetch,
        tokens: bytes,
        namespace: bytes,
        ids: Int32Array,
        keys: list[bytes],
    ) -> None:
        self._state = state
        self._prefetch = prefetch
        self.runs = prefetch.runs
        self._tokens = tokens
        self._namespace = namespace
        self._ids = ids
        self._keys = keys

    def on_result(self, ok: Sequence[bool | None]) -> None:
        """See CompletionHandler."""
        state, good = self._state, leading(ok)
        loaded, self._ids = self._ids[:good], self._ids[good:]
        if good:
            lost_bytes = len(self._ids) * state.tree.block_bytes
            tokens = self._tokens[: len(self._tokens) - lost_bytes]
            node = state.tree.attach(self._namespace, tokens, loaded, self._keys[:good])
            attached = 0 if node is None else node.num_blocks
            state.host.pool.recycle(loaded[: good - attached])
            if node is not None:
                state.recency.record_use([node])
            state.fetched_blocks += good
        self._prefetch.end(good)

    def on_fence(self) -> None:
        """See CompletionHandler."""
        self._state.host.pool.recycle(self._ids)

    def owned_host_blocks(self) -> list[int]:
        """See CompletionHandler."""
        return [int(block) for block in self._ids]


def start_prefetch(
    state: TierState, offloader: Offloader, tokens: Tokens, namespace: bytes
) -> Prefetch | None:
    """See `Tiers.prefetch`."""
    tokens = as_tokens(tokens)
    match = state.cache.match(tokens, namespace)
    block_size = state.cache.block_size
    have, whole = match.num_blocks + match.num_host_blocks, len(tokens) // block_size
    storage_keys = state.tree.keys
    if storage_keys is None or have == whole:
        return None
    parent = _last_key(state, match)
    keys = storage_keys.namespace.block_keys(tokens[have * block_size :], namespace, parent)
    path = tokens[: whole * block_size].tobytes()
    prefetch = Prefetch(state, offloader, path, namespace, keys)
    prefetch.runs = state.host.hold(match.host_runs)
    prefetch.op_id = state.submit(OpKind.LOOKUP, _LookupCompletion(prefetch), keys=keys)
    return prefetch


def _last_key(state: TierState, match: Match) -> bytes | None:
    """Return the key of the last block of a match; None if it has no block."""
    walk, keys = match._walk, state.tree.keys
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
    if num_blocks == 0:  # the root
        return None
    end = num_blocks * KEY_BYTES
    return keys.of(state.tree.path(node))[end - KEY_BYTES : end]

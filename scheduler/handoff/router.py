"""Which prefill node computes a request and which decode node generates from it.

The cost of a node is what it has yet to do, in blocks, and what a request would add to it::

    cost = blocks of requests that are under way there + blocks of this one that it lacks

and the request goes where that is least: to the nodes that have its prefix, until they are busier
than others by more than the prefix is worth. Prefix alone would not do: where all requests begin
with the same system prompt, all of them would go to one node.

Source: the cost is that of NVIDIA Dynamo's KV router, ``max(prefill blocks - overlap, 0) + load``,
with every weight 1. There a decode node has no overlap; here it keeps a tree, and is sent only
what it lacks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from ...kvcache import (
    CacheManager,
    RequestTooLargeError,
    Tokens,
    as_tokens,
)
from ..errors import RequestError, RoutingError
from . import AttemptKey, NodeId


class Route(NamedTuple):
    """Where a request goes."""

    prefill: NodeId
    decode: NodeId


@dataclass(slots=True)
class _Node:
    """A node as the router sees it.

    Attributes:
        shadow: what it has cached, as far as the router knows: a manager of the same size, in which
            each routed request is published at once and released.
        lacks: of each attempt under way there, how many blocks it had not.
        load: the sum of them.
        sent: the same of all attempts that ever were there.
    """

    shadow: CacheManager
    lacks: dict[AttemptKey, int] = field(default_factory=dict)
    load: int = 0
    sent: int = 0

    def begin(self, key: AttemptKey, tokens: Tokens, namespace: bytes, num_lacking: int) -> None:
        self.lacks[key] = num_lacking
        self.load += num_lacking
        self.sent += num_lacking
        self.learn(tokens, namespace)

    def end(self, key: AttemptKey) -> None:
        self.load -= self.lacks.pop(key, 0)

    def learn(self, tokens: Tokens, namespace: bytes) -> None:
        lease = self.shadow.admit(self.shadow.match(tokens, namespace))
        self.shadow.publish(lease, tokens)
        self.shadow.release(lease)


class Router:
    """Weighs what nodes have cached against how busy they are. No I/O; one thread at a time.

    What a node has cached is guessed from what was sent there: its cache is followed by a cache of
    the same size and the same eviction order. A wrong guess costs time, never a wrong result.

    Example:
        >>> from radixkv.scheduler.handoff import AttemptKey
        >>> from radixkv.scheduler.handoff.router import Router
        >>> router = Router(2, prefill={"p0": 100, "p1": 100}, decode={"d0": 100})
        >>> router.route(AttemptKey("a", 1), [1, 2, 3, 4, 5, 6])
        Route(prefill='p0', decode='d0')
        >>> router.computed(AttemptKey("a", 1))
        >>> router.route(AttemptKey("b", 1), [1, 2, 3, 4, 5, 6, 7])    # p0 has it, and is idle
        Route(prefill='p0', decode='d0')
        >>> router.route(AttemptKey("c", 1), [7, 8])                   # p0 has something to do
        Route(prefill='p1', decode='d0')
    """

    def __init__(
        self, block_size: int, *, prefill: Mapping[str, int], decode: Mapping[str, int]
    ) -> None:
        """Make a router.

        Args:
            block_size: tokens per block, of all nodes.
            prefill, decode: the nodes by id, and how many blocks each has.

        Raises:
            CountError: for a size below 1.
            RoutingError: for an id that is in both.
        """
        self._block_size = block_size
        self._prefill: dict[NodeId, _Node] = {}
        self._decode: dict[NodeId, _Node] = {}
        for node_id, num_blocks in prefill.items():
            self.add_prefill(node_id, num_blocks)
        for node_id, num_blocks in decode.items():
            self.add_decode(node_id, num_blocks)

    def add_prefill(self, node_id: NodeId, num_blocks: int) -> None:
        """Send requests to a prefill node, too; of one that came back nothing is known.

        Raises:
            CountError: for a size below 1.
            RoutingError: if it is there already.
        """
        self._add(self._prefill, node_id, num_blocks)

    def add_decode(self, node_id: NodeId, num_blocks: int) -> None:
        """Send requests to a decode node, too; see `add_prefill`."""
        self._add(self._decode, node_id, num_blocks)

    def _add(self, nodes: dict[NodeId, _Node], node_id: NodeId, num_blocks: int) -> None:
        if node_id in self._prefill or node_id in self._decode:
            raise RoutingError(f"there is a node {node_id!r} already")
        nodes[node_id] = _Node(CacheManager(num_blocks, self._block_size))

    def remove(self, node_id: NodeId) -> None:
        """Send nothing to a node any more, and forget what it has.

        Raises:
            RoutingError: if it is not there.
        """
        if self._prefill.pop(node_id, None) is None and self._decode.pop(node_id, None) is None:
            raise RoutingError(f"there is no node {node_id!r}")

    def route(
        self, key: AttemptKey, prompt: Tokens, namespace: bytes = b"", avoid: Iterable[str] = ()
    ) -> Route:
        """Choose the nodes of an attempt; it counts as their load from now on.

        Among nodes of the same cost it is the one that was sent the least, then the first.

        Args:
            key: of the attempt.
            prompt: its tokens.
            namespace: requests share blocks only inside one.
            avoid: nodes that have refused it, to be taken only if there is no other.

        Raises:
            TokenError, NamespaceError: for arguments of the wrong kind.
            RequestError: if the attempt is under way.
            RoutingError: if there is no node of a kind.
            RequestTooLargeError: if no node of a kind has as many blocks.
        """
        if any(key in node.lacks for node in (*self._prefill.values(), *self._decode.values())):
            raise RequestError(f"{key} is under way")
        tokens = as_tokens(prompt)
        avoided = frozenset(avoid)
        prefill = self._choose("prefill", self._prefill, tokens, namespace, avoided)
        decode = self._choose("decode", self._decode, tokens, namespace, avoided)
        for nodes, (node_id, num_lacking) in ((self._prefill, prefill), (self._decode, decode)):
            nodes[node_id].begin(key, tokens, namespace, num_lacking)
        return Route(prefill[0], decode[0])

    def _choose(
        self,
        role: str,
        nodes: Mapping[NodeId, _Node],
        tokens: Tokens,
        namespace: bytes,
        avoided: frozenset[str],
    ) -> tuple[NodeId, int]:
        if not nodes:
            raise RoutingError(f"there is no {role} node")
        needed = -(-len(tokens) // self._block_size)
        fits = [name for name, node in nodes.items() if node.shadow.num_blocks >= needed]
        if not fits:
            most = max(node.shadow.num_blocks for node in nodes.values())
            raise RequestTooLargeError(len(tokens), needed, most)
        candidates = [name for name in fits if name not in avoided] or fits
        lacking = {
            name: needed - nodes[name].shadow.match(tokens, namespace).num_blocks
            for name in candidates
        }
        best = min(
            candidates, key=lambda name: (nodes[name].load + lacking[name], nodes[name].sent)
        )
        return best, lacking[best]

    def computed(self, key: AttemptKey) -> None:
        """P has nothing more to compute for an attempt, or has given it up."""
        for node in self._prefill.values():
            node.end(key)

    def finished(self, key: AttemptKey, tokens: Tokens = (), namespace: bytes = b"") -> None:
        """An attempt has ended on both nodes.

        Args:
            key: of the attempt; one that is not under way is ignored.
            tokens: those whose KV D has now, prompt and output; none if it failed.
            namespace: theirs.
        """
        self.computed(key)
        for node in self._decode.values():
            if key in node.lacks:
                node.end(key)
                if -(-len(tokens) // self._block_size) <= node.shadow.num_blocks:
                    node.learn(tokens, namespace)

    def forget_cached(self, keep: Collection[bytes] = ()) -> None:
        """Take no node to have anything cached, but in the namespaces that are kept."""
        for node in (*self._prefill.values(), *self._decode.values()):
            node.shadow.reset(keep)

    def loads(self) -> dict[NodeId, int]:
        """Return the blocks under way on each node."""
        nodes = {**self._prefill, **self._decode}
        return {name: node.load for name, node in nodes.items()}

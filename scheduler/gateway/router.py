"""Choice of the prefill node and the decode node of an attempt, by cached prefix and load.

A request goes to the node with the least cost::

    cost = blocks of requests in progress on the node + blocks of this request that it lacks

So it goes to a node that has its prefix, unless another node is less busy by more blocks than the
prefix saves. The prefix alone is not enough: if all requests begin with the same system prompt,
one node would get all of them.

Source: NVIDIA Dynamo's KV router, ``max(prefill blocks - overlap, 0) + load``, with all weights 1.
There, a decode node has no overlap. Here it keeps a radix tree and is sent only what it lacks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from ...kvcache import CacheManager, Int32Array, RequestTooLargeError, Tokens, as_tokens
from ..errors import RequestError, RoutingError
from ..handoff.messages import AttemptKey, NodeId


class Route(NamedTuple):
    """The two nodes of an attempt."""

    prefill: NodeId
    decode: NodeId


@dataclass(slots=True)
class _Node:
    """The router's estimate of a node.

    Attributes:
        shadow: a cache manager of the node's size. The router publishes each routed request in it
            at once, to predict what the node has cached.
        lacks: blocks that the node lacked of each attempt in progress.
        load: sum of lacks.
        sent: the same sum over all attempts so far.
    """

    shadow: CacheManager
    lacks: dict[AttemptKey, int] = field(default_factory=dict)
    load: int = 0
    sent: int = 0

    def begin(
        self, key: AttemptKey, tokens: Int32Array, namespace: bytes, num_lacking: int
    ) -> None:
        self.lacks[key] = num_lacking
        self.load += num_lacking
        self.sent += num_lacking
        self.learn(tokens, namespace)

    def end(self, key: AttemptKey) -> None:
        self.load -= self.lacks.pop(key, 0)

    def learn(self, tokens: Int32Array, namespace: bytes) -> None:
        lease = self.shadow.admit(self.shadow.match(tokens, namespace))
        self.shadow.publish(lease, tokens)
        self.shadow.release(lease)


class Router:
    """Chooses nodes by cached prefix and load. No I/O; not thread-safe.

    The router predicts each node's cache from the requests it has sent there, with a cache manager
    of the same size and eviction order. A wrong prediction costs time, never a wrong result.

    Example:
        >>> from radixkv.scheduler.handoff import AttemptKey
        >>> from radixkv.scheduler.gateway.router import Router
        >>> router = Router(2, prefill={"p0": 100, "p1": 100}, decode={"d0": 100})
        >>> router.route(AttemptKey("a", 1), [1, 2, 3, 4, 5, 6])
        Route(prefill='p0', decode='d0')
        >>> router.computed(AttemptKey("a", 1))
        >>> router.route(AttemptKey("b", 1), [1, 2, 3, 4, 5, 6, 7])  # p0 has the prefix
        Route(prefill='p0', decode='d0')
        >>> router.route(AttemptKey("c", 1), [7, 8])  # p0 is busy
        Route(prefill='p1', decode='d0')
    """

    def __init__(
        self, block_size: int, *, prefill: Mapping[str, int], decode: Mapping[str, int]
    ) -> None:
        """Create a router.

        Args:
            block_size: tokens per block, of all nodes.
            prefill, decode: number of blocks of each node, by id.

        Raises:
            CountError: if a size is below 1.
            RoutingError: if an id is in both.
        """
        self._block_size = block_size
        self._prefill: dict[NodeId, _Node] = {}
        self._decode: dict[NodeId, _Node] = {}
        for node_id, num_blocks in prefill.items():
            self.add_prefill(node_id, num_blocks)
        for node_id, num_blocks in decode.items():
            self.add_decode(node_id, num_blocks)

    def add_prefill(self, node_id: NodeId, num_blocks: int) -> None:
        """Add a prefill node, with an empty cache.

        Raises:
            CountError: if num_blocks is below 1.
            RoutingError: if the node was added already.
        """
        self._add(self._prefill, node_id, num_blocks)

    def add_decode(self, node_id: NodeId, num_blocks: int) -> None:
        """Add a decode node; see `add_prefill`."""
        self._add(self._decode, node_id, num_blocks)

    def _add(self, nodes: dict[NodeId, _Node], node_id: NodeId, num_blocks: int) -> None:
        if node_id in self._prefill or node_id in self._decode:
            raise RoutingError(f"there is a node {node_id!r} already")
        nodes[node_id] = _Node(CacheManager(num_blocks, self._block_size))

    def remove(self, node_id: NodeId) -> None:
        """Remove a node.

        Raises:
            RoutingError: if there is no such node.
        """
        if self._prefill.pop(node_id, None) is None and self._decode.pop(node_id, None) is None:
            raise RoutingError(f"there is no node {node_id!r}")

    def route(
        self, key: AttemptKey, prompt: Tokens, namespace: bytes = b"", avoid: Iterable[str] = ()
    ) -> Route:
        """Choose the nodes of an attempt, and add it to their load.

        Ties go to the node that was sent the fewest blocks so far, then to the first one.

        Args:
            key: the attempt.
            prompt: its tokens.
            namespace: requests share blocks only within a namespace.
            avoid: nodes that have refused it; chosen only if there is no other.

        Raises:
            TokenError, NamespaceError: if prompt or namespace has the wrong type.
            RequestError: if the attempt is in progress.
            RoutingError: if there is no node of a role.
            RequestTooLargeError: if no node of a role has enough blocks.
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
        tokens: Int32Array,
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
        """Remove an attempt from the load of its prefill node."""
        for node in self._prefill.values():
            node.end(key)

    def finished(self, key: AttemptKey, tokens: Tokens = (), namespace: bytes = b"") -> None:
        """Remove an attempt that has ended from the load of both nodes.

        Args:
            key: the attempt; ignored if it is not in progress.
            tokens: prompt and output tokens whose KV D has now; empty if the attempt failed.
            namespace: of the tokens.

        Raises:
            TokenError: if tokens has the wrong type.
        """
        tokens = as_tokens(tokens)
        self.computed(key)
        for node in self._decode.values():
            if key in node.lacks:
                node.end(key)
                if -(-len(tokens) // self._block_size) <= node.shadow.num_blocks:
                    node.learn(tokens, namespace)

    def forget_cached(self, keep: Collection[bytes] = ()) -> None:
        """Assume that all nodes have reset their caches, except for the namespaces in keep."""
        for node in (*self._prefill.values(), *self._decode.values()):
            node.shadow.reset(keep)

    def loads(self) -> dict[NodeId, int]:
        """Return the number of blocks in progress on each node."""
        nodes = {**self._prefill, **self._decode}
        return {name: node.load for name, node in nodes.items()}

"""Choice of the prefill node and the decode node of an attempt, by cached prefix and load.

A request goes to the node with the least cost::

    cost = tokens of requests in progress on the node + tokens of this request that it lacks

both in whole blocks. So it goes to a node that has its prefix, unless another node is less busy by
more than the prefix saves. The prefix alone is not enough: if all requests begin with the same
system prompt, one node would get all of them.

Source: NVIDIA Dynamo's KV router, ``max(prefill blocks - overlap, 0) + load``, with all weights 1.
There, a decode node has no overlap. Here it keeps a radix tree and is sent only what it lacks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from ...kvcache import CacheManager, Int32Array, RequestTooLargeError, Tokens, as_tokens
from ...kvcache.events import hash_blocks
from ..errors import RequestError, RoutingError
from ..handoff.gateway_messages import CacheUpdate
from ..handoff.messages import AttemptKey, NodeId
from .cache_index import CacheIndex


class Route(NamedTuple):
    """The two nodes of an attempt."""

    prefill: NodeId
    decode: NodeId


class CacheSize(NamedTuple):
    """Number of blocks of a node, and tokens per block."""

    num_blocks: int
    block_size: int


@dataclass(frozen=True)
class _Prompt:
    tokens: Int32Array
    namespace: bytes
    _hashes: dict[int, list[int]] = field(default_factory=dict)

    def hashes(self, block_size: int) -> list[int]:
        if block_size not in self._hashes:
            self._hashes[block_size] = hash_blocks(self.tokens, block_size, self.namespace)
        return self._hashes[block_size]

    def num_blocks(self, block_size: int) -> int:
        return -(-len(self.tokens) // block_size)


@dataclass(slots=True)
class _Node:
    """The router's estimate of a node.

    Attributes:
        shadow: a cache manager of the node's size. The router publishes each routed request in it
            at once, to predict what the node has cached, as long as there is no index.
        lacks: blocks that the node lacked of each attempt in progress.
        load: sum of lacks.
        sent: the same sum over all attempts so far.
        index: what the node has, once it has said so.
        num_free: blocks that it had for new requests when it said so last, less those of the
            attempts since.
        coming: hashes of the blocks of each attempt in progress, which the node will have.
        num_coming: number of these attempts, by hash.
    """

    shadow: CacheManager
    index: CacheIndex | None = None
    coming: dict[AttemptKey, list[int]] = field(default_factory=dict)
    num_coming: Counter[int] = field(default_factory=Counter)
    lacks: dict[AttemptKey, int] = field(default_factory=dict)
    load: int = 0
    sent: int = 0
    num_free: int = 0

    @property
    def block_size(self) -> int:
        return self.shadow.block_size

    @property
    def num_tokens(self) -> int:
        return self.shadow.num_blocks * self.block_size

    def begin(self, key: AttemptKey, prompt: _Prompt, num_lacking: int) -> None:
        self.lacks[key] = num_lacking
        self.load += num_lacking
        self.sent += num_lacking
        self.num_free -= prompt.num_blocks(self.block_size)
        if self.index is not None:
            self.coming[key] = prompt.hashes(self.block_size)
            self.num_coming.update(self.coming[key])
        self.learn(prompt.tokens, prompt.namespace)

    def end(self, key: AttemptKey) -> None:
        self.load -= self.lacks.pop(key, 0)
        for name in self.coming.pop(key, ()):
            self.num_coming[name] -= 1
            if not self.num_coming[name]:
                del self.num_coming[name]

    def num_cached(self, prompt: _Prompt) -> int:
        if self.index is None:
            return self.shadow.match(prompt.tokens, prompt.namespace).num_blocks
        return self.index.num_leading(prompt.hashes(self.block_size), self.num_coming)

    def learn(self, tokens: Int32Array, namespace: bytes) -> None:
        if self.index is not None:
            return
        lease = self.shadow.admit(self.shadow.match(tokens, namespace))
        self.shadow.publish(lease, tokens)
        self.shadow.release(lease)


class _Candidate(NamedTuple):
    """A node that can take an attempt, the blocks that it lacks, and the cost."""

    name: NodeId
    num_lacking: int
    is_avoided: bool
    cost: int


class Router:
    """Chooses nodes by cached prefix and load. No I/O; not thread-safe.

    The router knows what a node has cached by the node's updates. Of a node that sends none it
    predicts it from the requests it has sent there, with a cache manager of the same size and
    eviction order. If the router is wrong, that costs time, and never gives a wrong result.

    Example:
        >>> from radixkv.scheduler.handoff import AttemptKey
        >>> from radixkv.scheduler.gateway.router import CacheSize, Router
        >>> size = CacheSize(num_blocks=100, block_size=2)
        >>> router = Router(prefill={"p0": size, "p1": size}, decode={"d0": size})
        >>> router.route(AttemptKey("a", 1), [1, 2, 3, 4, 5, 6])
        Route(prefill='p0', decode='d0')
        >>> router.computed(AttemptKey("a", 1))
        >>> router.route(AttemptKey("b", 1), [1, 2, 3, 4, 5, 6, 7])  # p0 has the prefix
        Route(prefill='p0', decode='d0')
        >>> router.route(AttemptKey("c", 1), [7, 8])  # p0 is busy
        Route(prefill='p1', decode='d0')
    """

    def __init__(
        self,
        *,
        prefill: Mapping[NodeId, CacheSize] | None = None,
        decode: Mapping[NodeId, CacheSize] | None = None,
    ) -> None:
        """Create a router.

        Args:
            prefill, decode: cache of each node, by id.

        Raises:
            CountError: if a size is below 1.
            RoutingError: if an id is in both.
        """
        self._prefill: dict[NodeId, _Node] = {}
        self._decode: dict[NodeId, _Node] = {}
        self._draining: set[NodeId] = set()
        for node_id, size in (prefill or {}).items():
            self.add_prefill(node_id, size)
        for node_id, size in (decode or {}).items():
            self.add_decode(node_id, size)

    def add_prefill(self, node_id: NodeId, size: CacheSize) -> None:
        """Add a prefill node, with an empty cache.

        Raises:
            CountError: if a size is below 1.
            RoutingError: if the node was added already.
        """
        self._add(self._prefill, node_id, size)

    def add_decode(self, node_id: NodeId, size: CacheSize) -> None:
        """Add a decode node; see `add_prefill`."""
        self._add(self._decode, node_id, size)

    def _add(self, nodes: dict[NodeId, _Node], node_id: NodeId, size: CacheSize) -> None:
        if node_id in self._prefill or node_id in self._decode:
            raise RoutingError(f"there is a node {node_id!r} already")
        nodes[node_id] = _Node(CacheManager(*size))

    def remove(self, node_id: NodeId) -> None:
        """Remove a node.

        Raises:
            RoutingError: if there is no such node.
        """
        if self._prefill.pop(node_id, None) is None and self._decode.pop(node_id, None) is None:
            raise RoutingError(f"there is no node {node_id!r}")
        self._draining.discard(node_id)

    def drain(self, node_id: NodeId) -> None:
        """Give a node no more attempts, until it is removed. Those in progress go on.

        Raises:
            RoutingError: if there is no such node.
        """
        self._node(node_id)
        self._draining.add(node_id)

    def num_attempts(self, node_id: NodeId) -> int:
        """Return the number of attempts in progress on a node; on P: that are not computed.

        Raises:
            RoutingError: if there is no such node.
        """
        return len(self._node(node_id).lacks)

    def has_pair(self, broken: Collection[Route]) -> bool:
        """Whether there is a pair of nodes besides these."""
        prefill, decode = self._serving(self._prefill), self._serving(self._decode)
        return any(Route(p, d) not in broken for p in prefill for d in decode)

    def _serving(self, nodes: Mapping[NodeId, _Node]) -> dict[NodeId, _Node]:
        """Return the nodes that take attempts."""
        return {name: node for name, node in nodes.items() if name not in self._draining}

    def route(
        self,
        key: AttemptKey,
        prompt: Tokens,
        namespace: bytes = b"",
        avoid: Iterable[str] = (),
        broken: Collection[Route] = (),
    ) -> Route:
        """Choose the nodes of an attempt, and add it to their load.

        Ties go to the node that was sent the fewest tokens so far, then to the first one.

        Args:
            key: the attempt.
            prompt: its tokens.
            namespace: requests share blocks only within a namespace.
            avoid: nodes that have refused it; chosen only if there is no other.
            broken: pairs that do not hear each other; chosen only if there is no other.

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
        wanted = _Prompt(tokens, namespace)
        prefill = self._candidates("prefill", self._serving(self._prefill), wanted, avoided)
        decode = self._candidates("decode", self._serving(self._decode), wanted, avoided)
        p, d = prefill[0], decode[0]
        if Route(p.name, d.name) in broken:
            pairs = [(p, d) for p in prefill for d in decode if Route(p.name, d.name) not in broken]
            p, d = min(
                pairs or [(p, d)],
                key=lambda pair: (sum(x.is_avoided for x in pair), sum(x.cost for x in pair)),
            )
        self._prefill[p.name].begin(key, wanted, p.num_lacking)
        self._decode[d.name].begin(key, wanted, d.num_lacking)
        return Route(p.name, d.name)

    def _candidates(
        self,
        role: str,
        nodes: Mapping[NodeId, _Node],
        prompt: _Prompt,
        avoided: frozenset[str],
    ) -> list[_Candidate]:
        """Return the nodes that can take an attempt, the best one first."""
        if not nodes:
            raise RoutingError(f"there is no {role} node")
        needed = {name: prompt.num_blocks(node.block_size) for name, node in nodes.items()}
        fits = {
            name: node for name, node in nodes.items() if node.shadow.num_blocks >= needed[name]
        }
        if not fits:
            largest = max(nodes, key=lambda name: nodes[name].num_tokens)
            most = nodes[largest].shadow.num_blocks
            raise RequestTooLargeError(len(prompt.tokens), needed[largest], most)
        candidates = []
        for name, node in fits.items():
            num_lacking = needed[name] - node.num_cached(prompt)
            cost = (node.load + num_lacking) * node.block_size
            candidates.append(_Candidate(name, num_lacking, name in avoided, cost))
        return sorted(
            candidates,
            key=lambda each: (
                each.is_avoided,
                each.cost,
                nodes[each.name].sent * nodes[each.name].block_size,
            ),
        )

    def set_free(self, node_id: NodeId, num_blocks: int) -> None:
        """Note how many blocks a node has for new requests.

        Raises:
            RoutingError: if there is no such node.
        """
        self._node(node_id).num_free = num_blocks

    def without_room(self, num_tokens: int, besides: NodeId) -> frozenset[NodeId] | None:
        """Return which decode nodes an attempt should not move to.

        Args:
            num_tokens: tokens of the request at its limit.
            besides: the decode node that it leaves.

        Returns:
            The decode nodes without blocks for so many tokens, and this one; None if there is no
            other one, or if no prefill node has as many blocks in all.
        """
        decode = self._serving(self._decode)
        roomy = {
            name
            for name, node in decode.items()
            if -(-num_tokens // node.block_size) <= node.num_free and name != besides
        }
        fits = any(num_tokens <= node.num_tokens for node in self._serving(self._prefill).values())
        return frozenset(decode) - roomy if roomy and fits else None

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
                if len(tokens) <= node.num_tokens:
                    node.learn(tokens, namespace)

    def update_cache(self, node_id: NodeId, update: CacheUpdate) -> bool:
        """Note what a node has got and lost; return False if an update before it is missing.

        Raises:
            RoutingError: if there is no such node.
        """
        node = self._node(node_id)
        if node.index is None:
            node.index = CacheIndex()
            node.shadow.reset()
        return node.index.apply(update)

    def next_update(self, node_id: NodeId) -> int:
        """Return the number of a node's next update.

        Raises:
            RoutingError: if there is no such node.
        """
        index = self._node(node_id).index
        return 0 if index is None else index.next_number

    def _node(self, node_id: NodeId) -> _Node:
        node = self._prefill.get(node_id) or self._decode.get(node_id)
        if node is None:
            raise RoutingError(f"there is no node {node_id!r}")
        return node

    def forget_cached(self, keep: Collection[bytes] = ()) -> None:
        """Assume that all nodes have reset their caches, except for the namespaces in keep.

        Nodes that send updates report it themselves.
        """
        for node in (*self._prefill.values(), *self._decode.values()):
            node.shadow.reset(keep)

    def loads(self) -> dict[NodeId, int]:
        """Return the number of blocks in progress on each node."""
        nodes = {**self._prefill, **self._decode}
        return {name: node.load for name, node in nodes.items()}

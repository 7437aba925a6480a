"""`NodesMetrics`: the metrics of prefill and decode nodes, for Prometheus, from their statuses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import CollectorRegistry

from ..errors import EngineClosedError, EngineFailedError
from ..gateway.remote_node import RemoteNode
from ..serving import AsyncEngine
from .definitions import ENGINE_UP, ENGINE_UP_TEXT, PREFIX, Metric, Values
from .engine_metrics import CollectedMetrics
from .families import family_of

_LABELS: Final = ("model_name", "node", "role")


class WatchedNodes(Protocol):
    """What `NodesMetrics` reads of `RemoteNodes`."""

    @property
    def nodes(self) -> Mapping[str, RemoteNode]:
        """Nodes that are alive, by name."""

    @property
    def gone(self) -> Mapping[str, RemoteNode]:
        """Nodes that have gone and not come back, by name."""

    @property
    def num_open(self) -> int:
        """Number of requests that have not ended."""

    @property
    def num_moved(self) -> int:
        """Number of times that a preempted request has moved to another decode node."""

    @property
    def num_attempts_lost(self) -> int:
        """Number of attempts that were lost with a node or a connection."""

    @property
    def num_nodes_lost(self) -> int:
        """Number of times that a node was gone, also if it has come back."""


def _hits(node: RemoteNode) -> Values:
    load = node.load
    return {
        ("device",): load.hit_tokens,
        ("host",): load.host_hit_tokens,
        ("storage",): load.storage_hit_tokens,
    }


NODE_METRICS: Final[tuple[Metric[RemoteNode], ...]] = (
    Metric(
        "num_requests_running",
        "gauge",
        "Requests that hold blocks.",
        lambda node: node.load.num_running,
    ),
    Metric(
        "num_requests_waiting",
        "gauge",
        "Requests without blocks; on a decode node: preempted ones.",
        lambda node: node.load.num_waiting,
    ),
    Metric(
        "kv_cache_usage_perc",
        "gauge",
        "Part of the device's blocks that cannot be evicted, from 0 to 1.",
        lambda node: node.load.num_used_blocks / node.status.num_blocks,
    ),
    Metric(
        "num_preemptions",
        "counter",
        "Times that a request lost its blocks.",
        lambda node: node.load.preemptions,
    ),
    Metric(
        "prefix_cache_queries",
        "counter",
        "Prompt tokens that were looked up, counted as they are found or computed.",
        lambda node: node.load.prompt_tokens,
    ),
    Metric(
        "prefix_cache_hits",
        "counter",
        "Prompt tokens that were found on the device.",
        lambda node: node.load.hit_tokens,
    ),
    Metric(
        "prompt_tokens_cached_by_source",
        "counter",
        "Prompt tokens that were found, by tier: device, host, storage.",
        _hits,
        ("source",),
    ),
)

_NODE_UP: Final = "node_up"
_NODE_UP_TEXT: Final = "1 while the node serves, 0 after it has gone or while it is refused."
_OPEN: Final = "num_requests_open"
_OPEN_TEXT: Final = "Requests that have not ended, also those that wait for a node."
_COUNTS: Final = {
    "num_requests_moved": "Times that a preempted request has moved to another decode node.",
    "num_attempts_lost": "Times that a request was tried again because a node or a link was lost.",
    "num_nodes_lost": "Times that a node has gone, also if it has come back.",
}


@dataclass(frozen=True)
class _Seen:
    """What a scrape has read."""

    nodes: dict[str, RemoteNode]
    gone: dict[str, RemoteNode]
    num_open: int
    counts: Mapping[str, int]  # by name, as in _COUNTS


class NodesMetrics:
    """The metrics of nodes behind an `AsyncEngine`, named as those of an engine.

    The values are those of each node's last status, about a second old, so a scrape costs the
    nodes nothing. Counters begin at 0 when a node starts.
    """

    def __init__(self, engine: AsyncEngine, nodes: WatchedNodes, *, model_name: str = "") -> None:
        """Watch nodes.

        Args:
            engine: what ``serve_nodes`` returned for the nodes.
            nodes: read on the engine's thread.
            model_name: label ``model_name`` of all metrics.
        """
        self._engine = engine
        self._nodes = nodes
        self._model_name = model_name
        self._seen = _Seen({}, {}, 0, dict.fromkeys(_COUNTS, 0))

    async def scrape(self) -> bytes:
        """Return the metrics as text; after the engine has ended, the last ones."""
        is_up = False
        with suppress(EngineClosedError, EngineFailedError):
            self._seen = await self._engine.call(lambda _: self._read())
            is_up = True
        registry = CollectorRegistry(auto_describe=False)
        registry.register(CollectedMetrics(lambda: self._families(is_up)))
        return generate_latest(registry)

    def _read(self) -> _Seen:
        nodes = self._nodes
        counts = nodes.num_moved, nodes.num_attempts_lost, nodes.num_nodes_lost
        named = dict(zip(_COUNTS, counts, strict=True))
        return _Seen(dict(nodes.nodes), dict(nodes.gone), nodes.num_open, named)

    def _families(self, is_up: bool) -> Iterator[Family]:
        model, seen = self._model_name, self._seen
        up = GaugeMetricFamily(PREFIX + ENGINE_UP, ENGINE_UP_TEXT, labels=_LABELS[:1])
        up.add_metric([model], is_up)
        yield up
        number = GaugeMetricFamily(PREFIX + _OPEN, _OPEN_TEXT, labels=_LABELS[:1])
        number.add_metric([model], seen.num_open)
        yield number
        for name, text in _COUNTS.items():
            count = CounterMetricFamily(PREFIX + name, text, labels=_LABELS[:1])
            count.add_metric([model], seen.counts[name])
            yield count
        node_up = GaugeMetricFamily(PREFIX + _NODE_UP, _NODE_UP_TEXT, labels=_LABELS)
        for name, node in (seen.gone | seen.nodes).items():  # one that is refused may be in both
            serves = name in seen.nodes and not node.refusal
            node_up.add_metric([model, name, node.status.role], serves)
        yield node_up
        sources = [
            ((model, name, node.status.role), node)
            for name, node in seen.nodes.items()
            if not node.refusal
        ]
        for metric in NODE_METRICS:
            yield family_of(metric, _LABELS, sources)

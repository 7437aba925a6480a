"""The state of a cache world: the manager under test, its requests, a ghost device, the model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import ClassVar

from ...adapters.cache import AdapterError, Factory, Snapshot
from ...adapters.cache_target import Depth, Target
from ...model.cache import IN_FLIGHT, CacheModel
from ...model.events import Prefix
from ...model.ghost import GhostMemory, Tag, first_tag, tags_after
from ...model.two_tier_law import Lru
from ..engine import Config
from ..events import Consumers
from .requests import Request
from .stream import Job, Stream


class CacheState:
    """A manager under test, with its requests, jobs, ghost device and model.

    Attributes:
        requests: waiting and running requests, by name; `past` has all requests ever.
        jobs: steps in flight that compute a request, by name.
        flights: steps in flight that read all requests: what each of them reads, in order.
        model: the model; None at depth ``api``, where nothing is reported.
        consumers: consumers of its KV events; None if it has none.
        seen: the last snapshot; None before it, and at other depths than ``full``.
        demand: blocks that requests were given so far, hits included; up to the pool's size, no
            eviction can have been necessary.
        num_served: number of steps that served a request alone; `lru` has the last used blocks of
            these.
    """

    target_type: ClassVar[type[Target]] = Target
    model_type: ClassVar[type[CacheModel]] = CacheModel

    def __init__(self, config: Config, factory: Factory, depth: Depth) -> None:
        self.config = config
        self.depth = depth
        self.block_size: int = config["block_size"]
        self.target = self.target_type(factory, config["num_blocks"], self.block_size, depth)
        self.promises = self.target.promises
        self._require_new()
        self.device = GhostMemory(self.block_size)
        self.stream = Stream(self.device)
        self.requests: dict[str, Request] = {}
        self.past: list[Request] = []
        self.jobs: dict[str, Job] = {}
        self.flights: list[list[Job]] = []
        self.written: set[Tag] = set()
        self.demand = self.num_steps = self.num_served = 0
        self.lru = Lru(config["num_blocks"])
        self.num_admitted = self.num_hit_blocks = 0
        self.situations: Counter[str] = Counter()
        self._tags: dict[tuple[bytes, tuple[int, ...]], Tag] = {}
        self.seen: Snapshot | None = None
        has_events = depth == "full" and {"kv_events", "replay"} <= self.target.can
        self.consumers = Consumers(self.target) if has_events else None
        self.model: CacheModel | None = None
        if depth != "api":
            self.model = self.model_type(config["num_blocks"], self.block_size, self.promises)
            self.model.situations = self.situations
            self.target.report_to(self.model)

    def _require_new(self) -> None:
        num_blocks, found = self.config["num_blocks"], self.target.available()
        if found != num_blocks:
            raise AdapterError(
                f"a new manager must have all of its {num_blocks} blocks available, this one has "
                f"{found}: the factory must make a new one for each world, that shares nothing"
            )

    def running(self) -> list[Request]:
        """Requests that hold blocks."""
        return [request for request in self.requests.values() if request.state == "running"]

    def blocks_for(self, num_tokens: int) -> int:
        """Number of blocks for `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def root_of(self, namespace: bytes) -> Tag:
        """The tag of the empty prefix."""
        return first_tag(namespace)

    def tag_of(self, prefix: tuple[bytes, tuple[int, ...]]) -> Tag:
        """The tag of a namespace and the tokens of a prefix."""
        if prefix not in self._tags:
            namespace, tokens = prefix
            root = self.root_of(namespace)
            self._tags[prefix] = [root, *tags_after(root, tokens)][-1]
        return self._tags[prefix]

    def check_events(self) -> None:
        """Check that a consumer of the KV events has what can be found."""
        if self.consumers is not None and self.seen is not None:
            self.consumers.check(self.findable(self.seen))

    def findable(self, shot: Snapshot) -> dict[str, Collection[Prefix]]:
        """Return the prefixes that can be found, by tier as events name it."""
        return {"GPU": shot.cached}

    def counts(self) -> dict[str, int]:
        """Expected counters, besides those that the model counts itself."""
        assert self.model is not None, "counts are checked where events are reported"
        model = self.model
        private = sum(len(holding.table) - len(holding.tags) for holding in model.holdings.values())
        private += sum(owner == IN_FLIGHT for owner in model.owner.values())
        return {
            "num_blocks": self.config["num_blocks"],
            "free_blocks": model.num_free,
            "cached_blocks": len(model.cached),
            "idle_blocks": model.available() - model.num_free,
            "private_blocks": private,
            "live_leases": len(model.holdings),
            "admitted": self.num_admitted,
            "hit_blocks": self.num_hit_blocks,
        }

    def get(self, name: str, state: str) -> Request | None:
        """Return the request `name` if it is in `state`, else None."""
        request = self.requests.get(name)
        return request if request is not None and request.state == state else None

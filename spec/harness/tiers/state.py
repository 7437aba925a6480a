"""The state of a world with tiers: a `CacheState` with a virtual executor, host and storage."""

from __future__ import annotations

from collections import Counter
from typing import Any

from ...adapters.tier_target import TierTarget
from ...adapters.tiers import TierFactory
from ...model.ghost import Tag, first_tag, next_tag
from ...model.host_order import HostOrder
from ...model.prefixes import Prefixes
from ...model.storage_recency import StorageUses, window_of
from ...model.tiers import TierModel
from ...model.two_tier_law import StorageLaw, TwoTierLaw
from ..cache.requests import NAMESPACES, Request
from ..cache.state import CacheState
from ..engine import Config
from .executor import TO_DEVICE, Executor, Flight, leading
from .requests import Load, Parked, Prefetch, Seen


class TierState(CacheState):
    """A manager with tiers under test, with its requests, executor and model.

    Attributes:
        executor: operations in flight, and the contents of host and storage.
        seen: where each prefix was after the last call.
        loads, parked, prefetches: by name of the request; a load that continues without its
            request, by name of the operation.
        to_store: prefixes that are new on the host and must be stored.
        stored: prefixes whose copy on the host was stored without a fault.
        to_copy: paths that must be written through.
        hits: number of hits of each prefix without a host copy since it is on the device.
        cancelled: operations that must be reported to the driver as cancelled.
        counted: expected counters.
        order: recency of each prefix on the host.
        uses: uses that must be reported to storage.
        evicted: prefixes that left the device since the last `take`.
        without_room: requests that found no room, while nothing has ended since.
    """

    target_type = TierTarget
    model_type = TierModel
    target: TierTarget

    def __init__(self, config: Config, factory: TierFactory) -> None:
        super().__init__(config, lambda num_blocks, block_size: factory(config), "full")
        assert isinstance(self.model, TierModel), "a world of tiers has a model of them"
        self.tier_model = self.model
        self.executor = Executor(self.device)
        self.prefixes = Prefixes()
        self.loads: dict[str, Load] = {}
        self.parked: dict[str, Parked] = {}
        self.prefetches: dict[str, Prefetch] = {}
        self.to_store: set[Tag] = set()
        self.stored: set[Tag] = set()
        self.to_copy: list[list[Tag]] = []
        self.hits: Counter[Tag] = Counter()
        self.cancelled: list[Flight] = []
        self.counted = dict.fromkeys(
            ("promoted_blocks", "stored_blocks", "fetched_blocks", "late_completions",
             "dropped_blocks"), 0,
        )  # fmt: skip
        self.order = HostOrder()
        self.evicted: set[Tag] = set()
        self.uses = StorageUses(window_of(config))
        self.without_room: set[str] = set()
        self.law = TwoTierLaw(config["num_blocks"], config["host_blocks"])
        self.storage_law = StorageLaw(
            config["num_blocks"], is_told=bool(config["at_once"] or config["law"])
        )
        self._generation = dict.fromkeys(NAMESPACES, 0)
        self.roots = {self.root_of(name) for name in NAMESPACES}
        self.shot = self.target.tier_snapshot()
        self.seen = Seen({}, {}, {}, set(), 0, ())

    def counts(self) -> dict[str, int]:
        """Expected counters of the device; loads without a request are no leases."""
        assert self.model is not None, "there is a model in a world of tiers"
        detached = sum(name.startswith("op ") for name in self.model.holdings)
        return {**super().counts(), "live_leases": len(self.model.holdings) - detached}

    # Calls, and what they change

    def ask(self, method: str, *arguments: Any) -> Any:
        """Call the manager below its device interface."""
        return self.target.ask(method, *arguments)

    def use(self, path: list[Tag], *, must: bool = True) -> None:
        """Record that the use of a path may, or must, be reported to storage."""
        now = self.num_admitted + self.counted["stored_blocks"]
        self.uses.use(now, path, must=must)

    def touch_all(self, path: list[Tag]) -> None:
        """Allow all prefixes with the same first block to count as used: pins hold whole runs."""
        first = self.prefixes.first
        self.order.touch(tag for tag in self.seen.host if first[tag] in path[:1])
        self.order.touch(path)

    def uncopied(self, before: Seen) -> set[Tag]:
        """Prefixes that an eviction may drop because write-through copies nothing then."""
        if self.config["write"] != "through":
            return set()
        return before.device.keys() - before.host.keys() - before.landing.keys()

    def tier_counts(self) -> dict[str, int]:
        """Counters of the tiers, as the manager reports them."""
        return dict(self.target.tier_snapshot().counts)

    # Operations

    def owner_of(self, copy: int) -> str:
        """The request that an operation loads or saves, or ""."""
        owners: dict[str, Load] | dict[str, Parked]
        for owners in (self.loads, self.parked):
            for name, owner in owners.items():
                if owner.copy == copy:
                    return name
        return ""

    def cancel_copy(self, copy: int, name: str) -> None:
        """Cancel an operation; a request that it loads ends."""
        for parked in self.parked.values():
            if copy in parked.writers:
                parked.writers.remove(copy)
                parked.failed = True
        for flight in self.executor.flights:
            if flight.copy.id == copy and not flight.cancelled:
                if not flight.has_result:
                    flight.cancelled = True
                    self.cancelled.append(flight)
                if name:
                    flight.is_detached = True
                    if name != flight.op:
                        self.tier_model.detach_private(name, flight.op)

    def continue_load(self, name: str, load: Load) -> None:
        """End a request while it is loaded; the operation continues without it."""
        op = f"op {load.copy}"
        self.loads[op] = load
        self.tier_model.detach_all(name, op)
        for flight in self.executor.flights:
            if flight.op == op:
                flight.owner = op

    def begin_report(self, flight: Flight, *, fenced: bool) -> None:
        """Prepare the model for a result or a fence."""
        model = self.tier_model
        model.fenced_op = flight.op if fenced else ""
        if flight.copy.kind in ("out", "fetch") and not flight.cancelled:
            results = zip(flight.copy.destinations, flight.ok, strict=True)
            model.written(flight.op, [block for block, ok in results if ok])
        if flight.copy.kind not in TO_DEVICE or not fenced:
            return
        model.actor, model.needed = flight.op if flight.is_detached else flight.owner, 0
        model.ending = flight.is_detached
        if not flight.is_detached:
            load = self.loads[flight.owner]
            come = load.num_hit + min(leading(flight.ok), load.num_host)
            model.holdings[flight.owner].computed = come * self.block_size

    def end_report(self, flight: Flight, *, fenced: bool) -> None:
        """Update the model after a result or a fence."""
        model = self.tier_model
        model.fenced_op, model.ending = "", False
        if fenced:
            model.fenced(flight.op)
            if flight.is_detached:
                model.abandoned(flight.op)

    # Prefixes

    def root_of(self, namespace: bytes) -> Tag:
        """Tag of the empty prefix; it changes with the weights of a namespace."""
        number = self._generation.get(namespace, 0)
        return first_tag(namespace + bytes([number]) if number else namespace)

    def tag_of(self, namespace: bytes, tokens: tuple[int, ...]) -> Tag:
        """The tag of a prefix."""
        if (namespace, tokens) not in self._tags:
            tag = self.root_of(namespace)
            for token in tokens:
                tag = next_tag(tag, token)
            self._tags[namespace, tokens] = tag
        return self._tags[namespace, tokens]

    def retag(self, request: Request) -> None:
        """Recompute the tags of a request."""
        request.root, request.tags = self.root_of(request.namespace), []
        request.extend_tags()
        self.learn(request)

    def learn(self, request: Request) -> None:
        """Enter the prefixes of a request."""
        keys: list[bytes] = []
        if self.config["storage"]:
            keys = list(self.target.ask("keys", request.tokens, request.namespace))
            self.storage_law.learn(keys)
        self.prefixes.learn(request.root, request.tags, self.block_size, keys)

    def renew(self, namespaces: list[bytes]) -> None:
        """Change the weights of some namespaces: their prefixes and storage keys are new."""
        self.target.has_acted = True  # the same blocks hold other prefixes
        for name in namespaces:
            self._generation[name] += 1
            self.roots.add(self.root_of(name))
        for prefix in [prefix for prefix in self._tags if prefix[0] in namespaces]:
            del self._tags[prefix]
        for request in self.requests.values():
            if request.namespace in namespaces:
                self.retag(request)
        current, prefixes = {self.root_of(name) for name in NAMESPACES}, self.prefixes
        for tag, key in prefixes.key.items():
            if prefixes.parent[prefixes.first[tag]] not in current:
                content = self.executor.storage.get(key)
                if content == prefixes.content[tag]:
                    del self.executor.storage[key]

    def depth_of(self, tag: Tag) -> int:
        """Number of blocks before the last block of a prefix."""
        return self.prefixes.depth[tag]

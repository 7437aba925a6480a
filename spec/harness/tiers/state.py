"""The state of a world with tiers: a `CacheState` with a virtual executor, host and storage."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import wraps
from typing import Any, TypeAlias

from ...adapters.cache import Snapshot
from ...adapters.tier_target import TierTarget
from ...adapters.tiers import TierFactory
from ...model.events import ANYTHING, Prefix
from ...model.ghost import Tag, first_tag
from ...model.tiers.operations import Load, TierModel
from ...model.tiers.residency import Residency, Step
from ...model.two_tier_law import StorageLaw, TwoTierLaw
from ...rules import tiers as rules
from ...rules.rule import Rule, require
from ..cache.requests import NAMESPACES, Request
from ..cache.state import CacheState
from ..engine import Config
from .configuration import window_of
from .executor import TO_DEVICE, Executor, Flight, leading

Apply: TypeAlias = Callable[..., bool]
"""Does an operation with a world and arguments; False if it does not apply."""


def checked(*, takes_room: bool = False, is_eviction: bool = False) -> Callable[[Apply], Apply]:
    """Return a decorator of operations: the state after each must be one that the model allows.

    Args:
        takes_room, is_eviction: see `Step`.
    """

    def decorate(apply: Apply) -> Apply:
        @wraps(apply)
        def checked_apply(world: TierState, *arguments: Any) -> bool:
            world.step = Step(
                world.see(), world.tiers.write, takes_room=takes_room, is_eviction=is_eviction
            )
            applies = apply(world, *arguments)
            if applies:
                world.learn_grown()
                world.see()
                world.tiers.allow(world.step)
                world.check_saving()
            return applies

        return checked_apply

    return decorate


class TierState(CacheState):
    """A manager with tiers under test, with its requests, executor and model.

    Attributes:
        tiers: the model.
        executor: operations in flight, and the contents of host and storage.
        cancelled: operations that must be reported to the driver as cancelled.
        without_room: requests that found no room, while nothing has ended since.
        told: storage keys that the manager knows to be in storage, by the last result for each; the
            one that it was told of longest ago is the first.
        most_told: number of them that its KV events name at most.
        law, storage_law: what a host and a storage with LRU eviction would hold.
        shot: the last snapshot.
        step: the operation that is being checked.
    """

    target_type = TierTarget
    model_type = TierModel
    target: TierTarget
    step: Step

    def __init__(self, config: Config, factory: TierFactory) -> None:
        super().__init__(config, lambda num_blocks, block_size: factory(config), "full")
        assert isinstance(self.model, TierModel), "a world of tiers has a model of them"
        self.tiers = self.model
        self.tiers.configure(config["write"], config["hits"], window_of(config))
        self.prefixes = self.tiers.prefixes
        self.executor = Executor(self.device)
        self.cancelled: set[int] = set()
        self.without_room: set[str] = set()
        self.told: dict[bytes, None] = {}
        bounds_told = "most_told" in self.target.can
        self.most_told: int = self.ask("most_told") if bounds_told else ANYTHING
        self._prefix_of_key: dict[bytes, Prefix] = {}
        self.law = TwoTierLaw(config["num_blocks"], config["host_blocks"])
        self.storage_law = StorageLaw(
            config["num_blocks"],
            self.prefixes,
            is_reported=bool(config["at_once"] or config["law"]),
        )
        self._generation = dict.fromkeys(NAMESPACES, 0)
        self.see()

    def counts(self) -> dict[str, int]:
        """Expected counters of the device; loads without a request are no leases."""
        detached = sum(name.startswith("op ") for name in self.tiers.holdings)
        return {**super().counts(), "live_leases": len(self.tiers.holdings) - detached}

    def findable(self, shot: Snapshot) -> dict[str, Collection[Prefix]]:
        """Return the prefixes that can be found, by tier; in storage, as the manager knows it."""
        in_storage = [self._prefix_of_key[key] for key in self.told]
        return {**super().findable(shot), "CPU": self.shot.host, "STORAGE": in_storage}

    def tell(self, flight: Flight) -> None:
        """Tell the manager what is in storage, by the results of a write or a lookup.

        Of one result, the manager forgets the last blocks first: they are found through the others.
        """
        good = [key for key, is_good in zip(flight.copy.keys, flight.ok, strict=True) if is_good]
        if flight.kind == "lookup":
            for key, is_good in zip(flight.copy.keys, flight.ok, strict=True):
                if is_good is False:
                    self.told.pop(key, None)
            good = list(flight.copy.keys[: leading(flight.ok)])
        for key in reversed(good):
            self.told.pop(key, None)
            self.told[key] = None
        for key in [*self.told][: max(len(self.told) - self.most_told, 0)]:
            del self.told[key]
            self.situations["forgotten in events"] += 1

    # Calls, and what they may change

    def ask(self, method: str, *arguments: Any) -> Any:
        """Call the manager below its device interface."""
        return self.target.ask(method, *arguments)

    def see(self) -> Residency:
        """Return where each prefix is, and enter it in the model."""
        if self.target.has_acted:
            self.target.has_acted = False
            self.shot, tag_of = self.target.tier_snapshot(), self.tag_of
            self.tiers.moved(
                Residency(
                    {entry.tag: block for block, entry in self.tiers.cached.items()},
                    {tag_of(prefix): block for prefix, block in self.shot.host.items()},
                    {tag_of(prefix): block for prefix, block in self.shot.offloading.items()},
                    frozenset(tag_of(prefix) for prefix in self.shot.promoting),
                    len(self.shot.free),
                    tuple(self.shot.idle),
                )
            )
        return self.tiers.now

    def check_saving(self) -> None:
        """Check that a parked request holds device blocks as long as an operation copies them."""
        for name, parked in self.tiers.parked.items():
            _, saved, failed = self.ask("parked", name)
            holds, under_way = name in self.tiers.holdings, bool(parked.writers)
            require(saved != under_way and holds == under_way, rules.T34, "{} operations save {}, "
                    "which reports saved={}, and has {} blocks", len(parked.writers), name, saved,
                    len(self.tiers.holdings[name].table) if holds else "no")  # fmt: skip
            right = under_way or failed == parked.failed
            require(right, rules.T36, "{} reports failed={}", name, failed)

    def ask_in_vain(self, rule: Rule, method: str, *arguments: Any) -> Any:
        """Make a call that must change no block."""
        before, taken = self.see(), dict(self.tiers.host)
        answer = self.ask(method, *arguments)
        same = self.see() == before and self.tiers.host == taken
        require(same, rule, "{}{} is not to be heard, and blocks move", method, arguments)
        return answer

    # Operations

    def cancel_copy(self, copy: int, name: str) -> None:
        """Cancel an operation; a request that it loads ends."""
        for parked in self.tiers.parked.values():
            if copy in parked.writers:
                parked.writers.remove(copy)
                parked.failed = True
        for flight in self.executor.flights:
            if flight.copy.id == copy and not flight.cancelled:
                if not flight.has_result:
                    flight.cancelled = True
                    self.cancelled.add(copy)
                if name:
                    flight.is_detached = True
                    if name != flight.op:
                        self.tiers.detach(name, flight.op, shared=False)

    def continue_load(self, name: str, load: Load) -> None:
        """End a request while it is loaded; the operation continues without it."""
        op = f"op {load.copy}"
        self.tiers.loads[op] = load
        self.tiers.detach(name, op, shared=True)
        for flight in self.executor.flights:
            if flight.op == op:
                flight.owner = op

    def report(self, method: str, flight: Flight, *arguments: Any, fenced: bool) -> Any:
        """Report a result or a fence; return the answer."""
        model, kind, detached = self.tiers, flight.kind, flight.is_detached
        if kind in ("out", "fetch") and not flight.cancelled:
            bad = flight.bad_blocks()
            good = [block for block in flight.copy.destinations if block not in bad]
            model.written(flight.op, good)
        if fenced:
            model.fenced(flight.op)
        if kind in TO_DEVICE and fenced:
            model.actor, model.needed = flight.op if detached else flight.owner, 0
            model.ending = detached
            if not detached:
                load = model.loads[flight.owner]
                come = load.num_hit + min(leading(flight.ok), load.num_host)
                model.holdings[flight.owner].computed = come * self.block_size
        answer = self.ask(method, flight.copy.id, *arguments)
        if fenced and detached:
            model.abandoned(flight.op)
        return answer

    # Prefixes

    def root_of(self, namespace: bytes) -> Tag:
        """Tag of the empty prefix; it changes with the weights of a namespace."""
        number = self._generation.get(namespace, 0)
        return first_tag(namespace + bytes([number]) if number else namespace)

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
        self.prefixes.learn(request.root, request.tags, self.block_size, keys)
        for index, key in enumerate(keys, 1):
            prefix = request.namespace, tuple(request.tokens[: index * self.block_size])
            self._prefix_of_key[key] = prefix

    def learn_grown(self) -> None:
        """Enter the prefixes of the requests that have grown."""
        for request in self.running():
            path = request.path(self.block_size)
            if path and path[-1] not in self.prefixes.content:
                self.learn(request)

    def renew(self, namespaces: list[bytes]) -> None:
        """Change the weights of some namespaces: their prefixes and storage keys are new."""
        self.target.has_acted = True  # the same blocks hold other prefixes
        for name in namespaces:
            self._generation[name] += 1
        for prefix in [prefix for prefix in self._tags if prefix[0] in namespaces]:
            del self._tags[prefix]
        for request in self.requests.values():
            if request.namespace in namespaces:
                self.retag(request)
        roots, root_of = {self.root_of(name) for name in NAMESPACES}, self.prefixes.root_of
        self.executor.storage = {
            key: content
            for key, content in self.executor.storage.items()
            if root_of(content[-1]) in roots
        }

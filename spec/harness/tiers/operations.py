"""The operations of a world with tiers: its table, and weights that prefer some of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ..cache import end as cache_end
from ..cache import operations as cache_operations
from ..cache.compute import fail
from ..cache.operations import CACHE_TABLE, new_name, num_more
from ..cache.requests import MAX_WAITING, NAMESPACES, draw_prompt
from ..engine import Below
from ..operations import ALWAYS, Groups, Operation, Table, name_drawn, number
from . import copies, requests, storage
from .configuration import FEATURES
from .executor import UNANSWERED
from .state import TierState
from .take import take

FAULTS: Final = {"out": 1, "in": 4, "fork": 4, "store": 2, "fetch": 2, "lookup": 2}
"""The bit of ``faults`` that lets a copy fail, by its kind."""


def weights_of(rare: int, often: int) -> dict[str, int]:
    """Return the weights of a world.

    Args:
        rare: one bit per feature that makes it rare.
        often: one bit per operation that makes it three times as frequent.
    """
    weights = TIER_TABLE.weights()
    for bit, words in enumerate(FEATURES.values()):
        if rare >> bit & 1:
            weights.update((word, 1 if word != "reset" else 0) for word in words)
    for bit, word in enumerate(weights):
        if often >> bit & 1:
            weights[word] *= 3
    return weights


def weights_now(world: TierState, weights: dict[str, int]) -> dict[str, int]:
    """Return the weights of a world in its present state."""
    if world.tiers.prefetches or world.tiers.through.paths:  # an eviction may drop what they need
        weights = {**weights, "evict": 3 * weights["evict"]}
    if with_tail := _with_tail(world):  # best loaded behind a block that only the host has
        word = "admit" if _on_host_alone(world, with_tail) else "evict"
        weights = {**weights, word: 4 * weights[word], "unpark": 1}
    if any(flight.has_result for flight in world.executor.flights):  # and no fence
        weights = {**weights, "reset": 5 * weights["reset"]}
    return weights


def _with_tail(world: TierState) -> list[str]:
    """Parked requests that will load a block that is not whole, behind others."""
    return [name for name, parked in world.tiers.parked.items()
            if parked.is_saved and parked.keeps_tail and parked.path
            and parked.num_tokens % world.block_size]  # fmt: skip


def _on_host_alone(world: TierState, names: Sequence[str]) -> list[str]:
    """Those of some parked requests whose last whole block is not on the device."""
    parked, on_device = world.tiers.parked, world.tiers.now.device
    return [name for name in names if parked[name].path[-1] not in on_device]


def groups(world: TierState) -> Groups:
    """Return the names that operations apply to: of requests, of copies, or "" for none."""
    if world.config["law"]:
        return {"law": [""]}
    cache, model = cache_operations.groups(world), world.tiers
    saving = [name for name, parked in model.parked.items() if parked.writers]
    waiting, running = cache["waiting"], world.running()
    fitting = [name for name in waiting if _fits(world, name)]
    preferred = _on_host_alone(world, _with_tail(world)) or fitting
    flights = dict(zip(world.executor.names(), world.executor.flights, strict=True))
    return {
        **cache,
        "submit": [""] if len(fitting) < MAX_WAITING else [],
        "admissible": [name for name in cache["admissible"]
                       if name not in saving and name not in world.without_room
                       and (name in preferred or not preferred)],
        "to repeat": [name for name in cache["running"] if name not in model.loads],
        "to park": [request.name for request in running
                    if (request.written or request.job) and request.name not in model.loads
                    and request.name not in world.without_room],
        "parked": list(model.parked),
        "to fork": [request.name for request in running if not request.job and request.written]
        if len(running) < world.config["max_running"]
        else [],
        "to prefetch": _to_prefetch(world, waiting),
        "to store": [name for name in waiting if _lacks(world, name)]
        if world.config["storage"]
        else [],
        "prefetching": list(model.prefetches),
        "to evict": [""] if model.unused() else [],
        "to take": [""] if _is_decided(world) else [],
        "without a result": [name for name in flights if not flights[name].has_result],
        "to fence": [name for name in flights if not flights[name].is_open],
        "undecided": [""] if world.target.may_have_decided else [],
        "fenced": [""] if world.executor.ended else [],
        "with a result": [name for name in flights if flights[name].has_result],
        "going on": [name for name in flights if flights[name].is_open],
    }  # fmt: skip


def _to_prefetch(world: TierState, waiting: Sequence[str]) -> list[str]:
    """Requests that may prefetch: those with blocks in storage, or all if there are none."""
    if not world.config["storage"]:
        return []
    names = [name for name in waiting if name not in world.tiers.prefetches]
    return [name for name in names if _finds(world, name)] or names


def _finds(world: TierState, name: str) -> bool:
    """Whether storage has the block after the cached blocks of a request."""
    for tag in world.requests[name].path(world.block_size):
        if tag not in world.tiers.now.device and tag not in world.tiers.now.host:
            return world.prefixes.key[tag] in world.executor.storage
    return False


def _lacks(world: TierState, name: str) -> bool:
    """Whether some block of a request is not in storage."""
    path, key = world.requests[name].path(world.block_size), world.prefixes.key
    return any(key[tag] not in world.executor.storage for tag in path)


def _fits(world: TierState, name: str) -> bool:
    num_blocks: int = world.config["num_blocks"]
    return world.blocks_for(len(world.requests[name].tokens)) <= num_blocks


def _is_decided(world: TierState) -> bool:
    """Whether there may be operations to take."""
    counts, num_flights = world.shot.counts, len(world.executor.flights)
    return bool(
        counts.get("operations", 0) > num_flights or world.tiers.through.paths or world.cancelled
    )


# How arguments are drawn


def prompt(world: TierState, name: str, below: Below) -> list[int]:
    """A prompt as for a cache, of which most fit: a request that is too large never runs."""
    fits = below(5)
    drawn = draw_prompt(below, world.past, world.config)
    return drawn[: world.config["num_blocks"] * world.block_size] if fits else drawn


def number_of_some(world: TierState, name: str, below: Below) -> int:
    """A number of blocks, mostly one; all, if a parked request is to load some before its tail."""
    return len(world.tiers.unused()) if _with_tail(world) else 1 + below(1 + below(4))


def tier(world: TierState, name: str, below: Below) -> str:
    """The tier that keeps a parked request."""
    return "storage" if world.config["storage"] and below(2) else "host"


def bad(world: TierState, name: str, below: Below) -> list[int]:
    """The blocks of a copy that fail, if this world lets such a copy fail."""
    flight = world.executor.find(name)
    assert flight is not None, "an operation that is under way has a name"
    if not world.config["faults"] & FAULTS[flight.kind] or below(3) == 0:
        return []
    if flight.kind == "lookup" and below(2):
        return [UNANSWERED]
    num_blocks, load = flight.copy.num_blocks, world.tiers.loads.get(flight.owner)
    has_tail = load is not None and load.tail > 0
    if num_blocks > 1 and (has_tail or below(2)):  # a hole: what follows it arrives
        return [below(num_blocks - 1)]
    return [place for place in range(num_blocks) if below(3) == 0] or [below(num_blocks)]


def is_fenced(world: TierState, name: str, below: Below) -> int:
    """Whether the fence comes with the result."""
    return int(below(5) >= (0, 1, 3)[world.config["fences"]])


def past_copy(world: TierState, name: str, below: Below) -> int:
    """One of the latest copies that were fenced."""
    return below(len(world.executor.ended))


def maybe_first(world: TierState, name: str, below: Below) -> list[int]:
    """No block of a copy, or its first."""
    return [0] if below(2) else []


def some_namespaces(world: TierState, name: str, below: Below) -> list[int]:
    """Some of the namespaces."""
    return [place for place in range(len(NAMESPACES)) if below(2)]


def namespace(world: TierState, name: str, below: Below) -> int:
    """The first namespace, or sometimes any."""
    return below(len(NAMESPACES)) if below(4) == 0 else 0


_CACHE: Final = {each.word: each.arguments for each in CACHE_TABLE}
_NAME: Final = {"name": name_drawn}

TIER_TABLE: Final[Table[TierState]] = Table(groups, [
    Operation("submit", requests.submit, 30, "submit", {**_CACHE["submit"], "prompt": prompt}),
    Operation("admit", requests.admit, 40, "admissible", _NAME),
    Operation("forward", requests.forward, 80, "to compute", _CACHE["forward"]),
    Operation("append", requests.append, 15, "to grow", _CACHE["append"]),
    Operation("finish", requests.finish, 8, "running", _NAME),
    Operation("match", requests.match, 10, "waiting", _NAME, needs="match"),
    Operation("append_batch", requests.append_batch, 24, "to grow", _CACHE["append_batch"],
              needs="append_batch"),
    Operation("launch", requests.launch, 16, "to compute", _CACHE["launch"]),
    Operation("done", requests.done, 30, "in flight", _CACHE["done"]),
    Operation("fail", fail, 4, "in flight", _CACHE["fail"]),
    Operation("again", requests.publish_again, 4, "to repeat", _CACHE["again"]),
    Operation("preempt", requests.preempt, 4, "running", _NAME),
    Operation("evict", requests.evict, 20, "to evict", {"num_blocks": number_of_some}),
    Operation("reset", storage.reset, 3, ALWAYS, {"namespaces": some_namespaces}),
    Operation("misuse", cache_end.misuse, 2, "misuse", _CACHE["misuse"], needs="misuse"),
    Operation("check", cache_end.check, 3, needs="check"),
    Operation("drain", storage.drain, 1),
    Operation("park", requests.park, 40, "to park", {**_NAME, "where": tier}),
    Operation("unpark", requests.unpark, 8, "parked", _NAME),
    Operation("fork", requests.fork, 10, "to fork", {**_NAME, "child": new_name, "more": num_more}),
    Operation("prefetch", storage.prefetch, 24, "to prefetch", _NAME),
    Operation("cancel", storage.cancel, 7, "prefetching", _NAME),
    Operation("elsewhere", storage.elsewhere, 24, "to store",
              {**_NAME, "num_blocks": number(6, 1)}),
    Operation("take", take, 30, "to take"),
    Operation("result", copies.result, 150, "without a result",
              {"copy": name_drawn, "bad": bad, "fenced": is_fenced}),
    Operation("fence", copies.fence, 30, "to fence", {"copy": name_drawn}),
    Operation("late", copies.late, 4, "fenced",
              {"copy": past_copy, "bad": maybe_first, "kind": number(3)}),
    Operation("second", copies.second, 4, "with a result", {"copy": name_drawn, "bad": bad}),
    Operation("early", copies.early, 3, "undecided"),
    Operation("wrong_result", copies.wrong_result, 4, "going on",
              {"copy": name_drawn, "kind": number(4)}),
    Operation("serve", storage.serve, 1, "law",
              {"name": new_name, "prompt": cache_operations.prompt, "namespace": namespace}),
])  # fmt: skip

"""Weighted random choice of the next operation in a world with tiers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from ..cache import draw as cache_draw
from ..cache.requests import MAX_WAITING, NAMESPACES, draw_prompt
from ..engine import Below, Operation
from .executor import MOVES
from .state import TierState

WEIGHTS: Final = {
    **cache_draw.WEIGHTS,
    "admit": 40,
    "forward": 80,
    "match": 10,
    "append": 15,
    "finish": 8,
    "preempt": 4,
    "misuse": 2,
    "check": 3,
    "append_batch": 8,
    "evict": 12,
    "park": 40,
    "unpark": 8,
    "fork": 10,
    "prefetch": 24,
    "cancel": 5,
    "elsewhere": 24,
    "take": 30,
    "result": 150,
    "fence": 30,
    "late": 4,
    "second": 4,
    "early": 3,
    "wrong_result": 4,
    "reset": 3,
}

FEATURES: Final = {
    "park": ("park", "unpark"),
    "fork": ("fork",),
    "prefetch": ("prefetch", "cancel", "elsewhere"),
    "launch": ("launch", "done", "fail", "again"),
    "append": ("append", "append_batch"),
    "match": ("match",),
    "preempt": ("preempt",),
    "evict": ("evict",),
    "reset": ("reset",),
    "misuse": ("misuse", "late", "second", "early", "wrong_result"),
}
"""Groups of operations that a world can make rare, so that the others meet more often."""

WRITES: Final = ("exclusive", "back", "through")


@dataclass(frozen=True)
class About:
    """The focus of a world.

    Attributes:
        features: features that are never rare.
        words: operations that are more frequent.
        sizes: fixed parts of the configuration.
        most_blocks, most_host_blocks: maximum blocks of the device and of the host.
    """

    features: tuple[str, ...]
    words: tuple[str, ...] = ()
    sizes: Mapping[str, Any] = field(default_factory=dict)
    most_blocks: int = 9
    most_host_blocks: int = 9


ABOUT: Final = (
    About(tuple(FEATURES)),
    About(("evict", "preempt"), ("evict", "finish"), {"write": "through", "storage": 0}, 4, 5),
    About(("evict", "preempt"), ("finish",), {"write": "exclusive", "storage": 0}, 6, 6),
    About(("park", "evict"), ("admit",), most_host_blocks=4),
    About(("park", "evict"), ("park",), {"storage": 1, "faults": 2}),
    About(("park", "append"), ("evict",), {"write": "through", "hits": 2, "at_once": 1}, 9, 4),
    About(("prefetch", "evict"), ("elsewhere", "prefetch"), {"storage": 1}, 6),
    About(("prefetch", "park", "reset"), ("elsewhere", "reset"), {"storage": 1}, 6),
)


def draw_tiers(below: Below) -> dict[str, Any]:
    """Draw the focus of a world, and the sizes and policies below the device."""
    write = WRITES[below(3)]
    law = write == "exclusive" and below(4) == 0
    about = ABOUT[0 if law else below(len(ABOUT))]
    rare = below(1 << len(FEATURES)) | below(1 << len(FEATURES))
    for bit, feature in enumerate(FEATURES):
        if feature in about.features:
            rare &= ~(1 << bit)
    often = below(1 << len(WEIGHTS)) & below(1 << len(WEIGHTS)) if below(3) else 0
    for bit, word in enumerate(WEIGHTS):
        if word in about.words:
            often |= 1 << bit
    write = about.sizes.get("write", write)
    return {
        "num_blocks": 2 + below(about.most_blocks - 1),
        "block_size": 1 + below(3),
        "alphabet": 1 + below(3),
        "rare": rare,
        "often": often,
        "host_blocks": 1 + below(about.most_host_blocks),
        "write": write,
        "hits": max(below(4) - 1, 0) if write == "through" else 0,
        "storage": int(below(3) > 0),
        "law": int(law),
        "at_once": int(below(5) == 0 and not law),
        "faults": below(4),
        "fences": below(3),
        **about.sizes,
    }


def weights_of(rare: int, often: int) -> dict[str, int]:
    """Return the weights of a world.

    Args:
        rare: one bit per feature that makes it rare.
        often: one bit per operation that makes it three times as frequent.
    """
    weights = dict(WEIGHTS)
    for bit, words in enumerate(FEATURES.values()):
        if rare >> bit & 1:
            weights.update((word, 1 if word != "reset" else 0) for word in words)
    for bit, word in enumerate(WEIGHTS):
        if often >> bit & 1:
            weights[word] *= 3
    return weights


def draw(world: TierState, weights: Mapping[str, int], below: Below) -> Operation:
    """Draw an operation that applies now."""
    if world.config["law"]:
        prompt = draw_prompt(below, world.past, world.config)
        namespace = below(len(NAMESPACES)) if below(4) == 0 else 0
        return ["serve", f"r{len(world.past) + 1}", prompt, namespace]
    choices = enabled(world)
    if world.prefetches or world.to_copy:  # an eviction may drop what they need
        weights = {**weights, "evict": 3 * weights["evict"]}
    if any(flight.has_result for flight in world.executor.flights):  # and no fence
        weights = {**weights, "reset": 5 * weights["reset"]}
    pick = below(sum(weights[word] for word in choices))
    for word in choices:
        pick -= weights[word]
        if pick < 0:
            return draw_operation(world, word, choices[word], below)
    raise AssertionError("the weights do not add up")


def enabled(world: TierState) -> dict[str, list[str]]:
    """Return the operations that apply, each with its possible names."""
    choices = cache_draw.enabled(world)
    saving = [name for name, parked in world.parked.items() if parked.writers]
    waiting = [name for name, request in world.requests.items() if request.state == "waiting"]
    fitting = [name for name in waiting if _fits(world, name)]
    running = [request for request in world.running() if not request.job and request.written]
    flights = dict(zip(world.executor.names(), world.executor.flights, strict=True))
    ended = [name for name, flight in flights.items() if flight.has_result or flight.cancelled]
    more = {
        "submit": [""] if len(fitting) < MAX_WAITING else [],
        "admit": [name for name in choices.get("admit", [])
                  if name not in saving and name not in world.without_room
                  and (name in fitting or not fitting)],
        "again": [name for name in choices.get("again", []) if name not in world.loads],
        "park": [request.name for request in world.running()
                 if (request.written or request.job) and request.name not in world.loads
                 and request.name not in world.without_room],
        "unpark": list(world.parked),
        "fork": [request.name for request in running]
        if len(world.running()) < world.config["max_running"]
        else [],
        "prefetch": _to_prefetch(world, waiting),
        "elsewhere": [name for name in waiting if _lacks(world, name)]
        if world.config["storage"]
        else [],
        "cancel": [name for name, prefetch in world.prefetches.items() if prefetch.is_wanted],
        "evict": [""] if world.tier_model.num_unused() else [],
        "take": [""] if _is_decided(world) else [],
        "result": [name for name, flight in flights.items()
                   if flight.cancelled or not flight.has_result],
        "fence": ended,
        "early": [""] if world.target.may_have_decided else [],
        "late": [""] if world.executor.ended else [],
        "second": [name for name in ended if not flights[name].cancelled],
        "wrong_result": [name for name in flights if name not in ended],
    }  # fmt: skip
    return {word: names for word, names in {**choices, **more}.items() if names}


def _to_prefetch(world: TierState, waiting: list[str]) -> list[str]:
    """Requests that may prefetch: those with blocks in storage, or all if there are none."""
    if not world.config["storage"]:
        return []
    names = [name for name in waiting if name not in world.prefetches]
    return [name for name in names if _finds(world, name)] or names


def _finds(world: TierState, name: str) -> bool:
    """Whether storage has the block after the cached blocks of a request."""
    for tag in world.requests[name].path(world.block_size):
        if tag not in world.seen.device and tag not in world.seen.host:
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
    return bool(counts.get("operations", 0) > num_flights or world.to_copy or world.cancelled)


def draw_operation(world: TierState, word: str, names: list[str], below: Below) -> Operation:
    """Draw the arguments of an operation."""
    name = names[below(len(names))] if len(names) > 1 else names[0]
    if word == "submit" and below(5):  # a request that is too large never runs
        operation = cache_draw.draw_operation(world, word, names, below)
        del operation[2][world.config["num_blocks"] * world.block_size :]
        return operation
    if word == "evict":
        return [word, 1 + below(1 + below(4))]
    if word == "park":
        return [word, name, "storage" if world.config["storage"] and below(2) else "host"]
    if word == "fork":
        return [word, name, f"r{len(world.past) + 1}", below(8 + 2 * world.block_size)]
    if word == "result":
        is_late = below(5) < (0, 1, 3)[world.config["fences"]]
        return [word, name, _draw_bad(world, name, below), int(not is_late)]
    if word == "second":
        return [word, name, _draw_bad(world, name, below)]
    if word == "late":
        return [word, below(len(world.executor.ended)), [0] if below(2) else [], below(3)]
    if word == "wrong_result":
        return [word, name, below(4)]
    if word == "reset":
        return [word, [number for number in range(len(NAMESPACES)) if below(2)]]
    if word == "elsewhere":
        return [word, name, 1 + below(6)]
    if word in ("unpark", "prefetch", "cancel", "take", "fence", "early"):
        return [word, name] if name else [word]
    return cache_draw.draw_operation(world, word, names, below)


def _draw_bad(world: TierState, name: str, below: Below) -> list[int]:
    flight = world.executor.find(name)
    assert flight is not None, "an operation that is under way has a name"
    kind = 1 if flight.copy.kind in MOVES else 2
    if not world.config["faults"] & kind or below(3) == 0:
        return []
    return [place for place in range(flight.copy.num_blocks) if below(3) == 0] or [
        below(flight.copy.num_blocks)
    ]

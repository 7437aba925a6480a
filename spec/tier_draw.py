"""Which operation comes next in a world of tiers: weighed, and only what applies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from . import cache_draw
from .cache_requests import NAMESPACES, draw_prompt
from .engine import Below, Operation

if TYPE_CHECKING:
    from .tier_world import TierWorld

WEIGHTS: Final = {
    **cache_draw.WEIGHTS,
    "match": 10,
    "append": 15,
    "finish": 8,
    "preempt": 4,
    "misuse": 2,
    "check": 1,
    "append_batch": 8,
    "evict": 18,
    "park": 40,
    "unpark": 8,
    "fork": 8,
    "prefetch": 24,
    "cancel": 5,
    "elsewhere": 14,
    "take": 40,
    "result": 150,
    "fence": 30,
    "late": 4,
    "second": 2,
    "early": 3,
    "wrong_result": 2,
    "reset": 5,
}

COMMON: Final = (*cache_draw.COMMON, "take", "result", "fence")

WRITES: Final = ("exclusive", "back", "through")


def draw_tiers(below: Below) -> dict[str, Any]:
    """Draw the sizes and policies below the device."""
    write = WRITES[below(3)]
    bits = 1 << len(WEIGHTS)
    law = write == "exclusive" and below(3) == 0
    return {
        "block_size": 1 + below(3),
        "rare": below(bits) & below(bits) if below(3) else 0,
        "often": below(bits) & below(bits) if below(3) else 0,
        "host_blocks": 1 + below(10),
        "write": write,
        "hits": max(below(4) - 1, 0) if write == "through" else 0,
        "storage": 0 if law else int(below(3) > 0),
        "law": int(law),
        "at_once": int(below(10) == 0),
    }


def weights_of(rare: int, often: int) -> dict[str, int]:
    """Return the weights of a world; see `cache_draw.weights_of`."""
    weights = dict(WEIGHTS)
    others = [word for word in WEIGHTS if word not in COMMON]
    for bit, word in enumerate(others):
        if rare >> bit & 1:
            weights[word] = 1 if word != "reset" else 0
    for bit, word in enumerate(WEIGHTS):
        if often >> bit & 1:
            weights[word] *= 3
    return weights


def draw(world: TierWorld, below: Below) -> Operation:
    """Draw an operation that applies now."""
    if world.config["law"]:
        prompt = draw_prompt(below, world.past, world.config)
        namespace = below(len(NAMESPACES)) if below(4) == 0 else 0
        return ["serve", f"r{len(world.past) + 1}", prompt, namespace]
    choices = enabled(world)
    weights = world.weights
    if world.prefetches:  # what a prefetch follows may go before it arrives
        weights = {**weights, "evict": 4 * weights["evict"]}
    pick = below(sum(weights[word] for word in choices))
    for word in choices:
        pick -= weights[word]
        if pick < 0:
            return draw_operation(world, word, choices[word], below)
    raise AssertionError("the weights do not add up")


def enabled(world: TierWorld) -> dict[str, list[str]]:
    """Return the words of the operations that apply, each with the names it may name."""
    choices = cache_draw.enabled(world)
    saving = [name for name, parked in world.parked.items() if parked.writers]
    waiting = [name for name, request in world.requests.items() if request.state == "waiting"]
    running = [request for request in world.running() if not request.job and request.written]
    flights = dict(zip(world.executor.names(), world.executor.flights, strict=True))
    ended = [name for name, flight in flights.items() if flight.has_result or flight.given_up]
    more = {
        "admit": [name for name in choices.get("admit", []) if name not in saving],
        "again": [name for name in choices.get("again", []) if name not in world.loads],
        "park": [request.name for request in world.running() if request.written or request.job],
        "unpark": list(world.parked),
        "fork": [request.name for request in running]
        if len(world.running()) < world.config["max_running"]
        else [],
        "prefetch": [name for name in waiting if name not in world.prefetches]
        if world.config["storage"]
        else [],
        "elsewhere": waiting if world.config["storage"] else [],
        "cancel": [name for name, prefetch in world.prefetches.items() if prefetch.is_wanted],
        "take": [""],
        "result": [name for name, flight in flights.items()
                   if flight.given_up or not flight.has_result],
        "fence": ended,
        "early": [""] if not world.outbox_is_empty else [],
        "late": [""] if world.executor.ended else [],
        "second": [name for name in ended if not flights[name].given_up],
        "wrong_result": [name for name in flights if name not in ended],
    }  # fmt: skip
    return {word: names for word, names in {**choices, **more}.items() if names}


def draw_operation(world: TierWorld, word: str, names: list[str], below: Below) -> Operation:
    """Draw what an operation needs besides its word."""
    name = names[below(len(names))] if len(names) > 1 else names[0]
    if word == "park":
        return [word, name, "storage" if world.config["storage"] and below(2) else "host"]
    if word == "fork":
        return [word, name, f"r{len(world.past) + 1}", below(8 + 2 * world.block_size)]
    if word == "result":
        often = 2 if name.startswith(("fetch", "lookup")) else 5
        return [word, name, _draw_bad(world, name, below), int(below(often) > 0)]
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


def _draw_bad(world: TierWorld, name: str, below: Below) -> list[int]:
    flight = world.executor.find(name)
    assert flight is not None, "an operation that is under way has a name"
    if below(2 if flight.copy.kind in ("out", "store") else 4):
        return []
    return [place for place in range(flight.copy.num_blocks) if below(3) == 0] or [
        below(flight.copy.num_blocks)
    ]

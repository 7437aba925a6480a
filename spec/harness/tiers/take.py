"""The operation `take`: checks of each copy that the manager hands out."""

from __future__ import annotations

from ...rules import tiers as rules
from ...rules.rule import require
from .checks import check_lost, check_outbox, see
from .executor import Flight
from .requests import Seen
from .state import TierState


def take(world: TierState) -> bool:
    """Take the requested operations and begin them."""
    before = see(world)
    world.order.touch(tag for path in world.to_copy for tag in path)
    used = world.ask("used")
    world.uses.tell(used, world.prefixes)
    world.storage_law.use(used)
    world.situations["storage is told of uses"] += bool(used)
    copies = world.ask("take")
    see(world)
    flights = world.executor.begin(copies)
    evicted, world.evicted = world.evicted, set()
    for flight in flights:
        flight.evicted = evicted
        copy = flight.copy
        written = copy.destinations if copy.kind in ("out", "fetch") else ()
        read = copy.sources if copy.kind == "store" else ()
        world.tier_model.dispatched(flight.op, written, read)
    for flight in flights:
        CHECKS[flight.copy.kind](world, flight)
    cancelled = set(world.ask("take_cancelled"))
    wanted = {flight.copy.id for flight in world.cancelled}
    world.cancelled.clear()
    require(cancelled == wanted, rules.T6, "cancelled are {}, told {}", wanted, cancelled)
    _check_stores(world, flights)
    _check_through(world, before, flights)
    check_lost(world, before, needs_room=True)
    check_outbox(world)
    return True


def _begin_out(world: TierState, flight: Flight) -> None:
    copy, content = flight.copy, world.prefixes.content
    flight.owner = world.owner_of(copy.id)
    parked = world.parked.get(flight.owner)
    whole = [read for read in flight.read if content.get(read[-1]) == read]
    tail = 0
    if parked is not None:
        request = world.requests[flight.owner]
        parked.blocks.update(copy.destinations)
        tail = parked.num_tokens % world.block_size
        if tail:
            tags = request.tags[parked.num_tokens - tail : parked.num_tokens]
            found = flight.read[-1][:tail]
            require(found == tags, rules.T2, "the tail of {} is not saved", flight.owner)
    require(
        len(whole) >= len(flight.read) - bool(tail),
        rules.T2,
        "{} copies blocks {} to the host, some without KV",
        flight.op,
        copy.sources,
    )
    landing = world.seen.landing
    for place in range(len(flight.read) - bool(tail)):
        tag = flight.read[place][-1]
        if tag in landing:
            require(
                landing[tag] == copy.destinations[place],
                rules.T4,
                "{} writes a prefix to host block {}, it is awaited in {}",
                flight.op,
                copy.destinations[place],
                landing[tag],
            )


def _begin_in(world: TierState, flight: Flight) -> None:
    copy = flight.copy
    name = world.owner_of(copy.id)
    require(name, rules.T6, "{} loads nobody", flight.op)
    flight.owner, load = name, world.loads[name]
    outlives = name == flight.op
    table = world.tier_model.table(name) if outlives else world.target.block_table(name)
    wanted = table[load.num_hit :][: load.num_host + bool(load.tail)]
    require(
        list(copy.destinations) == wanted,
        rules.T9,
        "{} is loaded into blocks {}, not {}",
        name,
        copy.destinations,
        wanted,
    )
    found = [tag for read in flight.read for tag in read][: len(load.tags)]
    require(found == load.tags, rules.T2, "{} is loaded with what is not its own", name)


def _begin_store(world: TierState, flight: Flight) -> None:
    prefixes = world.prefixes
    for read, key in zip(flight.read, flight.copy.keys, strict=True):
        tag = read[-1]
        whole = prefixes.content.get(tag) == read
        require(whole, rules.T2, "{} stores a block without KV", flight.op)
        require(prefixes.key[tag] == key, rules.T5, "{} stores KV under another key", flight.op)


def _begin_lookup(world: TierState, flight: Flight) -> None:
    _begin_prefetch(world, flight, "lookup", "asked")


def _begin_fetch(world: TierState, flight: Flight) -> None:
    _begin_prefetch(world, flight, "found", "fetch")


def _begin_prefetch(world: TierState, flight: Flight, before: str, after: str) -> None:
    copy = flight.copy
    for name, prefetch in world.prefetches.items():
        if not prefetch.is_old and world.ask("asking", name) == copy.id:
            first, number = prefetch.num_known, len(prefetch.path)
            number = prefetch.num_found if after == "fetch" else number - first
            keys = [world.prefixes.key[tag] for tag in prefetch.path[first : first + number]]
            wanted = prefetch.stage == before and keys == list(copy.keys)
            require(wanted, rules.T25, "{} asks for {} blocks, not {}, or for others", name,
                    len(copy.keys), len(keys))  # fmt: skip
            prefetch.stage, flight.owner = after, name
            prefetch.blocks.update(copy.destinations)
            return
    require(False, rules.T25, "{} is for nobody", flight.op)


CHECKS = {
    "out": _begin_out,
    "in": _begin_in,
    "fork": _begin_in,
    "store": _begin_store,
    "lookup": _begin_lookup,
    "fetch": _begin_fetch,
}


def _check_stores(world: TierState, flights: list[Flight]) -> None:
    asked = [read[-1] for flight in flights if flight.copy.kind == "store" for read in flight.read]
    for tag in asked:
        require(tag in world.to_store, rules.T19, "a block is stored again")
        world.to_store.remove(tag)
    kept = [tag for tag in world.to_store if tag in world.seen.host]
    require(not kept, rules.T19, "{} new copies are not stored", len(kept))
    world.to_store.clear()


def _check_through(world: TierState, before: Seen, flights: list[Flight]) -> None:
    if world.config["write"] != "through":
        return
    seen, hits = world.seen, world.config["hits"]
    noted = {tag for path in world.to_copy for tag in path}
    for flight in flights:
        if flight.copy.kind != "out" or flight.owner:
            continue
        for read, source in zip(flight.read, flight.copy.sources, strict=True):
            tag = read[-1]
            there = seen.device.get(tag) == source
            require(there, rules.T17, "block {} is copied when it is evicted", source)
            require(tag in noted, rules.T18, "block {} is copied, and was not asked for", source)
            early = not world.prefixes.depth[tag] and world.hits[tag] < hits
            require(not early, rules.T18, "block {} is copied before its hits", source)
            above = [each for each in world.prefixes.path_to(tag) if each in before.host]
            gone = [each for each in above if each not in seen.host]
            require(not gone, rules.T17, "what block {} follows is dropped for its copy", source)
    kept = {seen.host[tag] for tag in noted if tag in seen.host}
    room = seen.num_free + len(seen.idle - kept)
    had, has = {*before.host, *before.landing}, {*seen.host, *seen.landing}
    for path in world.to_copy:
        missing = [tag for tag in path if tag in seen.device and tag not in had and tag not in has]
        if missing and world.hits[missing[0]] >= hits:
            require(room < len(missing), rules.T17, "{} blocks have no copy, with room for {}",
                    len(missing), room)  # fmt: skip
    world.to_copy.clear()

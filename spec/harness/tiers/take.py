"""The operation `take`: checks of each copy that the manager hands out."""

from __future__ import annotations

from ...model.ghost import Tag
from ...rules import tiers as rules
from ...rules.rule import require
from .checks import check_outbox
from .executor import Flight
from .state import TierState, checked


@checked(takes_room=True)
def take(world: TierState) -> bool:
    """Take the requested operations and begin them."""
    step, model = world.step, world.tiers
    model.order.touch(tag for path in model.through.paths for tag in path)
    used = world.ask("used")
    world.storage_law.use(model.uses.tell(used, world.prefixes))
    world.situations["uses are reported to storage"] += bool(used)
    copies = world.ask("take")
    world.see()
    for job in world.stream.queue[-1:]:
        world.stream.run_through(job)
    flights = world.executor.begin(copies)
    evicted, model.departed = model.departed, set()
    for flight in flights:
        flight.evicted = evicted
        copy = flight.copy
        written = copy.destinations if copy.kind in ("out", "fetch") else ()
        read = copy.sources if copy.kind == "store" else ()
        model.dispatched(flight.op, written, read)
    for flight in flights:
        CHECKS[flight.kind](world, flight)
    cancelled, world.cancelled = world.cancelled, set()
    answer = set(world.ask("take_cancelled"))
    require(answer == cancelled, rules.T13, "cancelled are {}, and reported {}", cancelled, answer)
    _check_stores(world, flights)
    if model.through.is_on:
        copied = {
            tag: source
            for flight in flights
            if flight.kind == "out" and not flight.owner
            for tag, source in zip(flight.tags, flight.copy.sources, strict=True)
        }
        model.through.check(step.before, model.now, copied, world.prefixes)
        step.copy_out(copied)
    check_outbox(world)
    return True


def _begin_out(world: TierState, flight: Flight) -> None:
    copy, content = flight.copy, world.prefixes.content
    saved = (name for name, each in world.tiers.parked.items() if each.copy == copy.id)
    flight.owner = next(saved, "")
    parked = world.tiers.parked.get(flight.owner)
    tail = 0
    if parked is not None:
        parked.blocks.update(copy.destinations)
        tail = parked.num_tokens % world.block_size
        tags = world.requests[flight.owner].tags[parked.num_tokens - tail : parked.num_tokens]
        is_saved = not tail or flight.read[-1][:tail] == tags
        require(is_saved, rules.T10, "the tail of {} is not saved", flight.owner)
    offloading = world.tiers.now.offloading
    whole = zip(flight.read, copy.destinations, strict=True)
    for read, block in list(whole)[: len(flight.read) - bool(tail)]:
        require(content.get(read[-1]) == read, rules.T10, "{} copies blocks {} to the host, some "
                "without KV", flight.op, copy.sources)  # fmt: skip
        awaited = offloading.get(read[-1], block)
        require(awaited == block, rules.T2, "{} writes a prefix to host block {}, it is awaited "
                "in {}", flight.op, block, awaited)  # fmt: skip


def _begin_in(world: TierState, flight: Flight) -> None:
    copy = flight.copy
    loaded = (name for name, each in world.tiers.loads.items() if each.copy == copy.id)
    name = flight.owner = next(loaded, "")
    require(name, rules.T13, "{} loads nobody", flight.op)
    load = world.tiers.loads[name]
    outlives = name == flight.op
    table = world.tiers.holdings[name].table if outlives else world.target.block_table(name)
    wanted = table[load.num_hit :][: load.num_host + bool(load.tail)]
    require(list(copy.destinations) == wanted, rules.T6, "{} is loaded into blocks {}, not {}",
            name, copy.destinations, wanted)  # fmt: skip
    found = [tag for read in flight.read for tag in read][: len(load.tags)]
    require(found == load.tags, rules.T10, "{} is loaded with what is not its own", name)


def _begin_store(world: TierState, flight: Flight) -> None:
    prefixes = world.prefixes
    for read, key in zip(flight.read, flight.copy.keys, strict=True):
        tag = read[-1]
        whole = prefixes.content.get(tag) == read
        require(whole, rules.T10, "{} stores a block without KV", flight.op)
        require(prefixes.key[tag] == key, rules.T28, "{} stores KV under another key", flight.op)


def _begin_prefetch(world: TierState, flight: Flight) -> None:
    copy = flight.copy
    before, after = ("lookup", "asked") if copy.kind == "lookup" else ("found", "fetch")
    for name, prefetch in world.tiers.prefetches.items():
        if world.ask("asking", name) != copy.id:
            continue
        path = prefetch.path[prefetch.num_known :]
        wanted = [world.prefixes.key[tag] for tag in path]
        wanted = wanted[: prefetch.num_found] if copy.kind == "fetch" else wanted
        require(prefetch.stage == before and wanted == list(copy.keys), rules.T4, "{} asks for "
                "{} blocks, not {}, or for others", name, len(copy.keys), len(wanted))  # fmt: skip
        prefetch.stage, flight.owner = after, name
        prefetch.blocks.update(copy.destinations)
        return
    require(False, rules.T4, "{} is for nobody", flight.op)


CHECKS = {
    "out": _begin_out,
    "in": _begin_in,
    "fork": _begin_in,
    "store": _begin_store,
    "lookup": _begin_prefetch,
    "fetch": _begin_prefetch,
}


def _check_stores(world: TierState, flights: list[Flight]) -> None:
    """Check that each copy that is new on the host is stored, and no other."""
    due, now = world.tiers.to_store, world.tiers.now
    stored: set[Tag] = set()
    for tag in [tag for flight in flights if flight.kind == "store" for tag in flight.tags]:
        require(tag in due - stored, rules.T27, "a block is stored again")
        stored.add(tag)
    kept = due & now.host.keys() - stored
    require(not kept, rules.T27, "{} new copies are not stored", len(kept))
    due.clear()

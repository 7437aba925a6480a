"""Checks of what the end of an operation changes."""

from __future__ import annotations

from dataclasses import dataclass

from ...model.ghost import Tag
from ...rules import tiers as rules
from ...rules.rule import require
from .checks import check_lost, check_saving, see
from .executor import TO_DEVICE, Flight, leading
from .requests import Seen
from .state import TierState


@dataclass
class Change:
    """A call about an operation, with the prefixes seen before it."""

    before: Seen
    flight: Flight


def ended(world: TierState, change: Change, *, result: bool, fenced: bool) -> None:
    """Check the changes of a call that reported a result, a fence, or both."""
    flight = change.flight
    name = flight.copy.kind
    _touch(world, flight)
    world.end_report(flight, fenced=fenced)
    see(world)
    if flight.cancelled or flight.old or flight.is_detached:
        _given_up(world, change)
    elif name == "out" and result:
        _out(world, change)
    elif name in TO_DEVICE and fenced:
        (_in_for_nobody if flight.owner == flight.op else _in)(world, change)
    elif name == "lookup" and result:
        _lookup(world, change)
    elif name == "fetch" and result:
        _fetch(world, change)
    else:
        check_lost(world, change.before)
    if fenced:
        world.executor.fenced(flight)
    if name in ("lookup", "fetch") and (result or flight.cancelled):
        _check_prefetch(world, flight)


def _touch(world: TierState, flight: Flight) -> None:
    """Release the copies that an operation and the parked requests saved by it held."""
    for read in flight.read:
        world.order.touch(world.prefixes.path_to(read[-1]))
    if flight.copy.kind == "out":  # blocks evicted together keep their order
        world.order.touch(world.prefixes.paths_to(flight.evicted))
    for parked in world.parked.values():
        world.order.touch(parked.path)
    if flight.owner in world.requests:
        world.order.touch(world.requests[flight.owner].path(world.block_size))
    if flight.owner in world.loads:
        world.order.touch(world.loads[flight.owner].path)
    if flight.owner in world.prefetches:
        world.touch_all(world.prefetches[flight.owner].path)


def _given_up(world: TierState, change: Change) -> None:
    before, seen = change.before, world.seen
    blamed = before.leaving if change.flight.copy.kind == "in" else set()
    check_lost(world, before, blamed)
    rule = rules.T29 if change.flight.old else rules.T27
    new = (seen.device.keys() - before.device) | (seen.host.keys() - before.host)
    require(not new, rule, "{} was given up, and brings {} blocks", change.flight.op, len(new))


def _out(world: TierState, change: Change) -> None:
    before, flight = change.before, change.flight
    good: set[Tag] = set()
    bad: set[Tag] = set()
    tags = [read[-1] for read in flight.read]
    awaited = [
        (world.depth_of(tag), tag, flight.ok[place])
        for place, tag in enumerate(tags)
        # the others are a tail, or no request waits for them
        if before.landing.get(tag) == flight.copy.destinations[place]
    ]
    for _, tag, ok in sorted(awaited):
        (good if ok and bad.isdisjoint(world.prefixes.path_to(tag)) else bad).add(tag)
    moved = world.seen.device if world.config["write"] == "exclusive" else {}
    lost = [tag for tag in good if tag not in world.seen.host and tag not in moved]
    require(not lost, rules.T11, "{} copies have arrived and cannot be found", len(lost))
    wrong = [
        place
        for place, tag in enumerate(tags)
        if not flight.ok[place] and world.seen.host.get(tag) == flight.copy.destinations[place]
    ]
    require(not wrong, rules.T12, "{} copies have failed and can be found", len(wrong))
    if world.config["storage"]:
        new = [tag for tag in tags if tag in world.seen.host.keys() - before.host]
        world.to_store.update(new)
        for tag in new:
            world.use(world.prefixes.path_to(tag), must=False)
    check_lost(world, before, bad)
    _saved(world, flight)


def _saved(world: TierState, flight: Flight) -> None:
    """Update the parked requests whose blocks the operation saved."""
    for name, parked in world.parked.items():
        if flight.copy.id not in parked.writers:
            continue
        parked.writers.remove(flight.copy.id)
        parked.failed |= not parked.blocks.isdisjoint(flight.bad_blocks())
        if name == flight.owner and parked.num_tokens % world.block_size:
            parked.keeps_tail = flight.ok[-1]
        if not parked.writers:
            world.situations["parked, and failed" if parked.failed else "parked"] += 1
    check_saving(world)


def _in(world: TierState, change: Change) -> None:
    before, flight = change.before, change.flight
    name = flight.owner
    load, request = world.loads.pop(name), world.requests[name]
    num_good = leading(flight.ok)
    num_shared = load.num_hit + min(num_good, load.num_host)
    ready = num_shared * world.block_size
    if num_good == len(flight.ok):
        ready += load.tail
    require(world.ask("loading", name) is None, rules.T10, "{} still loads", name)
    found = world.ask("ready", name)
    require(found == ready, rules.T10, "{} has {} tokens, {} have come", name, found, ready)
    num_promoted = min(num_good, load.num_host)
    found = world.ask("promoted", name)
    require(found == num_promoted, rules.T10, "{} was promoted {} blocks, {} have come", name,
            found, num_promoted)  # fmt: skip
    holding = world.tier_model.holdings[name]
    require(
        len(holding.shared) == num_shared,
        rules.T10,
        "{} shares {} blocks, {} have come",
        name,
        len(holding.shared),
        num_shared,
    )
    request.written, request.job = ready, ""
    world.counted["promoted_blocks"] += num_promoted
    if num_promoted and not world.config["hits"]:
        world.to_copy.append(list(holding.shared))
    check_lost(world, before, {tag for tag in before.leaving if tag in holding.path})
    world.situations["loaded" if all(flight.ok) else "loaded in part"] += 1


def _in_for_nobody(world: TierState, change: Change) -> None:
    before, flight = change.before, change.flight
    load = world.loads.pop(flight.owner)
    num_promoted = min(leading(flight.ok), load.num_host)
    num_come = load.num_hit + num_promoted
    lost = [tag for tag in load.path[:num_come] if tag not in world.seen.device]
    require(not lost, rules.T39, "{} blocks were moved by {}, and are not there", len(lost),
            flight.op)  # fmt: skip
    world.counted["promoted_blocks"] += num_promoted
    check_lost(world, before, before.leaving.intersection(load.path[num_come:]))
    world.situations["loaded for nobody"] += 1


def _lookup(world: TierState, change: Change) -> None:
    prefetch = world.prefetches[change.flight.owner]
    room = change.before.num_free + len(change.before.idle)
    prefetch.num_found = min(leading(change.flight.ok), room) if prefetch.is_wanted else 0
    prefetch.stage = "found" if prefetch.num_found else "done"
    check_lost(world, change.before, needs_room=True)


def _fetch(world: TierState, change: Change) -> None:
    before, flight = change.before, change.flight
    prefetch = world.prefetches[flight.owner]
    first, good = prefetch.num_known, leading(flight.ok)
    prefetch.stage, prefetch.num_found = "done", good
    world.counted["fetched_blocks"] += good
    world.storage_law.use(flight.copy.keys[:good])
    if all(tag in before.anywhere for tag in prefetch.path[:first]):
        come = prefetch.path[first : first + good]
        lost = [tag for tag in come if tag not in world.seen.anywhere]
        require(not lost, rules.T26, "{} blocks were fetched, and are nowhere", len(lost))
        places = flight.copy.destinations[:good]
        new = [tag for tag in come if world.seen.host.get(tag) in places]
        world.uses.written([], new)
        world.use(prefetch.path[: first + good] if new else [])
        # They are in storage already.
        world.stored.update(new)
    for tag, block in world.seen.host.items():
        if tag in before.host or block not in flight.copy.destinations:
            continue
        place = flight.copy.destinations.index(block)
        require(place < good, rules.T12, "host block {} was not fetched, and is found", block)
    check_lost(world, before)
    world.situations["fetched" if good else "fetched nothing"] += 1


def _check_prefetch(world: TierState, flight: Flight) -> None:
    prefetch = world.prefetches.get(flight.owner)
    if prefetch is None:
        return
    found = world.ask("prefetched", flight.owner)
    if flight.cancelled:
        prefetch.stage, prefetch.num_found = "done", 0
    wanted = prefetch.num_found if prefetch.stage == "done" else None
    require(found == wanted, rules.T26, "a prefetch has brought {}, told {}", wanted, found)
    if prefetch.stage == "done":
        del world.prefetches[flight.owner]

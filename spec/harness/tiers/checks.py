"""Checks of a state of the tiers, whatever the operation before it."""

from __future__ import annotations

from ...model.ghost import Tag
from ...rules import tiers as rules
from ...rules.cache import S3
from ...rules.rule import require
from .executor import TO_DEVICE
from .state import TierState


def check_tiers(world: TierState) -> None:
    """Check every rule about a state of the tiers."""
    free, taken = sorted(world.shot.free), world.tiers.host
    num_free = world.config["host_blocks"] - len(taken)
    is_right = taken.keys().isdisjoint(free) and len(free) == len(set(free)) == num_free
    require(is_right, rules.T42, "host blocks {} are in the pool, {} are taken", free, list(taken))
    _check_content(world)
    _check_order(world)
    check_parked(world)
    _check_counts(world)


def _check_content(world: TierState) -> None:
    """Check that each block that can be found holds its prefix, and is not being written."""
    writers = {
        (flight.kind in TO_DEVICE, block): flight
        for flight in world.executor.flights
        for block in flight.bad_blocks()
    }
    now = world.tiers.now
    for tier, found in (("device", now.device), ("host", now.host)):
        for tag, block in found.items():
            is_new = tier == "host" and world.tiers.host.get(block) == "new"
            require(not is_new, rules.T3, "host block {} is found, and is yet to be written", block)
            writer = writers.get((tier == "device", block))
            require(writer is None, rules.T15 if writer and writer.has_result else rules.T3,
                    "{} block {} is found, and {} writes it", tier, block,
                    writer and writer.op)  # fmt: skip
            require(world.executor.content(tier, block) == world.prefixes.content[tag], rules.T2,
                    "{} block {} is found for a prefix that is not in it", tier, block)  # fmt: skip


def _check_order(world: TierState) -> None:
    """Check the order in which the host would drop its copies."""
    now, idle = world.tiers.now, list(world.tiers.now.idle)
    if world.tiers.write != "through":
        redundant = [tag in now.device for tag in idle]
        in_order = redundant == sorted(redundant, reverse=True)
        require(in_order, rules.T21, "of {}, the first to be dropped are not those of what the "
                "device has: {}", now.order, redundant)  # fmt: skip
        idle = idle[sum(redundant) :]
    world.tiers.order.check(idle)


def check_parked(world: TierState) -> None:
    """Check that what was parked is on the host, or in storage if it was parked there."""
    for name, parked in world.tiers.parked.items():
        if not parked.is_saved:
            continue
        stored = world.executor.storage if parked.where == "storage" else {}
        kept = [tag in world.tiers.now.host or world.prefixes.key[tag] in stored
                for tag in parked.path]  # fmt: skip
        require(all(kept), rules.T37, "{} was parked, and one of its blocks is gone", name)


def _check_counts(world: TierState) -> None:
    flights, model = world.executor.flights, world.tiers
    num_open = sum(flight.is_open for flight in flights)
    known = {
        **dict.fromkeys(("promoted_blocks", "stored_blocks", "fetched_blocks",
                         "late_completions", "dropped_blocks"), 0),
        **model.counts,
        "host_blocks": world.config["host_blocks"],
        "host_free_blocks": world.config["host_blocks"] - len(model.host),
        "host_cached_blocks": len(model.now.host),
        "parked": len(model.parked),
        "quarantined_operations": len(flights) - num_open,
    }  # fmt: skip
    if not world.target.may_have_decided:
        known.update(operations=len(flights), open_operations=num_open)
    if model.write != "through":
        known["demoted_blocks"] = model.counts["evicted_blocks"]
    for word, number in world.shot.counts.items():
        wanted = known.get(word, number)
        require(number == wanted, S3, "{} is {}, should be {}", word, number, wanted)


# After a `take`, when all operations are known


def check_outbox(world: TierState) -> None:
    """Check, after a `take` of all operations, that each host block is needed."""
    model, now, flights = world.tiers, world.tiers.now, world.executor.flights
    needed = {*now.host.values(), *now.offloading.values(), *model.read}
    needed.update(*(f.copy.sources if f.kind == "in" else f.copy.destinations
                    for f in flights))  # fmt: skip
    needed.update(*(each.blocks for each in model.parked.values()))
    needed.update(*(each.blocks for each in model.prefetches.values()))
    for block, owner in model.host.items():
        reason = owner.startswith("op ") or block in needed
        require(reason, rules.T43, "host block {} is neither free nor of use", block)
    written = {block for f in flights if f.kind == "out" for block in f.copy.destinations}
    moved = {tag for f in flights if f.kind == "in" for tag in f.tags}
    idle = len(now.promoting - moved) + len({*now.offloading.values()} - written)
    require(not idle, rules.T16, "{} copies are under way by nothing", idle)
    _check_stored(world)
    if model.write == "exclusive":
        paths, held = world.prefixes.path, _held(world)
        twice = [tag for tag in now.host.keys() & now.device.keys() if paths[tag][0] not in held]
        require(not twice, rules.T25, "{} blocks are on device and host", len(twice))


def _check_stored(world: TierState) -> None:
    """Check that what was parked in storage is held on the host until it is stored."""
    now, key, storage = world.tiers.now, world.prefixes.key, world.executor.storage
    for name, parked in world.tiers.parked.items():
        if not parked.is_saved or parked.where != "storage":
            continue
        kept = {tag for tag in parked.path if tag in now.host and tag not in now.idle}
        wrong = [tag for tag in parked.path if key[tag] not in storage and tag not in kept]
        require(not wrong, rules.T35, "{} keeps {} blocks nowhere", name, len(wrong))
        is_stored = world.tiers.stored.issuperset(parked.path)
        if is_stored and not _held(world, but=name).intersection(parked.path[:1]):
            require(not kept, rules.T35, "{} keeps {} blocks that are stored", name, len(kept))


def _held(world: TierState, but: str = "") -> set[Tag]:
    """First prefixes of the paths that operations, prefetches and parked requests may hold."""
    model, paths = world.tiers, world.prefixes.path
    ends = {tag for flight in world.executor.flights for tag in flight.tags}
    ends.update(tag for name, each in model.parked.items() if name != but for tag in each.path)
    ends.update(tag for each in model.prefetches.values() for tag in each.path)
    return {paths[tag][0] for tag in ends if tag in paths}

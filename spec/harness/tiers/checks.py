"""Checks of the tiers below the device: of each state, and of what a call changed."""

from __future__ import annotations

from collections.abc import Collection

from ...adapters.tiers import TierSnapshot
from ...model.ghost import Tag
from ...rules import tiers as rules
from ...rules.cache import S3
from ...rules.rule import require
from .executor import TO_DEVICE
from .requests import Seen
from .state import TierState


def look(world: TierState, shot: TierSnapshot) -> Seen:
    """Return where each prefix is now."""
    tag_of = world.tag_of
    return Seen(
        {entry.tag: block for block, entry in world.tier_model.cached.items()},
        {tag_of(*prefix): block for prefix, block in shot.host.items()},
        {tag_of(*prefix): block for prefix, block in shot.landing.items()},
        {tag_of(*prefix) for prefix in shot.leaving},
        len(shot.free),
        tuple(shot.idle),
    )


def see(world: TierState) -> Seen:
    """Update `world.seen`, if a call may have moved blocks since the last time."""
    if not world.target.has_acted:
        return world.seen
    world.target.has_acted = False
    world.shot = world.target.tier_snapshot()
    before, world.seen = world.seen, look(world, world.shot)
    world.counted["dropped_blocks"] += num_dropped(world, before)
    gone = before.device.keys() - world.seen.device.keys()
    world.order.touch(world.prefixes.paths_to(gone))
    world.evicted |= gone
    for tag in [tag for tag in world.hits if tag not in world.seen.device]:
        del world.hits[tag]
    world.stored &= world.seen.host.keys()
    world.uses.cached(world.seen.anywhere)
    for load in world.loads.values():
        load.left &= world.seen.leaving
    return world.seen


def check_tiers(world: TierState, shot: TierSnapshot) -> None:
    """Check every rule about a state of the tiers."""
    free, taken = sorted(shot.free), world.tier_model.host
    wrong = [block for block in free if block in taken]
    require(not wrong, rules.T31, "host blocks {} are in the pool, and taken", wrong)
    require(
        len(free) == len(set(free)) == world.config["host_blocks"] - len(taken),
        rules.T31,
        "the pool of the host holds {}, but {} blocks are taken",
        free,
        len(taken),
    )
    _check_content(world)
    _check_spares(world)
    _check_host_order(world, shot)
    _check_parked(world)
    _check_counts(world, shot)


def _check_host_order(world: TierState, shot: TierSnapshot) -> None:
    tags = {block: tag for tag, block in world.seen.host.items()}
    idle = [tags[block] for block in shot.idle if block in tags]
    if world.config["write"] != "through":  # then of what the device has too, other copies go first
        idle = [tag for tag in idle if tag not in world.seen.device]
    world.order.check(idle)


def _check_content(world: TierState) -> None:
    writers = {
        (flight.copy.kind in TO_DEVICE, block): flight
        for flight in world.executor.flights
        for block in flight.bad_blocks()
    }
    seen = world.seen
    for on_device, found in ((True, seen.device), (False, seen.host)):
        tier = "device" if on_device else "host"
        for tag, block in found.items():
            is_new = not on_device and world.tier_model.host.get(block) == "new"
            require(not is_new, rules.T1, "host block {} is found, and is yet to be written", block)
            writer = writers.get((on_device, block))
            if writer is not None:
                rule = rules.T12 if writer.has_result else rules.T1
                require(False, rule, "{} block {} is found, and {} writes it", tier, block,
                        writer.op)  # fmt: skip
            require(
                world.executor.content(tier, block) == world.prefixes.content[tag],
                rules.T4,
                "{} block {} is found for a prefix that is not in it",
                tier,
                block,
            )


def _check_spares(world: TierState) -> None:
    if world.config["write"] == "through":
        return
    on_device = {world.seen.host[tag] for tag in world.seen.duplicates}
    order = [block not in on_device for block in world.seen.order]
    require(
        order == sorted(order), rules.T36, "of {}, the first to be dropped are not those of what "
        "the device has: {}", list(world.seen.order), sorted(on_device),
    )  # fmt: skip


def check_saving(world: TierState) -> None:
    """Check that a parked request holds device blocks as long as an operation copies them."""
    for name, parked in world.parked.items():
        _, saved, failed = world.target.ask("parked", name)
        holds = name in world.tier_model.holdings
        under_way = bool(parked.writers)
        require(
            saved != under_way and holds == under_way,
            rules.T20,
            "{} operations save {}, told saved={}, and it has {} blocks",
            len(parked.writers),
            name,
            saved,
            len(world.tier_model.table(name)) if holds else "no",
        )
        right = under_way or failed == parked.failed
        require(right, rules.T24, "{} is told failed={}", name, failed)


def _check_parked(world: TierState) -> None:
    check_saving(world)
    seen, stored = world.seen, world.executor.storage
    for name, parked in world.parked.items():
        if parked.writers or parked.failed or parked.is_void:
            continue
        for tag in parked.path:
            kept = tag in seen.host
            if parked.where == "storage":
                kept = kept or world.prefixes.key[tag] in stored
            require(kept, rules.T22, "{} was parked, and one of its blocks is gone", name)


def _check_counts(world: TierState, shot: TierSnapshot) -> None:
    flights = world.executor.flights
    known = {
        **world.counted,
        "host_blocks": world.config["host_blocks"],
        "host_free_blocks": world.config["host_blocks"] - len(world.tier_model.host),
        "host_cached_blocks": len(world.seen.host),
        "parked": len(world.parked),
        "quarantined_operations": sum(f.has_result or f.cancelled for f in flights),
    }
    if not world.target.may_have_decided:
        known["operations"] = len(flights)
        known["open_operations"] = sum(not (f.has_result or f.cancelled) for f in flights)
    if world.config["write"] != "through":
        known["demoted_blocks"] = world.tier_model.counts["evicted_blocks"]
    for word, number in shot.counts.items():
        if word in known:
            require(number == known[word], S3, "{} is {}, should be {}", word, number, known[word])


# What a call changed


def check_lost(
    world: TierState, before: Seen, blamed: Collection[Tag] = (), *, needs_room: bool = False
) -> None:
    """Check that a call lost no prefix without a reason.

    Args:
        world: the world after the call.
        before: where each prefix was before the call.
        blamed: prefixes whose copies failed, were cancelled, or left a device without write-back.
        needs_room: whether the call may take host blocks.
    """
    after = world.seen.anywhere
    excused = set(blamed)
    lost = set()
    for tag in sorted(before.anywhere - after, key=world.depth_of):
        if tag in excused or world.prefixes.parent[tag] in excused:
            excused.add(tag)  # what follows it cannot be found either
        else:
            lost.add(tag)
    here, nowhere = {*after, *world.roots}, set(lost)
    if world.config["write"] != "exclusive":  # there a copy goes when it has been moved
        lost |= (before.host.keys() - world.seen.host.keys()) & world.seen.device.keys()
    for prefetch in world.prefetches.values():
        wrong = [tag for tag in prefetch.held if tag in lost and world.prefixes.parent[tag] in here]
        require(not wrong, rules.T26, "{} blocks that a prefetch follows are gone", len(wrong))
        # The others went with what they follow; computed anew, they are nothing that it holds.
        prefetch.held = [tag for tag in prefetch.held if tag in after]
    if needs_room:
        require(
            not lost or not world.seen.num_free,
            rules.T14,
            "{} blocks were dropped, and {} host blocks are free",
            len(lost),
            world.seen.num_free,
        )
        if nowhere:
            world.situations["dropped for room"] += 1
            copies = world.seen.duplicates if world.config["write"] != "through" else ()
            require(not copies, rules.T36, "{} blocks are lost, and {} copies of what the device "
                    "has are kept", len(nowhere), len(copies))  # fmt: skip
        _check_demoted(world, before)
    else:
        require(not lost, rules.T14, "{} cached blocks are gone", len(lost))


def num_dropped(world: TierState, before: Seen) -> int:
    """Number of prefixes that were in some tier before, and are in none now."""
    return len(before.anywhere - world.seen.anywhere)


def _check_demoted(world: TierState, before: Seen) -> None:
    if world.config["write"] == "through":
        return
    seen = world.seen
    left = before.device.keys() - seen.device.keys() - before.host.keys()
    lost = left - seen.anywhere
    if lost:
        world.situations["demoted, and dropped"] += 1
    room = seen.num_free + len(seen.idle - moved_copies(world, before))
    require(
        not lost or not room,
        rules.T13,
        "{} blocks left the device for nowhere, with room for {}",
        len(lost),
        room,
    )


def moved_copies(world: TierState, before: Seen) -> set[int]:
    """Host blocks of prefixes that left the device, whose copy on the host existed already."""
    left = before.device.keys() - world.seen.device.keys()
    return {before.host[tag] for tag in left if tag in before.host}


def check_order(world: TierState, before: Seen) -> None:
    """Check that an eviction dropped host blocks in eviction order."""
    if world.config["write"] == "through":
        return
    moved = moved_copies(world, before)
    kept = set(world.seen.host.values())
    order = [block in kept for block in before.order if block not in moved]
    require(
        order == sorted(order),
        rules.T37,
        "of {} host blocks in the order in which they go, these are kept: {}",
        len(order),
        [place for place, is_kept in enumerate(order) if is_kept],
    )
    world.situations["evicted over a full host"] += not all(order)


def check_outbox(world: TierState) -> None:
    """Check, after a `take` of all operations, that each host block is needed."""
    model, seen = world.tier_model, world.seen
    needed = {*seen.host.values(), *seen.landing.values(), *model.read}
    for flight in world.executor.flights:
        copy = flight.copy
        needed.update(copy.sources if copy.kind == "in" else copy.destinations)
    needed.update(*(parked.blocks for parked in world.parked.values()))
    needed.update(*(prefetch.blocks for prefetch in world.prefetches.values()))
    for block, owner in model.host.items():
        reason = owner.startswith("op ") or block in needed
        require(reason, rules.T32, "host block {} is neither free nor of use", block)
    _check_under_way(world)
    _check_stored(world)
    if world.config["write"] == "exclusive":
        _check_exclusive(world)


def _check_under_way(world: TierState) -> None:
    written: set[int] = set()
    read: set[Tag] = set()
    for flight in world.executor.flights:
        written.update(flight.copy.destinations if flight.copy.kind == "out" else ())
        read.update(each[-1] for each in flight.read if flight.copy.kind == "in")
    idle = [tag for tag, block in world.seen.landing.items() if block not in written]
    idle += world.seen.leaving - read
    require(not idle, rules.T33, "{} copies are under way by nothing", len(idle))


def _check_stored(world: TierState) -> None:
    seen, key = world.seen, world.prefixes.key
    for name, parked in world.parked.items():
        if parked.writers or parked.is_void or parked.where != "storage":
            continue
        kept = [tag for tag in parked.path if tag in seen.host and seen.host[tag] not in seen.idle]
        lost = [tag for tag in parked.path if key[tag] not in world.executor.storage]
        wrong = set(lost) - set(kept) if not parked.failed else ()
        require(not wrong, rules.T34, "{} keeps {} blocks nowhere", name, len(wrong))
        is_stored = not parked.failed and world.stored.issuperset(parked.path)
        if is_stored and not _held(world, but=name).intersection(parked.path[:1]):
            require(not kept, rules.T34, "{} keeps {} blocks that are stored", name, len(kept))


def _held(world: TierState, but: str = "") -> set[Tag]:
    """First prefixes of the paths that operations, prefetches and parked requests may hold."""
    first = world.prefixes.first
    held = {first[read[-1]]
            for flight in world.executor.flights
            for read in flight.read if read[-1] in first}  # fmt: skip
    for name, parked in world.parked.items():
        held.update(parked.path[:1] if name != but else ())
    for prefetch in world.prefetches.values():
        held.update(prefetch.path[:1])
    return held


def _check_exclusive(world: TierState) -> None:
    first, held = world.prefixes.first, _held(world)
    twice = [tag for tag in world.seen.host if tag in world.seen.device and first[tag] not in held]
    require(not twice, rules.T15, "{} blocks are on device and host", len(twice))

"""Operations of the executor: results, fences, and late or repeated completions."""

from __future__ import annotations

from ...rules import tiers as rules
from ...rules.rule import require
from .checks import see
from .ends import Change, ended
from .executor import Flight
from .state import TierState


def result(world: TierState, name: str, bad: list[int], fenced: int) -> bool:
    """Report a result: done or partly failed; with `fenced` 0, late writes are still possible.

    The result of a cancelled operation is late; it counts as its fence.
    """
    flight = world.executor.find(name)
    if flight is None or (flight.has_result and not flight.cancelled):
        return False
    was_cancelled = flight.cancelled
    change = Change(see(world), flight)
    ok = world.executor.end(flight, bad)
    fenced = fenced or was_cancelled
    if flight.copy.kind == "store" and not was_cancelled:
        _check_store(world, flight, ok)
    world.begin_report(flight, fenced=bool(fenced))
    told = world.ask("complete", flight.copy.id, ok, bool(fenced))
    require(told != was_cancelled, rules.T6, "{} has ended: {}, told {}", flight.op,
            was_cancelled, not told)  # fmt: skip
    world.counted["late_completions"] += was_cancelled
    if not all(ok):
        world.situations[f"failed: {flight.copy.kind}"] += 1
    world.situations[f"done: {flight.copy.kind}"] += all(ok)
    ended(world, change, result=not was_cancelled, fenced=bool(fenced))
    return True


def _check_store(world: TierState, flight: Flight, ok: list[bool]) -> None:
    for place, block in enumerate(flight.copy.sources):
        require(
            world.executor.content("host", block) == flight.read[place],
            rules.T2,
            "host block {} was written while {} read it",
            block,
            flight.op,
        )
    world.counted["stored_blocks"] += sum(ok)
    world.storage_law.store(key for key, good in zip(flight.copy.keys, ok, strict=False) if good)
    if ok:
        _use_stored(world, flight, ok)
    if ok and all(ok):
        world.stored.update(read[-1] for read in flight.read)


def _use_stored(world: TierState, flight: Flight, ok: list[bool]) -> None:
    """Record the use of stored prefixes and of those before them that are still on the host."""
    written = {read[-1]: good for read, good in zip(flight.read, ok, strict=True)}
    blocks = zip(written, flight.copy.sources, strict=True)
    left = [tag for tag, block in blocks if world.seen.host.get(tag) == block]
    world.uses.written(left, [tag for tag in left if written[tag]])
    for tag in left:
        world.use(world.prefixes.path_to(tag))


def fence(world: TierState, name: str) -> bool:
    """Report a fence: the operation can no longer touch its blocks."""
    flight = world.executor.find(name)
    if flight is None or not (flight.has_result or flight.cancelled):
        return False
    change = Change(see(world), flight)
    world.executor.finish_late_writes(flight)
    if flight.copy.kind == "store" and flight.has_result and not flight.cancelled:
        _check_store(world, flight, [])
    world.begin_report(flight, fenced=True)
    told = world.ask("fence", flight.copy.id)
    require(told, rules.T6, "the fence of {} is not heard", flight.op)
    ended(world, change, result=False, fenced=True)
    world.situations["fenced later"] += 1
    return True


def late(world: TierState, place: int, bad: list[int], fenced: int) -> bool:
    """Repeat a result or a fence of an ended operation, or report one of no operation."""
    ended_before = world.executor.ended
    if place >= len(ended_before):
        return False
    copy = ended_before[-1 - place]
    before, free = see(world), dict(world.tier_model.host)
    if fenced == 2:
        told = world.ask("fence", copy.id)
    else:
        ok = [each not in bad for each in range(copy.num_blocks)]
        told = world.ask("complete", copy.id, ok, bool(fenced))
    require(not told, rules.T6, "operation {} ends twice", copy.id)
    world.counted["late_completions"] += 1
    see(world)
    same = world.seen == before and world.tier_model.host == free
    require(same, rules.T6, "operation {} is heard of twice, and blocks move", copy.id)
    world.situations["heard of twice"] += 1
    return True


def early(world: TierState) -> bool:
    """Report results of operations that were not taken; they must be ignored."""
    before = see(world)
    number, num_believed = world.target.ask("early")
    require(not num_believed, rules.T6, "{} operations ended that were not taken", num_believed)
    world.counted["late_completions"] += number
    require(see(world) == before, rules.T6, "operations that were not taken have moved blocks")
    world.situations["result before it is taken"] += number
    return True


def second(world: TierState, name: str, bad: list[int]) -> bool:
    """Report a second result of an operation before its fence."""
    flight = world.executor.find(name)
    if flight is None or not flight.has_result or flight.cancelled:
        return False
    before, taken = see(world), dict(world.tier_model.host)
    ok = [place not in bad for place in range(flight.copy.num_blocks)]
    told = world.ask("complete", flight.copy.id, ok, False)
    require(not told, rules.T6, "{} has two results", flight.op)
    world.counted["late_completions"] += 1
    see(world)
    same = world.seen == before and world.tier_model.host == taken
    require(same, rules.T6, "{} has a second result, and blocks move", flight.op)
    world.situations["second result"] += 1
    return True


def wrong_result(world: TierState, name: str, number: int) -> bool:
    """Report a result with a wrong number of blocks."""
    flight = world.executor.find(name)
    if flight is None or flight.has_result or flight.cancelled:
        return False
    number += number >= flight.copy.num_blocks
    before = see(world)
    refused = world.ask("wrong_result", flight.copy.id, number)
    require(refused, rules.T7, "{} results for {} blocks", number, flight.copy.num_blocks)
    see(world)
    require(world.seen == before, rules.T7, "a refused result has moved blocks")
    world.situations["wrong result"] += 1
    return True

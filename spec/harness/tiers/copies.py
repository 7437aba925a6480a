"""Operations of the executor: results, fences, and late or repeated completions."""

from __future__ import annotations

from typing import Any

from ...model.tiers.operations import Prefetch
from ...rules import tiers as rules
from ...rules.rule import require
from .executor import TO_DEVICE, Flight, leading, results
from .state import TierState, checked


@checked()
def result(world: TierState, name: str, bad: list[int], fenced: int) -> bool:
    """Report a result: done or partly failed; with `fenced` 0, late writes are still possible.

    The result of a cancelled operation is late; it counts as its fence.
    """
    flight = world.executor.find(name)
    if flight is None or flight.has_result:
        return False
    counts, is_fenced, kind = not flight.cancelled, bool(fenced or flight.cancelled), flight.kind
    ok = world.executor.end(flight, bad)
    if kind == "store" and counts:
        _check_source(world, flight)
        _store(world, flight)
    if kind in ("store", "lookup") and counts:
        world.tell(flight)
    answer = world.report("complete", flight, ok, is_fenced, fenced=is_fenced)
    require(answer == counts, rules.T13, "the result of {} counts: {}, the answer is {}",
            flight.op, counts, answer)  # fmt: skip
    world.tiers.counts["late_completions"] += not counts
    world.situations[f"{'done' if all(ok) else 'failed'}: {kind}"] += 1
    world.situations["a lookup is not answered"] += None in ok
    if not (is_fenced or all(ok)):
        world.situations[f"failed, and not fenced: {kind}"] += 1
    _ended(world, flight, result=counts, fenced=is_fenced)
    return True


@checked()
def fence(world: TierState, name: str) -> bool:
    """Report a fence: the operation can no longer touch its blocks."""
    flight = world.executor.find(name)
    if flight is None or flight.is_open:
        return False
    world.executor.finish_late_writes(flight)
    if flight.kind == "store" and flight.has_result:
        _check_source(world, flight)
    answer = world.report("fence", flight, fenced=True)
    require(answer, rules.T13, "the fence of {} has no effect", flight.op)
    _ended(world, flight, result=False, fenced=True)
    world.situations["fenced later"] += 1
    return True


def _ended(world: TierState, flight: Flight, *, result: bool, fenced: bool) -> None:
    """Check the changes of a call that reported a result, a fence, or both."""
    kind, model, step = flight.kind, world.tiers, world.step
    if kind == "out":  # blocks evicted together keep their order
        model.order.touch(world.prefixes.paths_to(flight.evicted))
    now = world.see()
    step.otherwise = rules.T15
    if flight.cancelled or flight.old or flight.is_detached:
        step.otherwise = rules.T41 if flight.old else rules.T39
        others = {tag for load in model.loads.values() for tag in load.moved}
        step.end_in(set(flight.tags) - others if kind == "in" else ())
        new = now.device.keys() - step.before.device.keys()
        require(not new, step.otherwise, "{} was given up, and brings {} blocks", flight.op,
                len(new))  # fmt: skip
    elif kind == "out" and result:
        _end_out(world, flight)
    elif kind in TO_DEVICE and fenced:
        _end_in(world, flight)
    elif kind in ("lookup", "fetch") and result:
        _end_prefetch(world, flight)
    _end_saving(world, flight)
    if fenced:
        world.executor.fenced(flight)


# Between device and host


def _end_out(world: TierState, flight: Flight) -> None:
    before, model = world.step.before, world.tiers
    copies = zip(flight.tags, flight.copy.destinations, flight.ok, strict=True)
    # The others are a tail, or no request waits for them.
    results = {tag: bool(ok) for tag, block, ok in copies if before.offloading.get(tag) == block}
    world.step.end_out(results, world.prefixes)
    if world.config["storage"]:
        for tag in (model.now.host.keys() - before.host.keys()).intersection(flight.tags):
            model.to_store.add(tag)
            model.uses.use(world.prefixes.path[tag], must=False)


def _end_saving(world: TierState, flight: Flight) -> None:
    """Update the parked requests whose blocks an operation has saved, or has failed to."""
    for name, parked in world.tiers.parked.items():
        if flight.copy.id not in parked.writers:
            continue
        parked.writers.remove(flight.copy.id)
        parked.failed |= not parked.blocks.isdisjoint(flight.bad_blocks())
        if name == flight.owner and parked.num_tokens % world.block_size:
            parked.keeps_tail = bool(flight.ok[-1])
        if not parked.writers:
            world.situations["parked, and failed" if parked.failed else "parked"] += 1


def _end_in(world: TierState, flight: Flight) -> None:
    name, model = flight.owner, world.tiers
    load, num_good = model.loads.pop(name), leading(flight.ok)
    num_promoted = min(num_good, load.num_host)
    num_come = load.num_hit + num_promoted
    model.counts["promoted_blocks"] += num_promoted
    world.step.end_in(load.moved)
    if name == flight.op:
        lost = [tag for tag in load.path[:num_come] if tag not in model.now.device]
        require(not lost, rules.T8, "{} blocks were moved by {}, and are not there", len(lost),
                name)  # fmt: skip
        world.situations["loaded for an ended request"] += 1
        return
    ready = num_come * world.block_size + (load.tail if num_good == len(flight.ok) else 0)
    require(world.ask("loading", name) is None, rules.T7, "{} still loads", name)
    found = world.ask("ready", name), world.ask("promoted", name), len(model.holdings[name].shared)
    wanted = ready, num_promoted, num_come
    require(found == wanted, rules.T7, "tokens ready, blocks promoted and blocks shared of {} are "
            "{}, have come {}", name, found, wanted)  # fmt: skip
    world.requests[name].written, world.requests[name].job = ready, ""
    world.situations["loaded" if all(flight.ok) else "loaded in part"] += 1
    if load.tail and load.num_host:
        world.situations["tail and block in one load"] += 1
        hole = num_good < load.num_host and bool(flight.ok[-1])
        world.situations["tail loaded, and a block before it failed"] += hole


# Storage


def _check_source(world: TierState, flight: Flight) -> None:
    for block, read in zip(flight.copy.sources, flight.read, strict=True):
        require(world.executor.content("host", block) == read, rules.T10,
                "host block {} was written while {} read it", block, flight.op)  # fmt: skip


def _store(world: TierState, flight: Flight) -> None:
    """Record what was stored, and the use of it and of what is before it."""
    model, copy, ok = world.tiers, flight.copy, flight.ok
    num_stored = sum(map(bool, ok))
    model.counts["stored_blocks"] += num_stored
    model.uses.now += num_stored
    world.storage_law.store(tag for tag, good in zip(flight.tags, ok, strict=True) if good)
    copies = zip(flight.tags, copy.sources, ok, strict=True)
    left = {tag: good for tag, block, good in copies if model.now.host.get(tag) == block}
    model.uses.written(left, [tag for tag, good in left.items() if good])
    for tag in left:
        model.uses.use(world.prefixes.path[tag])
    if all(ok):
        model.stored.update(flight.tags)


def _end_prefetch(world: TierState, flight: Flight) -> None:
    """Check the end of a lookup, or of a fetch with which a prefetch ends."""
    prefetch, step = world.tiers.prefetches[flight.owner], world.step
    prefetch.num_found = leading(flight.ok)
    if flight.kind == "lookup":
        step.takes_room = True
        room = step.before.num_free + len(step.before.order)
        prefetch.num_found = min(prefetch.num_found, room)
        prefetch.stage = "found" if prefetch.num_found else "done"
    else:
        prefetch.stage = "done"
        _fetched(world, flight, prefetch)
    found = world.ask("prefetched", flight.owner)
    wanted = prefetch.num_found if prefetch.stage == "done" else None
    require(found == wanted, rules.T5, "a prefetch has brought {}, and reports {}", wanted, found)


def _fetched(world: TierState, flight: Flight, prefetch: Prefetch) -> None:
    """Record what was fetched, and the use of it and of what is before it."""
    first, good, model = prefetch.num_known, prefetch.num_found, world.tiers
    model.counts["fetched_blocks"] += good
    world.storage_law.use(prefetch.path[first:][:good])
    new = world.step.fetch(prefetch.path, first, good)
    model.uses.written([], new)
    model.uses.use(prefetch.path[: first + good] if new else [])
    model.stored.update(new)  # they are in storage already
    world.situations["fetched" if good else "fetched nothing"] += 1


# Calls that must change nothing


def late(world: TierState, place: int, bad: list[int], fenced: int) -> bool:
    """Repeat a result or a fence of an ended operation, or report one of no operation."""
    if place >= len(world.executor.ended):
        return False
    copy = world.executor.ended[-1 - place]
    if fenced == 2:
        _in_vain(world, "completion repeated", "fence", copy.id)
    else:
        _in_vain(world, "completion repeated", "complete", copy.id, results(copy, bad), fenced > 0)
    return True


def early(world: TierState) -> bool:
    """Report results of operations that were not taken; they must be ignored."""
    number, num_believed = world.ask_in_vain(rules.T13, "early")
    require(not num_believed, rules.T13, "{} operations ended that were not taken", num_believed)
    world.tiers.counts["late_completions"] += number
    world.situations["result before it is taken"] += number
    return True


def second(world: TierState, name: str, bad: list[int]) -> bool:
    """Report a second result of an operation before its fence."""
    flight = world.executor.find(name)
    if flight is None or not flight.has_result:
        return False
    copy = flight.copy
    _in_vain(world, "second result", "complete", copy.id, results(copy, bad), False)
    return True


def _in_vain(world: TierState, situation: str, method: str, copy: int, *arguments: Any) -> None:
    """Report to an operation that has ended; this must change nothing."""
    answer = world.ask_in_vain(rules.T13, method, copy, *arguments)
    require(not answer, rules.T13, "operation {} ends twice", copy)
    world.tiers.counts["late_completions"] += 1
    world.situations[situation] += 1


def wrong_result(world: TierState, name: str, number: int) -> bool:
    """Report a result with a wrong number of blocks."""
    flight = world.executor.find(name)
    if flight is None or not flight.is_open:
        return False
    number += number >= flight.copy.num_blocks
    refused = world.ask_in_vain(rules.T12, "wrong_result", flight.copy.id, number)
    require(refused, rules.T12, "{} results for {} blocks", number, flight.copy.num_blocks)
    world.situations["wrong result"] += 1
    return True

"""Operations that finish, preempt, park and unpark requests in a world with tiers."""

from __future__ import annotations

from collections.abc import Sequence

from ...model.ghost import Tag
from ...rules import tiers as rules
from ...rules.cache import A8, P4
from ...rules.rule import require
from ..cache import end as cache_end
from ..cache.requests import Request
from .checks import check_lost, check_saving, see
from .requests import Parked, Seen
from .state import TierState
from .take import take


def finish(world: TierState, name: str) -> bool:
    """End a running request at any point: finished or aborted."""
    return _release(world, name, ends=True)


def preempt(world: TierState, name: str) -> bool:
    """Preempt a running request: it loses its blocks and waits with all its tokens."""
    return _release(world, name, ends=False)


def _release(world: TierState, name: str, *, ends: bool) -> bool:
    if not world.get(name, "running"):
        return False
    before = see(world)
    world.order.use(world.tier_model.holdings[name].shared)
    world.order.touch(world.requests[name].path(world.block_size))
    if name in world.loads:
        load = world.loads.pop(name)
        if load.left:
            world.continue_load(name, load)
        else:
            world.cancel_copy(load.copy, name)
        world.situations["released while loading"] += 1
        world.situations["loaded on, for nobody"] += bool(load.left)
    (cache_end.finish if ends else cache_end.preempt)(world, name)
    see(world)
    check_lost(world, before)
    return True


def park(world: TierState, name: str, where: str) -> bool:
    """Park a running request: preempt it and keep its KV."""
    request = world.get(name, "running")
    if request is None or name in world.loads or not (request.written or request.job):
        return False
    if where == "storage" and not world.config["storage"]:
        return False
    take(world)  # the previous step has run, with all operations before it
    before, model = see(world), world.tier_model
    num_shared = len(model.holdings[name].shared)
    if request.job:
        _compute(world, request)
    path = request.path(world.block_size)[: request.written // world.block_size]
    tail = request.written % world.block_size
    model.actor, model.needed = name, 0
    world.order.touch(path)
    if not world.ask("park", name, request.tokens[: request.written], where):
        see(world)
        grown = _published(world, name, path, num_shared)
        same = grown or world.seen == before
        require(same, A8, "{} was not parked, and tiers changed", name)
        there = {before.host[tag] for tag in path if tag in before.host}
        missing = [tag for tag in path if tag not in before.host and tag not in before.landing]
        room = before.num_free + len(before.idle - there)
        needed = len(missing) + bool(tail)
        require(needed > room, rules.T21, "{} needs {} of {} host blocks", name, needed, room)
        world.situations["not parked"] += 1
        world.without_room.add(name)
        return True
    if name in model.holdings:
        _published(world, name, path, num_shared)
    elif len(path) > num_shared:  # the host had all copies already, so the lease has ended
        _write_through(world, path)
    world.parked[name] = _parked(world, name, Parked(where, path, request.written), before)
    check_saving(world)
    request.state, request.written, request.job, request.table = "waiting", 0, "", []
    check_lost(world, before, needs_room=True)
    world.situations["parking"] += 1
    return True


def _compute(world: TierState, request: Request) -> None:
    """Complete the step of a request without publishing its KV."""
    job = world.jobs.pop(request.job)
    world.device.run_through(job)
    request.job, request.written = "", job.end
    holding, path = world.tier_model.holdings[request.name], request.path(world.block_size)
    holding.path, holding.computed = path, request.written
    world.written.update(path[: request.written // world.block_size])
    world.situations["parked before it is published"] += 1


def _published(world: TierState, name: str, path: list[Tag], num_shared: int) -> bool:
    """Check that a path is published; return whether it was new."""
    shared = world.tier_model.holdings[name].shared
    require(len(shared) >= len(path), P4, "{} has {} blocks computed and {} shared", name,
            len(path), len(shared))  # fmt: skip
    if len(shared) > num_shared:
        _write_through(world, shared)
    return len(shared) > num_shared


def _write_through(world: TierState, path: Sequence[Tag]) -> None:
    """Record that a path was published."""
    if world.config["write"] == "through" and not world.config["hits"]:
        world.to_copy.append(list(path))


def _parked(world: TierState, name: str, parked: Parked, before: Seen) -> Parked:
    """Record where a request is saved, and by which operations."""
    parked.copy, _, _ = world.ask("parked", name)
    seen = see(world)
    parked.blocks = {seen.host.get(tag, seen.landing.get(tag, 0)) for tag in parked.path}
    awaited = {before.landing[tag] for tag in parked.path if tag in before.landing}
    parked.writers = {
        flight.copy.id
        for flight in world.executor.flights
        if flight.copy.kind == "out"
        and not (flight.has_result or flight.cancelled)
        and not awaited.isdisjoint(flight.copy.destinations)
    }
    world.situations["parked behind another copy"] += bool(parked.writers)
    if parked.copy is not None:
        parked.writers.add(parked.copy)
    return parked


def unpark(world: TierState, name: str) -> bool:
    """Drop the KV of a parked request, which computes everything again."""
    parked = world.parked.pop(name, None)
    if parked is None:
        return False
    before = see(world)
    world.order.touch(parked.path)
    world.situations["unparked while it is saved"] += bool(parked.writers)
    if parked.copy in parked.writers:
        world.cancel_copy(parked.copy, "")
    world.ask("unpark", name)
    see(world)
    require(
        name not in world.tier_model.holdings, rules.T20, "{} is unparked, and has blocks", name
    )
    require(world.ask("park_misuse", name), rules.T23, "{} is unparked twice", name)
    check_lost(world, before)
    world.situations["unparked"] += 1
    return True

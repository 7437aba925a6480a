"""One step of a scheduler's world: see what the scheduler decides, tell the model, compare."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ...adapters.scheduler import Chunk
from ...model.scheduler import Request, Step
from ...model.scheduler_policies import check_granted, check_policies
from ...rules.rule import require
from ...rules.scheduler import Q2, Q32
from .state import SchedulerState


def run_step(
    world: SchedulerState,
    in_flight: Callable[[Step], object] = lambda step: None,
    early: Callable[[Step], object] | None = None,
) -> Step:
    """Run one step.

    Args:
        world: the world.
        in_flight: called between the plan and its results.
        early: called before the copies that the plan asks for begin.
    """
    target, model, copies = world.target, world.model, world.copies
    available = target.available()
    if copies is not None:
        copies.note_asked()
    step = observe(world, target.schedule(), available)
    if copies is not None and early is None:
        copies.dispatch(step.tables)
        step.num_copies = len(copies.executor.flights)
        step.awaited = copies.awaited(world.config["preempt"])
        step.loading = {flight.owner for flight in copies.executor.flights}
        step.unasked = copies.take_unasked(step)
    elif copies is not None:
        step.num_copies, step.awaited = target.num_copies(), list(model.live)
        step.loading = step.awaited
    world.counts.before(step, model.live, model.limits.max_running)
    model.decide(step)
    world.counts.after(step)
    check_policies(model, step)
    if copies is not None and early is not None:
        early(step)
        copies.dispatch(step.tables)
    if step.chunks:
        model.launch(step)
        world.situations["steps in flight"] += len(model.flights) > 1
    in_flight(step)
    if model.flights and (not step.chunks or len(model.flights) == target.depth):
        complete_step(world)
    return step


def complete_step(world: SchedulerState) -> None:
    """Complete the first step in flight."""
    target, model = world.target, world.model
    step = model.flights[0]
    model.compute(step)
    computed = [request for request in step.planned if request.is_live]
    sampled = [
        -1 if start + length < len(request.tokens) else request.next_sampled(start + length)
        for request, start, length in step.chunks
    ]
    model.complete(step, target.update(sampled))
    for request in step.planned:
        model.check_output(request, target.output(request.name), target.reason(request.name))
    world.just_ended += [request.name for request in computed if not request.is_live]


def observe(world: SchedulerState, chunks: Sequence[Chunk], available: int) -> Step:
    """See from outside which requests were preempted and admitted."""
    target, live, before = world.target, world.live, world.running
    names = target.running()
    for name in names:
        require(name in live, Q2, "{} runs, and is not live", name)
    running = [live[name] for name in names]
    for name, _, _ in chunks:
        require(name in live, Q2, "{} is computed, and is not live", name)
    tables = {name: target.block_table(name) for name in names}
    lost = [request for request in before if _has_lost(world, request, tables)]
    admitted: list[Request] = []
    preempted: list[Request] = []
    if running != before or lost:
        # A request that moved behind a younger one was preempted and admitted again.
        kept = [request for request in before if request in running and request not in lost]
        while kept != running[: len(kept)]:
            kept.pop()
        preempted = [request for request in before if request not in kept]
        admitted = running[len(kept) :]
    copies = target.copies()
    for name, copy in copies.items():
        require(name in live and copy.owner in live, Q2, "{} is copied, and not live", copy)
    arrived = world.copies.arrived if world.copies is not None else {}
    for request in admitted:
        arrived.pop(request.name, None)  # of an earlier admission
    begun = {
        request.name: target.num_computed(request.name)
        for request in running
        if (request in admitted or request.is_loading) and not target.is_loading(request.name)
    }
    return Step(
        [(live[name], start, length) for name, start, length in chunks],
        running, tables, admitted, preempted,
        hits={
            each.name: len(each.tokens) if each.name in copies else target.num_hit(each.name)
            for each in admitted
        },
        begun=begun, available=available, left=target.available(),
        arrived=arrived, copies=copies,
    )  # fmt: skip


def _has_lost(world: SchedulerState, request: Request, tables: Mapping[str, list[int]]) -> bool:
    """Whether a running request lost its blocks in between."""
    table, old = tables.get(request.name), world.model.tables[request.name]
    if table is None:
        return False
    return table[: len(old)] != old or world.target.num_computed(request.name) < request.computed


def end_by_abort(world: SchedulerState, name: str) -> bool:
    """Abort a request and check the immediate effects; False if it has ended."""
    request, target = world.live.get(name), world.target
    if request is None:
        return False
    if world.copies is not None:
        world.copies.count_race("aborted", request)
    before = target.available()
    require(target.abort(name), Q32, "{} is {}, its abort finds nothing", name, request.phase)
    require(not target.abort(name), Q32, "{} is aborted, and can be aborted again", name)
    freed = target.available() - before
    world.counts.ended(request, "aborted")
    request.reason = "abort"
    world.model.abort(request, freed)
    reason = target.reason(name)
    require(reason == "abort", Q32, "{} is aborted, and its reason is {!r}", name, reason)
    world.model.check_output(request, target.output(name), reason)
    world.just_ended.append(name)
    return True


def receive(world: SchedulerState) -> None:
    """Let a decode node receive the waiting requests for which it has blocks."""
    target, model, before = world.target, world.model, world.model.receiving
    assert world.copies is not None, "a decode node without tiers"
    while target.ask():
        world.copies.dispatch({})  # they read blocks into which KV arrives now
        name, rank, num_cached, num_on_device, table = target.receive()
        require(name in model.live, Q2, "{} is received, and is not live", name)
        request = model.live[name]
        if name not in before:
            check_granted(model, request, num_cached)
        num_below = num_cached - num_on_device
        world.counts.received(request, num_on_device, num_below, is_loaded=name in before)
        if model.receive(request, table, num_cached, (*request.order[:-1], rank)):
            model.check_output(request, target.output(name), target.reason(name))
            world.just_ended.append(name)
    waiting = [name for name, each in model.live.items() if each.phase == "waiting"]
    tables = {name: target.block_table(name) for name in waiting}
    model.receiving = {name: table for name, table in tables.items() if table}
    for name in model.receiving.keys() - before.keys():
        check_granted(model, model.live[name], len(model.live[name].tokens))


def settle(world: SchedulerState) -> None:
    """Compare the state of the scheduler with the model, between two calls."""
    target, model = world.target, world.model
    if world.is_decode_node:
        receive(world)
    in_flight = {name for step in model.flights for name in step.readers}
    kept = {name: target.block_table(name) for name in in_flight - model.live.keys()}
    for name in world.just_ended:
        table = target.block_table(name)
        require(name in kept or not table, Q2, "{} has ended, and holds {}", name, table)
    world.just_ended = list(kept)
    running = target.running()
    known = [name for name in running if name in model.live]
    model.settle(
        running,
        target.waiting(),
        {name: target.block_table(name) for name in known},
        {name: target.num_computed(name) for name in known},
        target.available(),
        kept,
        is_busy=target.num_copies() > 0,
    )
    if "counts" in target.can:
        world.counts.compare(target.counts())

"""One step of a scheduler's world: plan, observe state changes, compute, update."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ...adapters.scheduler import Chunk
from ...rules.rule import require
from ...rules.scheduler import Q1, Q10, Q13, Q23
from .checks import check_output, check_plan, read
from .policy import check_policy
from .requests import Step, Tracked
from .state import SchedulerState


def run_step(
    world: SchedulerState, in_flight: Callable[[Step], object] = lambda step: None
) -> None:
    """Run one step; `in_flight` is called between the plan and its results."""
    target = world.target
    available, growth = target.available(), _growth(world)
    prefilling = {request for request in world.running if request.prefilling}
    chunks = target.schedule()
    step = observe(world, chunks, available, growth)
    count_plan(world, step, prefilling)
    check_plan(world, step)
    check_policy(world, step)
    in_flight(step)
    compute(world, step)
    if step.chunks:
        take_in(world, step)


def _growth(world: SchedulerState) -> int:
    """Number of blocks that decoding requests need for one more token."""
    size, tables = world.block_size, world.tables
    return sum(
        len(request.tokens) > len(tables[request.name]) * size
        for request in world.running
        if not request.prefilling
    )


def observe(world: SchedulerState, chunks: Sequence[Chunk], available: int, growth: int) -> Step:
    """Observe from outside which requests were preempted and admitted."""
    target, live, before = world.target, world.live, world.running
    names = target.running()
    for name in names:
        require(name in live, Q1, "{} runs, and is not live", name)
    running = [live[name] for name in names]
    for name, _, _ in chunks:
        require(name in live, Q1, "{} is computed, and is not live", name)
    step = Step(
        [(live[name], start, length) for name, start, length in chunks],
        running, growth, available, target.available(),
    )  # fmt: skip
    tables = {name: target.block_table(name) for name in names}
    lost = [request for request in before if _has_lost(world, request, tables)]
    if running != before or lost:
        # A request that moved behind a younger one was preempted and admitted again.
        kept = [request for request in before if request in running and request not in lost]
        while kept != running[: len(kept)]:
            kept.pop()
        step.preempted = [request for request in before if request not in kept]
        step.admitted = running[len(kept) :]
    for request in step.preempted:
        request.phase = "preempted"
        request.num_preemptions += 1
        request.computed = request.target = request.hit = 0
    for request in step.admitted:
        request.phase = "running"
        request.hit = target.num_hit(request.name)
        request.computed = target.num_computed(request.name)
        request.target = len(request.tokens)
    world.running, world.tables = running, tables
    return step


def _has_lost(world: SchedulerState, request: Tracked, tables: Mapping[str, list[int]]) -> bool:
    """Whether a running request lost its blocks in between."""
    table, old = tables.get(request.name), world.tables[request.name]
    if table is None:
        return False
    return table[: len(old)] != old or world.target.num_computed(request.name) < request.computed


def count_plan(world: SchedulerState, step: Step, prefilling: set[Tracked]) -> None:
    """Update the expected counters and the situations."""
    books, seen = world.books, world.situations
    books.steps += bool(step.chunks)
    books.preemptions += len(step.preempted)
    for request in step.preempted:
        seen["preempted in prefill" if request in prefilling else "preempted in decode"] += 1
        seen["preempted twice"] += request.num_preemptions == 2
    seen["preempted two at once"] += len(step.preempted) > 1
    for request in step.admitted:
        if request.num_preemptions:
            books.resumed += 1
            books.resumed_hit_tokens += request.computed
            seen["resumed with a hit" if request.hit else "resumed without a hit"] += 1
        else:
            books.admitted += 1
            books.hit_tokens += request.computed
            seen["hit"] += request.hit > 0
        seen["whole hit"] += request.hit == len(request.tokens)
    for request, start, length in step.chunks:
        end = start + length
        if request.prefilling:
            books.prefill_tokens += length
            books.recomputed_tokens += max(min(end, request.reached) - start, 0)
            seen["chunk cut by the budget"] += end < len(request.tokens)
        else:
            books.decode_tokens += length
        request.reached = max(request.reached, end)
    seen["prefill beside decode"] += 0 < num_decode(step) < len(step.chunks)
    seen["all slots taken"] += len(step.running) == world.config["max_running"] > 1


def num_decode(step: Step) -> int:
    """Number of chunks of decoding requests."""
    return sum(not request.prefilling for request, _, _ in step.chunks)


def end_by_abort(world: SchedulerState, name: str, step: Step | None = None) -> bool:
    """Abort a request and check the immediate effects; False if it has ended."""
    request = world.live.get(name)
    if request is None:
        return False
    target, phase = world.target, request.phase
    in_flight = step is not None and any(chunk[0] is request for chunk in step.chunks)
    if phase == "running":
        phase_seen = "aborted in prefill" if request.prefilling else "aborted in decode"
    else:
        phase_seen = f"aborted {phase}"
    world.situations[phase_seen] += 1
    world.situations["aborted in flight"] += in_flight
    before = target.available() if target.promises.exact else 0
    table = target.block_table(name)
    require(target.abort(name), Q13, "{} is {}, and its abort finds nothing", name, phase)
    require(not target.abort(name), Q13, "{} is aborted, and can be aborted again", name)
    reason = target.reason(name)
    require(reason == "abort", Q13, "{} is aborted, and its reason is {!r}", name, reason)
    output, known = target.output(name), request.outputs[: request.num_output]
    require(output == known, Q10, "{} aborted has output {}, and not {}", name, output, known)
    if in_flight and target.promises.exact:
        now = target.available()
        require(
            now == before,
            Q23, "{} is in flight through {}, and its abort frees {} blocks",
            name, table, now - before,
        )  # fmt: skip
    if request.phase == "running":
        world.running = [other for other in world.running if other is not request]
    world.end(request)
    return True


def compute(world: SchedulerState, step: Step) -> None:
    """Simulate the device: read everything before each chunk, then write the chunk."""
    for request, start, _ in step.chunks:
        read(world, request, start, "in a step")
    for request, start, length in step.chunks:
        # The last token of a full hit is computed only for its logits; its KV is cached.
        first = max(start, request.hit)
        tags = request.tags[: start + length]
        world.ghost.write_sequence(world.tables[request.name], tags, first)


def take_in(world: SchedulerState, step: Step) -> None:
    """Report the results to the scheduler; check which requests ended, and why."""
    tokens = [
        request.outputs[request.num_output] if start + length == len(request.tokens) else -1
        for request, start, length in step.chunks
    ]
    ended = world.target.update(tokens)
    expected = []
    for request, start, length in step.chunks:
        if not request.is_live:  # aborted while in flight
            continue
        request.computed = start + length
        if request.computed == len(request.tokens) and request.append_next() is not None:
            expected.append(request.name)
            world.situations[f"ended by {request.reason}"] += 1
            world.end(request)
        check_output(world, request)
    require(
        sorted(ended) == sorted(expected),
        Q10, "{} ended in this step, and not {}", ended, expected,
    )  # fmt: skip
    world.running = [request for request in world.running if request.is_live]

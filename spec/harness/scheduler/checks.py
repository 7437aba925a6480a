"""Checks of every scheduler, in a step and between any two calls."""

from __future__ import annotations

from dataclasses import asdict

from ...model.ghost import ContentError
from ...rules.rule import Violation, require
from ...rules.scheduler import Q1, Q2, Q3, Q4, Q6, Q10, Q11, Q12, Q16, Q21, Q22, Q24, Q29
from .requests import Step, Tracked
from .state import SchedulerState


def check_plan(world: SchedulerState, step: Step) -> None:
    """Check the plan of a step."""
    config = world.config
    require(
        bool(step.chunks) == bool(world.live),
        Q24, "{} chunks are planned for {} requests that live", len(step.chunks), len(world.live),
    )  # fmt: skip
    require(
        step.num_tokens <= config["token_budget"],
        Q2, "{} tokens are planned, the budget is {}", step.num_tokens, config["token_budget"],
    )  # fmt: skip
    require(
        len(step.running) <= config["max_running"],
        Q2, "{} run, and {} may", len(step.running), config["max_running"],
    )  # fmt: skip
    for request in step.admitted:
        wanted = min(request.hit, len(request.tokens) - 1)
        require(
            request.computed == wanted and request.hit % world.block_size == 0,
            Q11, "{} starts at {} of {} tokens after a hit of {}",
            request.name, request.computed, len(request.tokens), request.hit,
        )  # fmt: skip
    planned = set()
    for request, start, length in step.chunks:
        name = request.name
        require(name not in planned, Q3, "{} has two chunks in a step", name)
        planned.add(name)
        require(request.phase == "running", Q1, "{} is computed while {}", name, request.phase)
        require(
            start == request.computed and 1 <= length <= len(request.tokens) - start,
            Q3, "{} has {} of {} tokens computed, and its chunk is {} tokens from {}",
            name, request.computed, len(request.tokens), length, start,
        )  # fmt: skip
        table = world.tables[name]
        needed = world.blocks_for(start + length)
        require(
            len(table) >= needed and len(set(table)) == len(table),
            Q4, "{} writes up to token {}, which takes {} blocks, with {}",
            name, start + length, needed, table,
        )  # fmt: skip
    if world.target.promises.whole:
        for request in step.running:
            held, whole = len(world.tables[request.name]), world.blocks_for(len(request.tokens))
            require(
                held == whole,
                Q21, "{} holds {} blocks for its {} tokens, not {}",
                request.name, held, len(request.tokens), whole,
            )  # fmt: skip


def read(world: SchedulerState, request: Tracked, end: int, when: str) -> None:
    """Check that a request reads its own prefix, up to token `end`."""
    table = world.tables[request.name]
    require(
        len(table) * world.block_size >= end,
        Q4, "{} reads {} tokens through {}, {}", request.name, end, table, when,
    )  # fmt: skip
    try:
        world.ghost.read_sequence(table, request.tags[:end])
    except ContentError as error:
        raise Violation(Q12, f"{request.name} {when}: {error}") from error


def check_output(world: SchedulerState, request: Tracked) -> None:
    """Check the output of a request, and its reason if it has ended."""
    output, reason = world.target.output(request.name), world.target.reason(request.name)
    known = request.outputs[: request.num_output]
    require(output == known, Q10, "{} has output {}, and not {}", request.name, output, known)
    wanted = request.reason if request.phase == "ended" else None
    require(
        reason == wanted,
        Q10, "{} ended by {!r} and not {!r} with {} of {} tokens",
        request.name, reason, wanted, len(output), request.submission.max_new_tokens,
    )  # fmt: skip


def check_settled(world: SchedulerState) -> None:
    """Check the rules that hold between any two calls."""
    target = world.target
    running, waiting = target.running(), target.waiting()
    known = [request.name for request in world.running]
    require(running == known, Q1, "{} run, and not {}", running, known)
    queued = {name for name, request in world.live.items() if request.phase != "running"}
    require(
        len(waiting) == len(queued) and set(waiting) == queued,
        Q1, "{} wait, and not {}", waiting, sorted(queued),
    )  # fmt: skip
    if target.promises.policy and len(waiting) > 1:
        tried = [
            (world.live[name].phase != "preempted", world.live[name].order) for name in waiting
        ]
        require(tried == sorted(tried), Q6, "they wait in the order {}", waiting)
    for name in world.just_ended:
        table = target.block_table(name)
        require(not table, Q1, "{} has ended, and holds {}", name, table)
    world.just_ended.clear()
    held = set()
    for request in world.running:
        name = request.name
        computed = target.num_computed(name)
        require(
            computed == request.computed,
            Q3, "{} says that {} tokens are computed, not {}", name, computed, request.computed,
        )  # fmt: skip
        table = world.tables[name] = target.block_table(name)
        read(world, request, computed, "between two steps")
        held.update(table)
    if target.promises.exact:
        available = target.available()
        require(
            len(held) + available == world.config["num_blocks"],
            Q22, "{} blocks are held and {} can be had, of {}",
            len(held), available, world.config["num_blocks"],
        )  # fmt: skip
    if "counts" in target.can:
        check_counts(world)


def check_counts(world: SchedulerState) -> None:
    """Check the reported counters."""
    reported, books = world.target.counts(), world.books
    for name, count in vars(books).items():
        if reported[name] != count:
            which = Q16 if "hit" in name else Q29
            require(False, which, "{} is {}, and not {}", name, reported[name], asdict(books)[name])

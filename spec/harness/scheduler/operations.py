"""The operations of a scheduler's world, and their table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ...adapters.scheduler import Submission
from ...model.scheduler import Request, root_tag
from ...rules.rule import require
from ...rules.scheduler import Q30, Q31, Q33, Q34, Q38
from ..engine import Below
from ..operations import ALWAYS, Groups, Operation, Table, name_drawn, number
from .configuration import MAX_WAITING, NAMESPACES, draw_prompt
from .copies import ROUNDS
from .state import SchedulerState
from .step import complete_step, end_by_abort, run_step, settle

LAST_PRIORITY: Final = 3
"""Priority of requests that must not overtake others."""

COPIES_PER_STEP: Final = 8
"""Upper bound of the copies that requests wait for, one by one, per step that computes."""

LATE_STEPS: Final = 3
"""Steps after the last request in which blocks become available that are freed late."""


def submit(
    world: SchedulerState,
    name: str,
    prompt: Sequence[int],
    max_new_tokens: int,
    priority: int,
    stop: Sequence[int],
    namespace: int,
) -> bool:
    """Queue a request; check that it is refused if and only if it can never fit."""
    return _submit(world, name, prompt, max_new_tokens, priority, stop, namespace)


def sample(world: SchedulerState, name: str, of: str, max_new_tokens: int, seed: int) -> bool:
    """Queue another sample of a request's prompt, whether that lives or not."""
    first = next((each for each in world.past if each.name == of), None)
    if first is None:
        return False
    prompt = first.tokens[: len(first.tokens) - first.num_output]
    return _submit(world, name, prompt, max_new_tokens, 0, [], world.namespace[of], first, seed)


def _submit(
    world: SchedulerState,
    name: str,
    prompt: Sequence[int],
    max_new_tokens: int,
    priority: int,
    stop: Sequence[int],
    namespace: int,
    first: Request | None = None,
    seed: int = 0,
) -> bool:
    if any(request.name == name for request in world.past) or not prompt or max_new_tokens < 1:
        return False
    order = (priority,) if world.config["policy"] == "priority" else ()
    request = Request(
        name, prompt, max_new_tokens, (*order, len(world.past)), world.roots[namespace],
        world.config["alphabet"], stop, first, seed,
    )  # fmt: skip
    submission = Submission(
        name, tuple(prompt), max_new_tokens, priority, tuple(stop), NAMESPACES[namespace],
        request.outputs[0], "" if first is None else first.name,
    )  # fmt: skip
    world.past.append(request)
    world.namespace[name] = namespace
    world.model.submit(request, world.target.add(submission))
    if world.copies is not None and request.is_live:
        world.copies.track(request, NAMESPACES[namespace])
    return True


def step(world: SchedulerState) -> bool:
    """Run one step."""
    run_step(world)
    return True


def complete(world: SchedulerState) -> bool:
    """Complete the first step in flight, before the scheduler runs as far ahead as it may."""
    if not world.model.flights:
        return False
    complete_step(world)
    return True


def step_abort(world: SchedulerState, names: Sequence[str]) -> bool:
    """Run a step, and abort some requests while it is in flight."""
    run_step(world, lambda step: [end_by_abort(world, name) for name in names])
    return True


def step_abort_early(world: SchedulerState, names: Sequence[str]) -> bool:
    """Run a step, and abort some requests before the copies that it asks for begin."""
    run_step(world, early=lambda step: [end_by_abort(world, name) for name in names])
    return True


def step_misuse(world: SchedulerState, kind: int, name: str) -> bool:
    """Run a step, and make a wrong call while it is in flight."""
    run_step(world, lambda step: step.chunks and misuse(world, kind, name))
    return True


def abort(world: SchedulerState, name: str) -> bool:
    """Abort between two steps."""
    return end_by_abort(world, name)


def misuse(world: SchedulerState, kind: int, name: str) -> bool:
    """Make a wrong call."""
    if "misuse" not in world.target.can or not any(each.name == name for each in world.past):
        return False
    refused = world.target.misuse(kind, name)
    require(refused, Q34, "the wrong call {} with {} is not refused", kind, name)
    world.situations["misuse refused"] += 1
    return True


def most_steps(world: SchedulerState) -> int:
    """Upper bound of the steps until all live requests end: at worst they run one by one.

    The first in the order is never preempted and progresses in every step; each request that
    ends may have made all others start again. Beside copies, some steps only wait.
    """
    work = sum(request.max_kv_tokens + 1 for request in world.live.values())
    bound = world.target.depth * (len(world.live) + 1) * work
    return bound if world.copies is None else COPIES_PER_STEP * bound + ROUNDS


def flood(world: SchedulerState, name: str, prompt: Sequence[int], max_new_tokens: int) -> bool:
    """Submit new requests in every step until all current ones have ended."""
    old = list(world.live.values())
    if world.is_decode_node:  # it lets a bounded number overtake: see the hand-off's X-rules
        return False
    if not old or not prompt or any(each.name == f"{name}.1" for each in world.past):
        return False
    work = len(prompt) + max_new_tokens
    bound = most_steps(world) + (world.config["max_running"] + 1) * work
    number = 0
    while any(request.is_live for request in old):
        require(number < bound, Q31, "{} steps, and {} have not ended", bound, world.names(old))
        number += 1
        if len(world.live) - len(world.running) < MAX_WAITING:
            priority = LAST_PRIORITY
            submit(world, f"{name}.{number}", prompt, max_new_tokens, priority, [], 0)
        step = run_step(world)
        if world.copies is not None:
            world.copies.advance(step, world.config["late"])
        settle(world)
    world.situations["flooded"] += 1
    return True


def drain(world: SchedulerState) -> bool:
    """Run until all requests end, within the bound; then no block may be held."""
    world.situations["drained with work"] += bool(world.live)
    bound = most_steps(world)
    for _ in range(bound):
        if not world.live:
            break
        step = run_step(world)
        if world.copies is not None:
            world.copies.advance(step, world.config["late"])
        settle(world)
    require(
        not world.live,
        Q30, "{} steps, and {} have not ended", bound, world.names(list(world.live.values())),
    )  # fmt: skip
    while world.model.flights:  # of requests that ended meanwhile
        complete_step(world)
    for _ in range(0 if world.target.promises.exact else LATE_STEPS):
        run_step(world)
    if world.copies is not None:
        world.copies.finish()
    available = world.target.available()
    require(
        available == world.config["num_blocks"],
        Q38, "all have ended, and {} of {} blocks can be had",
        available, world.config["num_blocks"],
    )  # fmt: skip
    if "check" in world.target.can:
        world.target.check()
    return True


def copy_ends(world: SchedulerState, name: str, bad: Sequence[int], fenced: int) -> bool:
    """End a copy, perhaps in part; with `fenced` 0, it may still write until its fence."""
    flight = world.copies.executor.find(name) if world.copies is not None else None
    if flight is None or world.copies is None:
        return False
    world.situations[f"{'ended' if not bad else 'failed'}: {flight.copy.kind}"] += 1
    world.copies.end(flight, bad, bool(fenced))
    return True


def elsewhere(world: SchedulerState, name: str, num_blocks: int) -> bool:
    """Another process computes a live request and stores its first blocks."""
    if world.copies is None or name not in world.live:
        return False
    world.copies.store(world.live[name], num_blocks)
    return True


def reset(world: SchedulerState, keep: Sequence[int], renamed: int) -> bool:
    """Drop all KV but that of some namespaces; with `renamed`, the others get new weights."""
    if world.copies is None:
        return False
    while world.model.flights:
        complete_step(world)
    for request in world.live.values():
        world.copies.count_race("reset", request)
    world.situations["reset with parked"] += world.target.num_parked() > 0
    world.num_resets += 1
    for index in range(len(NAMESPACES) if renamed else 0):
        if index not in keep:
            world.roots[index] = root_tag(index, world.num_resets)
    weights = str(world.num_resets) if renamed else ""
    world.target.reset([NAMESPACES[index] for index in keep], weights)
    kept = [name for name, index in world.namespace.items() if index in keep and name in world.live]
    parked = world.target.num_parked()
    require(
        parked <= len(kept),
        Q33, "{} stay parked after a reset that keeps the namespaces {}", parked, keep,
    )  # fmt: skip
    world.counts.books.preemptions += len(world.running)
    world.model.reset({name: world.roots[world.namespace[name]] for name in world.live})
    world.copies.reset()
    for name, request in world.live.items():
        world.copies.track(request, NAMESPACES[world.namespace[name]])
    return True


def groups(world: SchedulerState) -> Groups:
    """Return the names of requests that operations apply to, or "" for none."""
    live = list(world.live)
    return {
        ALWAYS: [""],
        "submit": [""] if len(live) - len(world.running) < MAX_WAITING else [],
        "live": live,
        "any": live or ["r1"],
        "sampled": live if len(live) - len(world.running) < MAX_WAITING else [],
        "flights": [""] if world.model.flights else [],
        "copies": world.copies.executor.names() if world.copies is not None else [],
    }


# How arguments are drawn


def new_name(world: SchedulerState, name: str, below: Below) -> str:
    """The name of the next request."""
    return f"r{len(world.past) + 1}"


def new_flood(world: SchedulerState, name: str, below: Below) -> str:
    """The name of the next requests of a flood."""
    return f"f{len(world.past) + 1}"


def prompt(world: SchedulerState, name: str, below: Below) -> list[int]:
    """A prompt, often one that extends an earlier one, often of about whole blocks."""
    return draw_prompt(below, [request.tokens for request in world.past], world.config)


def short_prompt(world: SchedulerState, name: str, below: Below) -> list[int]:
    """A prompt of a few tokens."""
    return prompt(world, name, below)[:4]


def stop(world: SchedulerState, name: str, below: Below) -> list[int]:
    """No stop token, or sometimes one."""
    return [below(world.config["alphabet"])] if below(8) == 0 else []


def namespace(world: SchedulerState, name: str, below: Below) -> int:
    """The first namespace, or sometimes any."""
    return below(len(NAMESPACES)) if below(6) == 0 else 0


def some_live(world: SchedulerState, name: str, below: Below) -> list[str]:
    """One or two of the live requests, perhaps the same one twice."""
    live = list(world.live)
    return [live[below(len(live))] for _ in range(1 + below(2))]


def bad_places(world: SchedulerState, name: str, below: Below) -> list[int]:
    """No blocks, or sometimes some of those of a copy."""
    flight = world.copies.executor.find(name) if world.copies is not None else None
    if flight is None or below(4):
        return []
    count = flight.copy.num_blocks
    return [place for place in range(count) if below(3) == 0] or [below(count)]


def usually(world: SchedulerState, name: str, below: Below) -> int:
    """1, or sometimes 0."""
    return int(below(5) > 1)


def namespaces(world: SchedulerState, name: str, below: Below) -> list[int]:
    """Some namespaces."""
    return [number for number in range(len(NAMESPACES)) if below(3) == 0]


_MISUSE: Final = {"kind": number(8), "name": name_drawn}

SCHEDULER_TABLE: Final[Table[SchedulerState]] = Table(groups, [
    Operation("submit", submit, 40, "submit",
              {"name": new_name, "prompt": prompt, "max_new_tokens": number(14, 1),
               "priority": number(3), "stop": stop, "namespace": namespace}),
    Operation("sample", sample, 20, "sampled",
              {"name": new_name, "of": name_drawn, "max_new_tokens": number(3, 1),
               "seed": number(3)}, needs="copies"),
    Operation("step", step, 100),
    Operation("complete", complete, 12, "flights"),
    Operation("step_abort", step_abort, 3, "live", {"names": some_live}),
    Operation("abort", abort, 5, "live", {"name": name_drawn}),
    Operation("misuse", misuse, 3, "any", _MISUSE, needs="misuse"),
    Operation("step_misuse", step_misuse, 3, "any", _MISUSE, needs="misuse"),
    Operation("flood", flood, 3, "live",
              {"name": new_flood, "prompt": short_prompt, "max_new_tokens": number(3, 1)}),
    Operation("drain", drain, 2),
    Operation("copy", copy_ends, 60, "copies",
              {"name": name_drawn, "bad": bad_places, "fenced": usually}, needs="take"),
    Operation("elsewhere", elsewhere, 15, "live", {"name": name_drawn, "num_blocks": number(5, 1)},
              needs="take"),
    Operation("reset", reset, 10, "live", {"keep": namespaces, "renamed": usually}, needs="reset"),
    Operation("step_abort_early", step_abort_early, 10, "live", {"names": some_live}, needs="take"),
])  # fmt: skip

"""The operations of a scheduler's world, and their table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ...adapters.scheduler import Submission
from ...model.scheduler import Request, root_tag
from ...rules.rule import require
from ...rules.scheduler import Q14, Q15, Q20, Q30
from ..engine import Below
from ..operations import ALWAYS, Groups, Operation, Table, name_drawn, number
from .configuration import MAX_WAITING, NAMESPACES, draw_prompt
from .state import SchedulerState
from .step import end_by_abort, run_step, settle

LAST_PRIORITY: Final = 3
"""Priority of requests that must not overtake others."""

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
    if any(request.name == name for request in world.past) or not prompt or max_new_tokens < 1:
        return False
    submission = Submission(
        name, tuple(prompt), max_new_tokens, priority, tuple(stop), NAMESPACES[namespace]
    )
    order = (priority,) if world.config["policy"] == "priority" else ()
    request = Request(
        name, prompt, max_new_tokens, (*order, len(world.past)), root_tag(namespace),
        world.config["alphabet"], stop,
    )  # fmt: skip
    world.past.append(request)
    world.model.submit(request, world.target.add(submission))
    return True


def step(world: SchedulerState) -> bool:
    """Run one step."""
    run_step(world)
    return True


def step_abort(world: SchedulerState, names: Sequence[str]) -> bool:
    """Run a step, and abort some requests while it is in flight."""
    run_step(world, lambda step: [end_by_abort(world, name, step) for name in names])
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
    require(refused, Q30, "the wrong call {} with {} is not refused", kind, name)
    world.situations["misuse refused"] += 1
    return True


def flood(world: SchedulerState, name: str, prompt: Sequence[int], max_new_tokens: int) -> bool:
    """Submit new requests in every step until all current ones have ended."""
    old = list(world.live.values())
    if not old or not prompt or any(each.name == f"{name}.1" for each in world.past):
        return False
    work = len(prompt) + max_new_tokens
    bound = world.model.bound() + (world.config["max_running"] + 1) * work
    number = 0
    while any(request.is_live for request in old):
        require(number < bound, Q15, "{} steps, and {} have not ended", bound, world.names(old))
        number += 1
        if len(world.live) - len(world.running) < MAX_WAITING:
            priority = LAST_PRIORITY
            submit(world, f"{name}.{number}", prompt, max_new_tokens, priority, [], 0)
        run_step(world)
        settle(world)
    world.situations["flooded"] += 1
    return True


def drain(world: SchedulerState) -> bool:
    """Run until all requests end, within the bound; then no block may be held."""
    world.situations["drained with work"] += bool(world.live)
    bound = world.model.bound()
    for _ in range(bound):
        if not world.live:
            break
        run_step(world)
        settle(world)
    require(
        not world.live,
        Q14, "{} steps, and {} have not ended", bound, world.names(list(world.live.values())),
    )  # fmt: skip
    for _ in range(0 if world.target.promises.exact else LATE_STEPS):
        run_step(world)
    available = world.target.available()
    require(
        available == world.config["num_blocks"],
        Q20, "all have ended, and {} of {} blocks can be had",
        available, world.config["num_blocks"],
    )  # fmt: skip
    if "check" in world.target.can:
        world.target.check()
    return True


def groups(world: SchedulerState) -> Groups:
    """Return the names of requests that operations apply to, or "" for none."""
    live = list(world.live)
    return {
        ALWAYS: [""],
        "submit": [""] if len(live) - len(world.running) < MAX_WAITING else [],
        "live": live,
        "any": live or ["r1"],
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


_MISUSE: Final = {"kind": number(8), "name": name_drawn}

SCHEDULER_TABLE: Final[Table[SchedulerState]] = Table(groups, [
    Operation("submit", submit, 40, "submit",
              {"name": new_name, "prompt": prompt, "max_new_tokens": number(14, 1),
               "priority": number(3), "stop": stop, "namespace": namespace}),
    Operation("step", step, 100),
    Operation("step_abort", step_abort, 3, "live", {"names": some_live}),
    Operation("abort", abort, 4, "live", {"name": name_drawn}),
    Operation("misuse", misuse, 3, "any", _MISUSE, needs="misuse"),
    Operation("step_misuse", step_misuse, 3, "any", _MISUSE, needs="misuse"),
    Operation("flood", flood, 1, "live",
              {"name": new_flood, "prompt": short_prompt, "max_new_tokens": number(3, 1)}),
    Operation("drain", drain, 2),
])  # fmt: skip

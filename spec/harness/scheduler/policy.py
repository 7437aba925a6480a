"""Checks of promised policies: order, preemption and reservation."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from ...rules.rule import require
from ...rules.scheduler import Q5, Q6, Q7, Q8, Q9, Q17, Q18, Q25, Q26, Q27, Q28
from .requests import Step, Tracked
from .state import SchedulerState


def check_policy(world: SchedulerState, step: Step) -> None:
    """Check a step against all promises."""
    promises = world.target.promises
    if promises.running_first:
        check_progress(world, step)
    if promises.resumed_first:
        check_resumed_first(world, step)
    if step.preempted:
        check_preempted(world, step)
    if promises.policy:
        check_order(world, step)
    if promises.leaders and step.admitted:
        check_leaders(world, step)
    if promises.reserves and not step.preempted:
        check_reserved(world, step)


def check_progress(world: SchedulerState, step: Step) -> None:
    """Q5: every running request progresses, decoding ones first; only the budget cuts a chunk."""
    planned = [request for request, _, _ in step.chunks]
    wanted = [r for r in step.running if not r.prefilling] + [
        r for r in step.running if r.prefilling
    ]
    require(
        planned == wanted,
        Q5, "the step computes {}, and {} run", _names(planned), _names(step.running),
    )  # fmt: skip
    for request, start, length in step.chunks:
        whole = start + length == len(request.tokens)
        require(
            whole or (request is planned[-1] and step.num_tokens == world.config["token_budget"]),
            Q5, "the chunk of {} ends at {} of {} tokens, with {} tokens in the step",
            request.name, start + length, len(request.tokens), step.num_tokens,
        )  # fmt: skip


def check_resumed_first(world: SchedulerState, step: Step) -> None:
    """Q7, Q8: preempted requests are admitted first, but not in the same step."""
    require(
        not (step.preempted and step.admitted),
        Q8, "{} are preempted and {} admitted", _names(step.preempted), _names(step.admitted),
    )  # fmt: skip
    new = [request for request in step.admitted if not request.num_preemptions]
    if new:
        parked = [r for r in world.live.values() if r.phase == "preempted"]
        require(not parked, Q7, "{} start while {} wait", _names(new), _names(parked))
        last = step.admitted[-1]
        before_new = step.admitted.index(new[0]) + len(new) == len(step.admitted)
        require(before_new, Q7, "{} is resumed after a new request", last.name)


def check_preempted(world: SchedulerState, step: Step) -> None:
    """Q9, Q18, Q25: preempt the last in the order, only for blocks, never if all is reserved."""
    promises, names = world.target.promises, _names(step.preempted)
    if promises.never_preempts:
        whole = world.config["reserve_tokens"] is None
        require(not whole, Q18, "{} preempted, with all reserved", names)
    if promises.exact:
        require(
            step.growth > step.available,
            Q25, "{} preempted for {} blocks with {} to be had", names, step.growth, step.available,
        )  # fmt: skip
    if promises.policy:
        least = min(request.order for request in step.preempted)
        for request in step.running:
            require(request.order < least, Q9, "{} preempted, and {} goes on", names, request.name)


def check_order(world: SchedulerState, step: Step) -> None:
    """Q6: no request is overtaken that could have been admitted."""
    for first, second in pairwise(step.admitted):
        same = bool(first.num_preemptions) == bool(second.num_preemptions)
        require(
            not same or first.order < second.order,
            Q6, "{} is admitted before {}", first.name, second.name,
        )  # fmt: skip
    for request in step.admitted:
        ahead = step.running[: step.running.index(request)]
        phase = "preempted" if request.num_preemptions else "waiting"
        for other in world.live.values():
            if other.phase == phase and other.order < request.order:
                require(
                    world.target.promises.leaders and leader_of(world, other, ahead),
                    Q6, "{} is admitted and {} goes on waiting", request.name, other.name,
                )  # fmt: skip


def next_block(world: SchedulerState, request: Tracked) -> int:
    """End of the first block that a prefilling request has not published; 0 if none."""
    if not (request.prefilling and world.config["prefix_cache"]):
        return 0
    end = (request.shared_blocks(world.block_size) + 1) * world.block_size
    return end if end <= len(request.tokens) else 0


def leader_of(world: SchedulerState, request: Tracked, running: Iterable[Tracked]) -> str:
    """Name of the request that is about to compute a block of another; "" if none."""
    for leader in running:
        end = next_block(world, leader)
        if end and end <= len(request.tokens) and leader.tags[end - 1] == request.tags[end - 1]:
            return leader.name
    return ""


def check_leaders(world: SchedulerState, step: Step) -> None:
    """Q17: two requests do not compute the same block if the second could have waited."""
    for request in step.admitted:
        end = next_block(world, request)
        for leader in step.running[: step.running.index(request)] if end else ():
            require(
                next_block(world, leader) != end or leader.tags[end - 1] != request.tags[end - 1],
                Q17, "{} is admitted to compute tokens up to {}, as {} is about to",
                request.name, end, leader.name,
            )  # fmt: skip


class Reserve:
    """Blocks that the running requests may still need.

    Attributes:
        growth: blocks needed within the horizon.
        lack: maximum over the requests of the blocks missing to the end, less those that
            preempting the others frees.
        private: blocks that become free if all are preempted.
    """

    def __init__(self, world: SchedulerState, running: Iterable[Tracked]) -> None:
        self.world = world
        self.growth = self.lack = self.private = 0
        for request in running:
            held = len(world.tables[request.name])
            shared = request.shared_blocks(world.block_size) if world.config["prefix_cache"] else 0
            self.growth += self.growth_of(request, held)
            lack = world.blocks_for(request.max_kv_tokens) - held + held - shared
            self.lack = max(self.lack, lack)
            self.private += held - shared

    def growth_of(self, request: Tracked, held: int) -> int:
        """Number of blocks by which a request grows within the horizon."""
        most, horizon = request.max_kv_tokens, self.world.config["reserve_tokens"]
        if horizon is not None:
            most = min(most, len(request.tokens) + horizon)
        return max(self.world.blocks_for(most) - held, 0)


def check_reserved(world: SchedulerState, step: Step) -> None:
    """Q26, Q27, Q28: an admission leaves the reserve, and a request that fits is admitted."""
    reserve, left = Reserve(world, step.running), step.available_now
    if step.admitted:
        names = _names(step.admitted)
        require(
            left >= reserve.growth,
            Q26, "{} admitted, {} blocks are left for a growth of {}", names, left, reserve.growth,
        )  # fmt: skip
        require(
            left + reserve.private >= reserve.lack,
            Q27, "{} admitted, {} blocks are left and {} private, the neediest lacks {}",
            names, left, reserve.private, reserve.lack,
        )  # fmt: skip
    phases = {request.phase for request in world.live.values()}
    phase = "preempted" if "preempted" in phases else "waiting"
    head = min((r for r in world.live.values() if r.phase == phase), default=None, key=_order)
    room = len(step.running) < world.config["max_running"]
    if head is None or not room or step.num_tokens >= world.config["token_budget"]:
        return
    if world.target.promises.leaders and leader_of(world, head, step.running):
        world.situations["waited for a leader"] += 1
        return
    # A hit only reduces the need, so a request that fits without one must be admitted.
    held = world.blocks_for(len(head.tokens))
    lack = max(reserve.lack, world.blocks_for(head.max_kv_tokens) - held)
    after = left - held
    fits = after >= reserve.growth + reserve.growth_of(head, held)
    require(
        not (fits and after + reserve.private >= lack),
        Q28, "{} waits, with {} blocks for its {} tokens and a slot", head.name, left,
        len(head.tokens),
    )  # fmt: skip
    world.situations["refused by the reservation"] += 1


def _order(request: Tracked) -> tuple[int, ...]:
    return request.order


def _names(requests: Iterable[Tracked]) -> str:
    return ", ".join(request.name for request in requests) or "nobody"

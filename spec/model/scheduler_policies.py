"""What schedulers promise beyond safety: order, preemption, reservation, hits and fairness.

`check_policies` checks a decision against every promise that the scheduler makes. A scheduler of
another design makes other promises, and the guards of those that it does not make do not apply.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from ..rules import scheduler as rules
from ..rules.rule import require
from .scheduler import Request, SchedulerModel, Step


def check_policies(model: SchedulerModel, step: Step, most_overtaken: int | None) -> None:
    """Check a decision against all promises.

    Args:
        model: the model, after the decision.
        step: the decision.
        most_overtaken: bound of Q6, or None.
    """
    promised = model.promised
    if "whole" in promised:
        check_whole(model, step)
    if "running_first" in promised:
        check_progress(model, step)
    if "resumed_first" in promised:
        check_resumed_first(model, step)
    if step.preempted:
        check_preempted(model, step)
    if "policy" in promised:
        check_order(model, step)
    if "leaders" in promised:
        check_leaders(model, step)
    if "reserves" in promised and not step.preempted:
        check_reserved(model, step)
    check_hits(model, step)
    check_asked(model, step)
    if most_overtaken is not None and not step.num_copies:
        check_overtaken(model, step, most_overtaken)


# Running requests


def check_whole(model: SchedulerModel, step: Step) -> None:
    """Q21: a running request holds the blocks of all of its tokens, or waits for the last one."""
    planned = {request for request, _, _ in step.chunks}
    for request in step.running:
        held, whole = len(model.tables[request.name]), model.blocks_for(len(request.tokens))
        waits = step.num_copies and request not in planned and not request.prefilling
        require(
            held == whole or (waits and held == whole - 1),
            rules.Q21, "{} holds {} blocks for its {} tokens, not {}",
            request.name, held, len(request.tokens), whole,
        )  # fmt: skip


def check_progress(model: SchedulerModel, step: Step) -> None:
    """Q17: every running request progresses, decoding ones first; only the budget cuts a chunk.

    Q18: beside copies, a request may wait for its own copies, or for blocks that copies will free.
    """
    planned = [request for request, _, _ in step.chunks]
    waiting = {request for request in step.running if request.is_loading} - set(planned)
    for request in waiting:
        require(
            request.name in step.loading,
            rules.Q18, "{} is not computed, and no copy into its blocks is in flight", request.name,
        )  # fmt: skip
    short = [
        request
        for request in step.running
        if step.num_copies and request not in planned
        and len(model.tables[request.name]) < model.blocks_for(len(request.tokens))
    ]  # fmt: skip
    if short:
        held, there = len(model.held()), model.limits.num_blocks
        require(
            held + len(short) <= there,
            rules.Q18, "{} wait for {} blocks, and running requests hold {} of {}",
            _names(short), len(short), held, there,
        )  # fmt: skip
        model.situations["waited for blocks"] += 1
    wanted = [each for each in step.running if each not in waiting and each not in short]
    wanted.sort(key=lambda request: request.prefilling)
    if model.has_tiers and step.num_tokens == model.limits.token_budget:
        # What was loaded meanwhile prefills when those that were admitted before leave tokens.
        decoding = sum(not request.prefilling for request in wanted)
        del wanted[max(len(planned), decoding) :]
    require(
        planned == wanted,
        rules.Q17, "the step computes {}, and {} run", _names(planned), _names(step.running),
    )  # fmt: skip
    for request, start, length in step.chunks:
        whole = start + length == len(request.tokens)
        require(
            whole or (request is planned[-1] and step.num_tokens == model.limits.token_budget),
            rules.Q17, "the chunk of {} ends at {} of {} tokens, with {} tokens in the step",
            request.name, start + length, len(request.tokens), step.num_tokens,
        )  # fmt: skip


def check_preempted(model: SchedulerModel, step: Step) -> None:
    """Q26, Q25, Q24: preempt the last in the order, only for blocks, never if all is reserved."""
    promised, names = model.promised, _names(step.preempted)
    if "never_preempts" in promised:
        whole = model.limits.reserve_tokens is None
        require(not whole, rules.Q25, "{} preempted, with all reserved", names)
    if "preempts_when_short" in promised:
        there = step.available
        if model.has_tiers:  # a block that no request holds will be available after the copies
            tables = (*model.before.values(), *model.receiving.values())
            there = model.limits.num_blocks - len(set().union(*tables))
        require(
            step.growth > there,
            rules.Q24, "{} preempted for {} blocks with {} to be had",
            names, step.growth, there,
        )  # fmt: skip
    if "policy" in promised:
        least = min(request.order for request in step.preempted)
        for request in step.running:
            require(
                request.order < least,
                rules.Q26,
                "{} preempted, and {} goes on",
                names,
                request.name,
            )


# The order of admission


def check_resumed_first(model: SchedulerModel, step: Step) -> None:
    """Q4, Q27: preempted requests are admitted first, but not in the same step."""
    require(
        not (step.preempted and step.admitted),
        rules.Q27,
        "{} are preempted and {} admitted",
        _names(step.preempted),
        _names(step.admitted),
    )
    new = [request for request in step.admitted if not request.num_preemptions]
    if new:
        parked = [each for each in model.live.values() if each.phase == "preempted"]
        require(not parked, rules.Q4, "{} start while {} wait", _names(new), _names(parked))
        last = step.admitted[-1]
        before_new = step.admitted.index(new[0]) + len(new) == len(step.admitted)
        require(before_new, rules.Q4, "{} is resumed after a new request", last.name)


def check_order(model: SchedulerModel, step: Step) -> None:
    """Q3: no request is overtaken that could have been admitted.

    If preempted requests are promised to be first, they and new ones are two queues.
    """
    two_queues = "resumed_first" in model.promised
    for first, second in pairwise(step.admitted):
        same = bool(first.num_preemptions) == bool(second.num_preemptions)
        require(
            (two_queues and not same) or first.order < second.order,
            rules.Q3, "{} is admitted before {}", first.name, second.name,
        )  # fmt: skip
    for request in step.admitted:
        ahead = step.running[: step.running.index(request)]
        own_phase = "preempted" if request.num_preemptions else "waiting"
        phases = (own_phase,) if two_queues else ("preempted", "waiting")
        for other in model.live.values():
            if other.phase in phases and other.order < request.order:
                require(
                    other.name in step.awaited
                    or ("leaders" in model.promised and leader_of(model, other, ahead)),
                    rules.Q3, "{} is admitted and {} goes on waiting", request.name, other.name,
                )  # fmt: skip


def check_overtaken(model: SchedulerModel, step: Step, most: int) -> None:
    """Q6: a waiting request is overtaken by a bounded number of later ones."""
    for request in step.admitted:
        request.overtaken = 0
        for other in model.live.values():
            if other.phase != "running" and other.order < request.order:
                other.overtaken += 1
                require(
                    other.overtaken <= most,
                    rules.Q6, "{} waits, and {} later requests were admitted: {} may",
                    other.name, other.overtaken, most,
                )  # fmt: skip


def next_block(model: SchedulerModel, request: Request) -> int:
    """End of the first block that a prefilling request has not published; 0 if none."""
    if not (request.prefilling and model.limits.prefix_cache):
        return 0
    size = model.limits.block_size
    end = (request.shared_blocks(size) + 1) * size
    return end if end <= len(request.tokens) else 0


def leader_of(model: SchedulerModel, request: Request, running: Iterable[Request]) -> str:
    """Name of the request that is about to compute a block of another; "" if none."""
    for leader in running:
        end = next_block(model, leader)
        if end and end <= len(request.tokens) and leader.tags[end - 1] == request.tags[end - 1]:
            return leader.name
    return ""


def check_leaders(model: SchedulerModel, step: Step) -> None:
    """Q5: two requests do not compute the same block if the second could have waited."""
    for request in step.admitted:
        end = next_block(model, request)
        for leader in step.running[: step.running.index(request)] if end else ():
            require(
                next_block(model, leader) != end or leader.tags[end - 1] != request.tags[end - 1],
                rules.Q5, "{} is admitted to compute tokens up to {}, as {} is about to",
                request.name, end, leader.name,
            )  # fmt: skip


# Hits


def check_hits(model: SchedulerModel, step: Step) -> None:
    """Q11: an admitted request hits every published block of its prefix that is still there.

    The decision shows which blocks were handed out anew: first those that running requests grew
    by, then those of each admission. A block that was handed out holds its old prefix no more.
    """
    if "hits" not in model.promised or not model.limits.prefix_cache:
        return
    size = model.limits.block_size
    kept = step.running[: len(step.running) - len(step.admitted)]
    held = {block for request in kept for block in model.before[request.name]}
    for request in kept:
        model.reuse(model.tables[request.name][len(model.before[request.name]) :])
    for request in step.admitted:
        _check_hit(model, request, request.hit, held)
        model.reuse(model.tables[request.name][request.hit // size :])


def _check_hit(model: SchedulerModel, request: Request, hit: int, held: set[int]) -> None:
    due, size, last = 0, model.limits.block_size, "hits_last" not in model.promised
    for end in range(size, len(request.tokens) + 1 - last, size):
        block = model.published.get(request.tags[end - 1])
        if block is None or (model.has_tiers and block not in held):
            break
        due = end
    require(
        hit >= due,
        rules.Q11, "{} hits {} tokens, and {} of its {} are published",
        request.name, hit, due, len(request.tokens),
    )  # fmt: skip


def check_granted(model: SchedulerModel, request: Request, num_cached: int) -> None:
    """Q4, Q11: a decode node grants blocks while no preempted request waits, those it lacks."""
    parked = [each for each in model.live.values() if each.phase == "preempted"]
    require(not parked, rules.Q4, "{} is received while {} wait", request.name, _names(parked))
    held = {block for each in model.running for block in model.tables[each.name]}
    _check_hit(model, request, num_cached, held)


def check_asked(model: SchedulerModel, step: Step) -> None:
    """Q12: storage is asked before a request is admitted, unless others fill the host."""
    size = model.limits.block_size
    for name in step.unasked:
        ahead = [each for each in step.unbegun if each.name not in step.unasked]
        wanted = sum(len(each.tokens) // size for each in (*ahead, model.live[name]))
        require(
            ahead and wanted > model.num_host_blocks,
            rules.Q12, "{} is admitted, storage was not asked for it, and {} blocks are wanted of "
            "the {} that the host has", name, wanted, model.num_host_blocks,
        )  # fmt: skip


# The reservation


class Reserve:
    """Blocks that the running requests may still need.

    Attributes:
        growth: blocks needed within the horizon.
        lack: maximum over the requests of the blocks missing to the end, less those that
            preempting the others frees.
        private: blocks that become free if all are preempted.
    """

    def __init__(self, model: SchedulerModel, running: Iterable[Request]) -> None:
        self.model = model
        self.growth = self.lack = self.private = 0
        for request in running:
            held = len(model.tables[request.name])
            size, shares = model.limits.block_size, model.limits.prefix_cache
            shared = request.shared_blocks(size) if shares else 0
            self.growth += self.growth_of(request, held)
            self.lack = max(self.lack, model.blocks_for(request.max_kv_tokens) - shared)
            self.private += held - shared

    def growth_of(self, request: Request, held: int) -> int:
        """Number of blocks by which a request grows within the horizon."""
        most, horizon = request.max_kv_tokens, self.model.limits.reserve_tokens
        if horizon is not None:
            most = min(most, len(request.tokens) + horizon)
        return max(self.model.blocks_for(most) - held, 0)


def check_reserved(model: SchedulerModel, step: Step) -> None:
    """Q8, Q9, Q7: an admission leaves the reserve, and a request that fits is admitted."""
    reserve, left, limits = Reserve(model, step.running), step.left, model.limits
    if step.admitted:
        names = _names(step.admitted)
        require(
            left >= reserve.growth,
            rules.Q8, "{} admitted, {} blocks are left for a growth of {}",
            names, left, reserve.growth,
        )  # fmt: skip
        require(
            left + reserve.private >= reserve.lack,
            rules.Q9, "{} admitted, {} blocks are left and {} private, the neediest lacks {}",
            names, left, reserve.private, reserve.lack,
        )  # fmt: skip
    queue = model.waiting()
    room = len(step.running) < limits.max_running and step.num_tokens < limits.token_budget
    if not queue or not room or model.receiving:
        return
    head = queue[0]
    if model.is_decode_node and head.phase == "waiting":
        return  # its prefill node asks for it between two steps
    if "leaders" in model.promised and leader_of(model, head, step.running):
        model.situations["waited for a leader"] += 1
        return
    if head.name in step.awaited:
        model.situations["waited for a copy"] += 1
        return
    # A hit only reduces the need, so a request that fits without one must be admitted.
    held = model.blocks_for(len(head.tokens))
    lack = max(reserve.lack, model.blocks_for(head.max_kv_tokens) - held)
    after = left - held
    fits = after >= reserve.growth + reserve.growth_of(head, held)
    require(
        not (fits and after + reserve.private >= lack),
        rules.Q7, "{} waits, with {} blocks for its {} tokens and a slot", head.name, left,
        len(head.tokens),
    )  # fmt: skip
    model.situations["refused by the reservation"] += 1


def _names(requests: Iterable[Request]) -> str:
    return ", ".join(request.name for request in requests) or "nobody"

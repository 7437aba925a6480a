"""What schedulers promise beyond safety: order, preemption, reservation, hits and fairness.

`check_policies` checks a decision against every promise that the scheduler makes. A scheduler of
another design makes other promises, and the guards of those that it does not make do not apply.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from ..rules import scheduler as rules
from ..rules.rule import require
from .ghost import Tag
from .scheduler import BlockCopy, Request, SchedulerModel, Step

# Running requests


def check_whole(model: SchedulerModel, step: Step) -> None:
    """Q21: a running request holds the blocks of all of its tokens, or waits for the last one."""
    may_wait = step.num_copies or model.flights
    for request in step.running:
        held, whole = len(model.tables[request.name]), model.blocks_for(request.num_known)
        waits = may_wait and request not in step.planned and request.scheduled >= request.target
        is_whole = held == whole or (waits and held == whole - 1)
        require(is_whole, rules.Q21, "{} holds {} blocks, and not {}", request, held, whole)


def check_progress(model: SchedulerModel, step: Step) -> None:
    """Q17: every running request progresses, decoding ones first; only the budget cuts a chunk.

    Q18: beside copies, a request may wait for its own copies, or for blocks that copies will free.
    """
    planned = step.planned
    idle = [request for request in step.running if request not in planned]
    if model.flights and not planned:
        check_waits_for_flights(model, step)
        return
    for request in idle:
        is_loaded = not request.is_loading or request.name in step.loading
        require(is_loaded, rules.Q18, "{} waits for copies, and none is in flight", request)
    may_wait = idle if step.num_copies else []
    short = [each for each in may_wait if each.can_go_on and model.lack(each, each.num_known)]
    if short:
        held, there = len(model.held()), model.limits.num_blocks
        can_wait = held + len(short) <= there
        require(can_wait, rules.Q18, "{} wait for blocks, {} of {} are held", short, held, there)
        model.situations["waited for blocks"] += 1
    waiting = [each for each in idle if each.is_loading or each in short or not each.can_go_on]
    wanted = [request for request in step.running if request not in waiting]
    wanted.sort(key=lambda request: request.scheduled < request.target)
    if model.limits.host_blocks and step.num_tokens == model.limits.token_budget:
        # What was loaded meanwhile prefills when those that were admitted before leave tokens.
        decoding = sum(request.scheduled >= request.target for request in wanted)
        del wanted[max(len(planned), decoding) :]
    require(planned == wanted, rules.Q17, "{} are computed, and {} run", planned, step.running)
    for request, start, length in step.chunks:
        is_whole = start + length == request.num_known
        is_cut = request is planned[-1] and step.num_tokens == model.limits.token_budget
        why = "the chunk of {} is cut, with {} tokens in the step"
        require(is_whole or is_cut, rules.Q17, why, request, step.num_tokens)


def check_waits_for_flights(model: SchedulerModel, step: Step) -> None:
    """Q17: nothing goes on beside steps in flight only if a request would have to be preempted."""
    wanted = [each for each in step.running if each.can_go_on and not each.is_loading]
    decoding = [each for each in wanted if each.scheduled >= each.target]
    growing = sum(model.lack(each, each.num_known) > 0 for each in decoding)
    must_wait = not wanted or growing > step.available
    require(must_wait, rules.Q17, "{} can go on beside steps in flight", wanted)
    model.situations["waited for steps in flight"] += bool(wanted)


def check_preempted(model: SchedulerModel, step: Step) -> None:
    """Q27, Q25, Q24, Q26: preempt only for blocks, the last in the order, and admit nobody."""
    promised, preempted = model.promised, step.preempted
    if not preempted:
        return
    if "resumed_first" in promised:
        require(not step.admitted, rules.Q27, "{} preempted, {} admitted", preempted, step.admitted)
    if "never_preempts" in promised:
        is_whole = model.limits.reserve_tokens is None
        require(not is_whole, rules.Q25, "{} are preempted, with all reserved", preempted)
    if "preempts_when_short" in promised:
        there = step.available
        if model.limits.host_blocks:  # after the copies, all that no request holds is available
            tables = (*model.before.values(), *model.receiving.values())
            there = model.limits.num_blocks - len(set().union(*tables))
        why = "{} are preempted for {} blocks with {} to be had"
        require(step.growth > there, rules.Q24, why, preempted, step.growth, there)
    if "policy" in promised:
        first = min(each.order for each in preempted)
        later = [each for each in step.running if each.order > first]
        require(not later, rules.Q26, "{} are preempted, and {} go on", preempted, later)


# The order of admission


def check_order(model: SchedulerModel, step: Step) -> None:
    """Q4, Q3: of two requests, the first in the order is admitted first, unless it has to wait.

    If preempted requests are promised to be first, they and new ones are two queues.
    """
    waiting = model.waiting()
    for place, request in enumerate(step.admitted):
        ahead = step.running[: step.running.index(request)]
        later = step.admitted[place + 1 :]
        for other in (*later, *waiting):
            if "resumed_first" in model.promised and request.is_resumed != other.is_resumed:
                require(request.is_resumed, rules.Q4, "{} starts while {} waits", request, other)
            elif "policy" in model.promised and other.order < request.order:
                waits = other.name in step.awaited or led_blocks(model, other, ahead)
                can_wait = waits and other not in later
                require(can_wait, rules.Q3, "{} is admitted before {}", request, other)


def check_overtaken(model: SchedulerModel, step: Step) -> None:
    """Q6: a waiting request is overtaken by a bounded number of later ones."""
    most = model.limits.max_overtaken
    if most is None or step.num_copies:
        return
    for request in step.admitted:
        request.overtaken = 0
        for other in model.waiting():
            other.overtaken += other.order < request.order
            why = "{} waits, and {} later requests were admitted: {} may"
            require(other.overtaken <= most, rules.Q6, why, other, other.overtaken, most)


def next_block(model: SchedulerModel, request: Request) -> Tag | None:
    """The first whole block that a prefilling request has not published, or None."""
    if not (request.prefilling and model.limits.prefix_cache and "leaders" in model.promised):
        return None
    size = model.limits.block_size
    end = (request.shared_blocks(size) + 1) * size
    return request.tags[end - 1] if end <= len(request.tokens) else None


def led_blocks(model: SchedulerModel, request: Request, running: Iterable[Request]) -> set[Tag]:
    """The blocks of a request that running ones are about to compute: it may wait for them."""
    return {
        block
        for block in (next_block(model, leader) for leader in running)
        if block in request.tags[: len(request.tokens)]
    }


def check_leaders(model: SchedulerModel, step: Step) -> None:
    """Q5: two requests do not compute the same block if the second could have waited."""
    for request in step.admitted:
        ahead = step.running[: step.running.index(request)]
        is_new = next_block(model, request) not in led_blocks(model, request, ahead)
        require(is_new, rules.Q5, "{} is admitted to compute what another is about to", request)


# Hits


def check_hits(model: SchedulerModel, step: Step) -> None:
    """Q11: an admitted request hits every published block of its prefix that is still there.

    The decision shows which blocks were handed out anew: first those that running requests grew
    by, then those of each admission. A block that was handed out holds its old prefix no more.
    """
    if not model.limits.prefix_cache:
        return
    kept = step.running[: len(step.running) - len(step.admitted)]
    held = {block for request in kept for block in model.before[request.name]}
    for request in kept:
        model.reuse(model.tables[request.name][len(model.before[request.name]) :])
    for request in step.admitted:
        _check_hit(model, request, request.hit, held)
        model.reuse(model.tables[request.name][request.hit // model.limits.block_size :])


def _check_hit(model: SchedulerModel, request: Request, hit: int, held: set[int]) -> None:
    due, size, last = 0, model.limits.block_size, "hits_last" not in model.promised
    for end in range(size, len(request.tokens) + 1 - last, size):
        block = model.published.get(request.tags[end - 1])
        if block is None or (model.limits.host_blocks and block not in held):
            break
        due = end
    require(hit >= due, rules.Q11, "{} hits {} tokens, and {} are published", request, hit, due)


def check_copies(model: SchedulerModel, step: Step) -> None:
    """Q39: a new sample copies the block that its prompt does not fill, if the first one has it."""
    size = model.limits.block_size
    due = {}
    for request in step.admitted:
        first, num_prompt = request.first, len(request.tokens)
        place, num_tokens = divmod(num_prompt, size)
        if (
            first is not None
            and first.phase == "running"
            and first.computed >= num_prompt
            and request in step.unbegun
            and num_tokens > 1
            and request.hit >= place * size
            and model.limits.prefix_cache
        ):
            tables = step.tables
            blocks = tables[first.name][place], tables[request.name][place]
            due[request.name] = BlockCopy(request.name, first.name, *blocks)
    require(dict(step.copies) == due, rules.Q39, "{} are copied, and not {}", step.copies, due)
    model.situations["copied for a sample"] += len(due)


def check_granted(model: SchedulerModel, request: Request, num_cached: int) -> None:
    """Q4, Q11: a decode node grants blocks while no preempted request waits, those it lacks."""
    parked = [each for each in model.waiting() if each.is_resumed]
    require(not parked, rules.Q4, "{} is received while {} wait", request, parked)
    held = {block for each in model.running for block in model.tables[each.name]}
    _check_hit(model, request, num_cached, held)


def check_asked(model: SchedulerModel, step: Step) -> None:
    """Q12: storage is asked before a request is admitted, unless others fill the host."""
    size, there = model.limits.block_size, model.limits.host_blocks
    for name in step.unasked:
        ahead = [each for each in step.unbegun if each.name not in step.unasked]
        wanted = sum(len(each.tokens) // size for each in (*ahead, model.live[name]))
        why = "storage was not asked for {}, and {} host blocks of {} are wanted"
        require(ahead and wanted > there, rules.Q12, why, name, wanted, there)


# The reservation


def reserve(model: SchedulerModel, running: Iterable[Request]) -> tuple[int, int]:
    """Blocks that must be left for some requests, all running but perhaps the last.

    Returns:
        How many they need to grow within the horizon; and how many the neediest lacks to its end,
        if all others are preempted: their private blocks become free. Of a waiting request all
        blocks count as shared, as if it hit them.
    """
    growth = lack = private = 0
    horizon, size = model.limits.reserve_tokens, model.limits.block_size
    for request in running:
        held = shared = model.blocks_for(len(request.tokens))
        if request.phase == "running":
            held = len(model.tables[request.name])
            shared = request.shared_blocks(size) if model.limits.prefix_cache else 0
        most = request.max_kv_tokens
        soon = most if horizon is None else min(most, len(request.tokens) + horizon)
        growth += max(model.blocks_for(soon) - held, 0)
        lack = max(lack, model.blocks_for(most) - shared)
        private += held - shared
    return growth, lack - private


def check_reserved(model: SchedulerModel, step: Step) -> None:
    """Q8, Q9, Q7: an admission leaves the reserve, and a request that fits is admitted."""
    left, limits, waiting = step.left, model.limits, model.waiting()
    if step.preempted:
        return
    if step.admitted:
        growth, lack = reserve(model, step.running)
        why = "{} admitted, {} blocks are left, and {} needed"
        require(left >= growth, rules.Q8, why, step.admitted, left, growth)
        require(left >= lack, rules.Q9, why, step.admitted, left, lack)
    room = len(step.running) < limits.max_running and step.num_tokens < limits.token_budget
    waits_for_flights = model.flights and not step.chunks
    if not waiting or not room or model.receiving or waits_for_flights:
        return
    head = waiting[0]
    if model.limits.is_decode_node and head.phase == "waiting":
        return  # its prefill node asks for it between two steps
    if led_blocks(model, head, step.running):
        model.situations["waited for a leader"] += 1
    elif head.name in step.awaited:
        model.situations["waited for a copy"] += 1
    else:  # a hit only reduces the need, so a request that fits without one must be admitted
        needed = model.blocks_for(len(head.tokens)) + max(reserve(model, [*step.running, head]))
        why = "{} waits, with {} blocks for {} and a slot"
        require(left < needed, rules.Q7, why, head, left, needed)
        model.situations["refused by the reservation"] += 1


CHECKS: Final = (
    ("whole", check_whole), ("running_first", check_progress), ("", check_preempted),
    ("", check_order), ("leaders", check_leaders), ("reserves", check_reserved),
    ("hits", check_hits), ("copies", check_copies), ("", check_asked), ("", check_overtaken),
)  # fmt: skip
"""Each check, and the promise that it is about; "" if it looks for itself."""


def check_policies(model: SchedulerModel, step: Step) -> None:
    """Check a decision, after the model made it, against all promises."""
    for promise, check in CHECKS:
        if not promise or promise in model.promised:
            check(model, step)

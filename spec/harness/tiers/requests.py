"""Operations of requests in a world with tiers: arriving, computing, ending, parked and resumed."""

from __future__ import annotations

from ...model.ghost import Tag
from ...model.tiers.operations import Load, Parked
from ...model.tiers.residency import Residency
from ...rules import tiers as rules
from ...rules.cache import A8, P4
from ...rules.rule import require
from ..cache import admit as cache_admit
from ..cache import compute as cache_compute
from ..cache import end as cache_end
from ..cache.requests import NAMESPACES, Request
from .state import TierState, checked
from .take import take


def submit(world: TierState, name: str, prompt: list[int], more: int, namespace: int) -> bool:
    """Submit a request, which may grow by `more` tokens."""
    if not cache_admit.submit(world, name, prompt, more, namespace):
        return False
    world.retag(world.requests[name])
    return True


def match(world: TierState, name: str) -> bool:
    """Match a waiting request, for an admission now or later."""
    if not cache_admit.match(world, name):
        return False
    _host_hit(world, world.requests[name])
    return True


def _host_hit(world: TierState, request: Request) -> tuple[int, int]:
    """Match both tiers, check the result and return it."""
    path = request.path(world.block_size)
    num_hit = world.tiers.longest_hit(path)
    num_host = next((n for n, tag in enumerate(path[num_hit:]) if tag not in world.tiers.now.host),
                    len(path) - num_hit)  # fmt: skip
    found = world.ask("tier_match", request.tokens, request.namespace)
    wanted = (num_hit, num_host)
    require(found == wanted, rules.T1, "{} matches {}, there are {}", request.name, found, wanted)
    return wanted


# Admission: blocks that the host has beyond the hit are loaded


@checked(takes_room=True)
def admit(world: TierState, name: str) -> bool:
    """Admit a waiting request, or resume a parked one, or check that the refusal is right."""
    request, parked = world.get(name, "waiting"), world.tiers.parked.get(name)
    if request is None or (parked is not None and parked.writers):
        return False
    if _admit(world, request, 0, parked):
        world.tiers.parked.pop(name, None)
    return True


@checked(takes_room=True)
def fork(world: TierState, name: str, new: str, more: int) -> bool:
    """Fork: another request continues from the state of a running one."""
    request = world.get(name, "running")
    if request is None or request.job or not request.written:
        return False
    tokens = request.tokens[: request.written]
    if not submit(world, new, tokens, more, NAMESPACES.index(request.namespace)):
        return False
    world.ask("fork", new, name, tokens)
    forked = _admit(world, world.requests[new], len(tokens) % world.block_size, None)
    world.situations["forked" if forked else "not forked"] += 1
    return True


def _admit(world: TierState, request: Request, tail: int, parked: Parked | None) -> bool:
    """Admit a request to which a tail of tokens is copied; False if refused."""
    step, model = world.step, world.tiers
    num_hit, num_host = _host_hit(world, request)
    cache_admit.admit(world, request.name)
    now = world.see()
    if request.state != "running":
        require(now == step.before, A8, "{} was refused, and tiers changed", request.name)
        world.without_room.add(request.name)
        return False
    path = request.path(world.block_size)
    if model.write == "exclusive":
        step.move_in(path[num_hit:][:num_host])
    model.uses.use(path[: num_hit + num_host])
    model.order.touch(path)
    if parked is not None:
        tail = _resume(world, parked, num_hit + num_host)
    _load(world, request, num_host, tail)
    model.through.hit(path[:num_hit], now)
    return True


def _resume(world: TierState, parked: Parked, num_blocks: int) -> int:
    """Check the hit of a resumed request; return the number of tail tokens that it loads."""
    num_whole, tail = divmod(parked.num_tokens, world.block_size)
    is_whole = parked.is_saved and parked.where == "host"
    world.situations["resumed, and all is there" if is_whole else "resumed in part"] += 1
    return tail if parked.keeps_tail and num_blocks == num_whole else 0


def _load(world: TierState, request: Request, num_host: int, tail: int) -> None:
    name, written = request.name, request.written
    copy = world.ask("loading", name)
    require((copy is not None) == bool(num_host or tail), rules.T6,
            "{} found {} blocks and {} tokens on the host, and loads with {}",
            name, num_host, tail, copy)  # fmt: skip
    found = world.ask("ready", name), world.ask("promoted", name)
    require(found == (written, 0), rules.T7, "tokens ready and blocks promoted of {} are {} at its "
            "admission, {} tokens were hit", name, found, written)  # fmt: skip
    if copy is not None:
        num_hit = written // world.block_size
        path = request.path(world.block_size)[: num_hit + num_host]
        tags = request.tags[written:][: num_host * world.block_size + tail]
        moved = world.tiers.now.promoting.intersection(path)
        world.tiers.loads[name] = Load(copy, num_hit, num_host, tail, path, tags, moved)
        request.job = "loading"
        world.situations["hit on the host"] += bool(num_host)
        world.situations["tail loaded"] += bool(tail)


# Steps: requested operations are dispatched before each

done = checked()(cache_compute.done)
append = checked(takes_room=True)(cache_compute.append)
append_batch = checked(takes_room=True)(cache_compute.append_batch)


def forward(world: TierState, name: str, num_tokens: int) -> bool:
    """Run a step: read the written KV, write more, publish."""
    job = f"{name}.now"
    return launch(world, name, num_tokens, job) and done(world, job)


def launch(world: TierState, name: str, num_tokens: int, job: str) -> bool:
    """Enqueue a step after all requested operations."""
    request = world.get(name, "running")
    can_step = (
        request is not None
        and not request.job
        and request.written < len(request.tokens)
        and num_tokens >= 1
        and job not in world.jobs
    )
    return can_step and take(world) and cache_compute.launch(world, name, num_tokens, job)


def publish_again(world: TierState, name: str, num_tokens: int) -> bool:
    """Publish again the tokens of an earlier completion."""
    return name not in world.tiers.loads and cache_compute.again(world, name, num_tokens)


@checked(takes_room=True, is_eviction=True)
def evict(world: TierState, num_blocks: int) -> bool:
    """Ask the device tier to evict some blocks."""
    cache_end.evict(world, num_blocks)
    before, now = world.step.before, world.see()
    left = before.device.keys() - now.device.keys()
    dropped = before.idle.keys() - left - now.host.keys()
    world.situations["evicted over a full host"] += bool(dropped) and world.tiers.write != "through"
    return True


# Ends


@checked()
def finish(world: TierState, name: str) -> bool:
    """End a running request at any point: finished or aborted."""
    _stop_loading(world, name)
    return cache_end.finish(world, name)


@checked()
def preempt(world: TierState, name: str) -> bool:
    """Preempt a running request: it loses its blocks and waits with all its tokens."""
    _stop_loading(world, name)
    return cache_end.preempt(world, name)


def _stop_loading(world: TierState, name: str) -> None:
    """A request ends: what moves to the device for it continues to, and other loads stop."""
    load = world.tiers.loads.pop(name, None)
    if load is None:
        return
    moves = not world.step.before.promoting.isdisjoint(load.moved)
    if moves:
        world.continue_load(name, load)
    else:
        world.cancel_copy(load.copy, name)
    world.situations["released while loading"] += 1
    world.situations["load continued for an ended request"] += moves


# Parking: the KV is kept


def park(world: TierState, name: str, where: str) -> bool:
    """Park a running request: preempt it and keep its KV."""
    request = world.get(name, "running")
    if request is None or name in world.tiers.loads or not (request.written or request.job):
        return False
    if where == "storage" and not world.config["storage"]:
        return False
    # The previous step has run, with all operations before it.
    return take(world) and _park(world, request, where)


@checked(takes_room=True)
def _park(world: TierState, request: Request, where: str) -> bool:
    name, step, model = request.name, world.step, world.tiers
    holding = model.holdings[name]
    num_shared = len(holding.shared)
    if request.job:
        _compute(world, request)
    path = request.path(world.block_size)[: request.written // world.block_size]
    model.actor, model.needed = name, 0
    model.order.touch(path)
    is_parked = world.ask("park", name, request.tokens[: request.written], where)
    now = world.see()
    num_published = len(holding.shared)
    require(num_published >= len(path), P4, "{} has {} blocks computed and {} shared", name,
            len(path), num_published)  # fmt: skip
    if not is_parked:
        same = num_published > num_shared or now == step.before
        require(same, A8, "{} was not parked, and tiers changed", name)
        _check_room(world, step.before, path, request.written % world.block_size)
        world.without_room.add(name)
        step.takes_room = False
        return True
    step.copy_out(path)
    model.parked[name] = _parked(world, name, Parked(where, path, request.written))
    request.stop()
    world.situations["parking"] += 1
    return True


def _compute(world: TierState, request: Request) -> None:
    """Complete the step of a request without publishing its KV."""
    job = world.jobs.pop(request.job)
    world.stream.run_through(job)
    request.job, request.written = "", job.end
    holding, path = world.tiers.holdings[request.name], request.path(world.block_size)
    holding.path, holding.computed = path, request.written
    world.written.update(path[: request.written // world.block_size])
    world.situations["parked before it is published"] += 1


def _check_room(world: TierState, before: Residency, path: list[Tag], tail: int) -> None:
    """Check that the host has no room for a request that was not parked."""
    room = before.num_free + len(before.idle.keys() - path)
    there = {*before.host, *before.offloading}
    needed = len([tag for tag in path if tag not in there]) + bool(tail)
    require(needed > room, rules.T33, "{} host blocks are needed, of {}", needed, room)
    world.situations["not parked"] += 1


def _parked(world: TierState, name: str, parked: Parked) -> Parked:
    """Record where a request is saved, and by which operations."""
    parked.copy, _, _ = world.ask("parked", name)
    now, before = world.see(), world.step.before
    parked.blocks = {now.host.get(tag, now.offloading.get(tag, 0)) for tag in parked.path}
    parked.copied = now.offloading.keys() - before.offloading
    awaited = {before.offloading[tag] for tag in parked.path if tag in before.offloading}
    parked.writers = {
        flight.copy.id
        for flight in world.executor.flights
        if flight.copy.kind == "out"
        and flight.is_open
        and not awaited.isdisjoint(flight.copy.destinations)
    }
    world.situations["parked behind another copy"] += bool(parked.writers)
    if parked.copy is not None:
        parked.writers.add(parked.copy)
    return parked


@checked()
def unpark(world: TierState, name: str) -> bool:
    """Drop the KV of a parked request, which computes everything again."""
    parked = world.tiers.parked.pop(name, None)
    if parked is None:
        return False
    world.situations["unparked while it is saved"] += bool(parked.writers)
    if parked.copy in parked.writers:
        world.cancel_copy(parked.copy, "")
        copied = parked.copied & world.step.before.offloading.keys()
        world.step.end_out(dict.fromkeys(copied, False), world.prefixes)
    world.ask("unpark", name)
    require(name not in world.tiers.holdings, rules.T34, "{} is unparked, and has blocks", name)
    require(world.ask("park_misuse", name), rules.T38, "{} is unparked twice", name)
    world.situations["unparked"] += 1
    return True

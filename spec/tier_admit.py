"""Operations by which requests come, go and come back in a world with tiers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import cache_admit, cache_compute, cache_end
from . import tier_rules as rules
from .cache_requests import Request
from .cache_rules import A8
from .rules import require
from .tier_checks import check_order, check_saving
from .tier_copies import take
from .tier_requests import Load, Parked, Seen

if TYPE_CHECKING:
    from .tier_world import TierWorld


def submit(world: TierWorld, name: str, prompt: list[int], more: int, namespace: int) -> bool:
    """A request comes, and waits; it may grow by `more` tokens."""
    if not cache_admit.submit(world, name, prompt, more, namespace):
        return False
    world.retag(world.requests[name])
    return True


def match(world: TierWorld, name: str) -> bool:
    """A request looks what is cached, to be admitted with that, now or later."""
    request = world.get(name, "waiting")
    if request is None or not cache_admit.match(world, name):
        return False
    _host_hit(world, request)
    return True


def _host_hit(world: TierWorld, request: Request) -> tuple[int, int]:
    """Check what a match says of both tiers, and return it."""
    path = request.path(world.block_size)
    num_hit = world.tier_model.longest_hit(path)
    num_host = 0
    while path[num_hit + num_host : num_hit + num_host + 1] and (
        path[num_hit + num_host] in world.seen.host
    ):
        num_host += 1
    found = world.ask("tier_match", request.tokens, request.namespace)
    wanted = (num_hit, num_host)
    require(found == wanted, rules.T8, "{} matches {}, there are {}", request.name, found, wanted)
    return wanted


def admit(world: TierWorld, name: str) -> bool:
    """A waiting request is admitted, or refused; one that was parked resumes."""
    request, parked = world.get(name, "waiting"), world.parked.get(name)
    if request is None or (parked is not None and parked.writers):
        return False
    before = world.see()
    num_hit, num_host = _host_hit(world, request)
    cache_admit.admit(world, name)
    world.see()
    if request.state != "running":
        require(world.seen == before, A8, "{} was refused, and tiers changed", name)
        return True
    tail = 0
    if parked is not None:
        del world.parked[name]
        tail = _resume(world, parked, num_hit + num_host)
    _load(world, request, num_host, tail)
    _count_hits(world, request, num_hit)
    world.lost(before, world.uncopied(before), needs_room=True)
    return True


def _resume(world: TierWorld, parked: Parked, num_blocks: int) -> int:
    """Check what a resumed request finds; return the tokens of the tail that it loads."""
    num_whole, tail = divmod(parked.num_tokens, world.block_size)
    is_whole = not (parked.failed or parked.is_void) and parked.where == "host"
    if is_whole:
        require(
            num_blocks >= num_whole, rules.T22, "{} of {} blocks are left", num_blocks, num_whole
        )
    world.situations["resumed, and all is there" if is_whole else "resumed in part"] += 1
    return tail if parked.keeps_tail and num_blocks == num_whole else 0


def _load(world: TierWorld, request: Request, num_host: int, tail: int) -> None:
    name = request.name
    copy = world.ask("loading", name)
    require(
        (copy is not None) == bool(num_host or tail),
        rules.T9,
        "{} found {} blocks and {} tokens on the host, and loads with {}",
        name,
        num_host,
        tail,
        copy,
    )
    ready = world.ask("ready", name)
    require(ready == request.written, rules.T10, "{} has {} tokens, {} were hit", name, ready,
            request.written)  # fmt: skip
    if copy is not None:
        num_hit = request.written // world.block_size
        world.loads[name] = Load(copy, num_hit, num_host, tail)
        request.job = "loading"
        world.situations["hit on the host"] += bool(num_host)
        world.situations["tail loaded"] += bool(tail)


def _count_hits(world: TierWorld, request: Request, num_hit: int) -> None:
    if world.config["write"] != "through" or not world.config["hits"]:
        return
    path = request.path(world.block_size)[:num_hit]
    for tag in path:
        if tag not in world.seen.host and tag not in world.seen.landing:
            world.hits[tag] += 1
    world.to_copy.append(path)


# They compute: what was decided is dispatched before a step


def _can_step(world: TierWorld, name: str, num_tokens: int) -> bool:
    request = world.get(name, "running")
    return (
        request is not None
        and not request.job
        and request.written < len(request.tokens)
        and num_tokens >= 1
    )


def forward(world: TierWorld, name: str, num_tokens: int) -> bool:
    """A step runs: it reads what is written, writes on, and publishes."""
    job = f"{name}.now"
    return launch(world, name, num_tokens, job) and done(world, job)


def launch(world: TierWorld, name: str, num_tokens: int, job: str) -> bool:
    """A step is enqueued, after all operations that were decided."""
    if not _can_step(world, name, num_tokens) or job in world.jobs:
        return False
    take(world)
    return cache_compute.launch(world, name, num_tokens, job)


def done(world: TierWorld, name: str) -> bool:
    """A step is done, and its request hears of it; or it is late, and nobody does."""
    before, job = world.see(), world.jobs.get(name)
    holding = world.tier_model.holdings.get(job.request) if job is not None else None
    num_shared = len(holding.shared) if holding is not None else 0
    if not cache_compute.done(world, name):
        return False
    world.see()
    world.lost(before)
    at_once = world.config["write"] == "through" and not world.config["hits"]
    if at_once and holding is not None and len(holding.shared) > num_shared:
        world.to_copy.append(list(holding.shared))
    return True


def fail(world: TierWorld, name: str) -> bool:
    """A step fails: what it wrote is worthless."""
    return cache_compute.fail(world, name)


def publish_again(world: TierWorld, name: str, num_tokens: int) -> bool:
    """A completion is heard of twice, an old one perhaps: its tokens are published again."""
    return name not in world.loads and cache_compute.again(world, name, num_tokens)


def append(world: TierWorld, name: str, tokens: list[int]) -> bool:
    """A request that has computed all of its tokens comes to have more, if there is room."""
    before, request = world.see(), world.get(name, "running")
    if request is None or not cache_compute.append(world, name, tokens):
        return False
    _grown(world, before)
    return True


def append_batch(world: TierWorld, tokens: list[tuple[str, int]]) -> bool:
    """One more token for each of some requests, all of them or none."""
    before = world.see()
    if not cache_compute.append_batch(world, tokens):
        return False
    _grown(world, before)
    return True


def _grown(world: TierWorld, before: Seen) -> None:
    for request in world.running():
        world.learn(request)
    world.see()
    world.lost(before, world.uncopied(before), needs_room=True)


def evict(world: TierWorld, num_blocks: int) -> bool:
    """The device is asked to give up some blocks."""
    before = world.see()
    cache_end.evict(world, num_blocks)
    world.see()
    check_order(world, before)
    world.lost(before, world.uncopied(before), needs_room=True)
    return True


# They end, or are preempted


def finish(world: TierWorld, name: str) -> bool:
    """A running request ends, wherever it stands: done or aborted."""
    return _release(world, name, ends=True)


def preempt(world: TierWorld, name: str) -> bool:
    """A running request loses its blocks and waits again, with all of its tokens."""
    return _release(world, name, ends=False)


def _release(world: TierWorld, name: str, *, ends: bool) -> bool:
    if not world.get(name, "running"):
        return False
    before, blamed = world.see(), set()
    if name in world.loads:
        blamed = before.leaving
        world.give_up(world.loads.pop(name).copy, name)
        world.situations["released while loading"] += 1
    (cache_end.finish if ends else cache_end.preempt)(world, name)
    world.see()
    world.lost(before, blamed)
    return True


def park(world: TierWorld, name: str, where: str) -> bool:
    """A running request is preempted, and its KV is kept."""
    request = world.get(name, "running")
    if request is None or request.job or not request.written:
        return False
    if where == "storage" and not world.config["storage"]:
        return False
    take(world)  # the step before has run, and all that was decided before it
    before, model = world.see(), world.tier_model
    holding = model.holdings[name]
    path = holding.path[: request.written // world.block_size]
    tail = request.written % world.block_size
    model.actor, model.needed = name, 0
    if not world.ask("park", name, request.tokens[: request.written], where):
        world.see()
        require(world.seen == before, A8, "{} was not parked, and tiers changed", name)
        there = {before.host[tag] for tag in path if tag in before.host}
        missing = [tag for tag in path if tag not in before.host and tag not in before.landing]
        room = before.num_free + len(before.idle - there)
        needed = len(missing) + bool(tail)
        require(needed > room, rules.T21, "{} needs {} of {} host blocks", name, needed, room)
        world.situations["not parked"] += 1
        return True
    world.parked[name] = _parked(world, name, Parked(where, path, request.written), before)
    check_saving(world)
    request.state, request.written, request.job, request.table = "waiting", 0, "", []
    world.lost(before, needs_room=True)
    world.situations["parking"] += 1
    return True


def _parked(world: TierWorld, name: str, parked: Parked, before: Seen) -> Parked:
    """Note where a request is saved, and by which operations."""
    parked.copy, _, _ = world.ask("parked", name)
    seen = world.see()
    parked.blocks = {seen.host.get(tag, seen.landing.get(tag, 0)) for tag in parked.path}
    awaited = {before.landing[tag] for tag in parked.path if tag in before.landing}
    parked.writers = {
        flight.copy.id
        for flight in world.executor.flights
        if flight.copy.kind == "out"
        and not (flight.has_result or flight.given_up)
        and not awaited.isdisjoint(flight.copy.destinations)
    }
    world.situations["parked behind another copy"] += bool(parked.writers)
    if parked.copy is not None:
        parked.writers.add(parked.copy)
    return parked


def unpark(world: TierWorld, name: str) -> bool:
    """What a parked request keeps is given up; it computes all again."""
    parked = world.parked.pop(name, None)
    if parked is None:
        return False
    before = world.see()
    world.situations["unparked while it is saved"] += bool(parked.writers)
    if parked.copy in parked.writers:
        world.give_up(parked.copy, "")
    world.ask("unpark", name)
    world.see()
    require(
        name not in world.tier_model.holdings, rules.T20, "{} is unparked, and has blocks", name
    )
    require(world.ask("park_misuse", name), rules.T23, "{} is unparked twice", name)
    world.lost(before)
    world.situations["unparked"] += 1
    return True

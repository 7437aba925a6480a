"""Operations of arriving, resuming and running requests in a world with tiers."""

from __future__ import annotations

from ...rules import tiers as rules
from ...rules.cache import A8
from ...rules.rule import require
from ..cache import admit as cache_admit
from ..cache import compute as cache_compute
from ..cache import end as cache_end
from ..cache.requests import NAMESPACES, Request
from .checks import check_lost, check_order, see
from .requests import Load, Parked, Seen
from .state import TierState
from .take import take


def submit(world: TierState, name: str, prompt: list[int], more: int, namespace: int) -> bool:
    """Submit a request, which may grow by `more` tokens."""
    if not cache_admit.submit(world, name, prompt, more, namespace):
        return False
    world.retag(world.requests[name])
    return True


def match(world: TierState, name: str) -> bool:
    """Match a waiting request, for an admission now or later."""
    request = world.get(name, "waiting")
    if request is None or not cache_admit.match(world, name):
        return False
    _host_hit(world, request)
    return True


def _host_hit(world: TierState, request: Request) -> tuple[int, int]:
    """Match both tiers, check the result and return it."""
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


def admit(world: TierState, name: str) -> bool:
    """Admit a waiting request, or resume a parked one, or check that the refusal is right."""
    request, parked = world.get(name, "waiting"), world.parked.get(name)
    if request is None or (parked is not None and parked.writers):
        return False
    if _admit(world, request, 0, parked):
        world.parked.pop(name, None)
    return True


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
    before = see(world)
    num_hit, num_host = _host_hit(world, request)
    cache_admit.admit(world, request.name)
    see(world)
    if request.state != "running":
        require(world.seen == before, A8, "{} was refused, and tiers changed", request.name)
        world.without_room.add(request.name)
        return False
    path = request.path(world.block_size)
    world.order.use(path[:num_hit])
    world.use(path[: num_hit + num_host])
    world.order.touch(path)
    if parked is not None:
        tail = _resume(world, parked, num_hit + num_host)
    _load(world, request, num_host, tail)
    _count_hits(world, request, num_hit)
    check_lost(world, before, world.uncopied(before), needs_room=True)
    return True


def _resume(world: TierState, parked: Parked, num_blocks: int) -> int:
    """Check the hit of a resumed request; return the number of tail tokens that it loads."""
    num_whole, tail = divmod(parked.num_tokens, world.block_size)
    is_whole = not (parked.failed or parked.is_void) and parked.where == "host"
    if is_whole:
        require(
            num_blocks >= num_whole, rules.T22, "{} of {} blocks are left", num_blocks, num_whole
        )
    world.situations["resumed, and all is there" if is_whole else "resumed in part"] += 1
    return tail if parked.keeps_tail and num_blocks == num_whole else 0


def _load(world: TierState, request: Request, num_host: int, tail: int) -> None:
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
    found = world.ask("promoted", name)
    require(found == 0, rules.T10, "{} was promoted {} blocks at its admission", name, found)
    ready = world.ask("ready", name)
    require(ready == request.written, rules.T10, "{} has {} tokens, {} were hit", name, ready,
            request.written)  # fmt: skip
    if copy is not None:
        num_hit = request.written // world.block_size
        path = request.path(world.block_size)[: num_hit + num_host]
        tags = request.tags[request.written :][: num_host * world.block_size + tail]
        left = world.seen.leaving.intersection(path)
        world.loads[name] = Load(copy, num_hit, num_host, tail, path, tags, left)
        request.job = "loading"
        world.situations["hit on the host"] += bool(num_host)
        world.situations["tail loaded"] += bool(tail)


def _count_hits(world: TierState, request: Request, num_hit: int) -> None:
    if world.config["write"] != "through" or not world.config["hits"]:
        return
    path = request.path(world.block_size)[:num_hit]
    for tag in path:
        if tag not in world.seen.host and tag not in world.seen.landing:
            world.hits[tag] += 1
    world.to_copy.append(path)


# Steps: requested operations are dispatched before each


def _can_step(world: TierState, name: str, num_tokens: int) -> bool:
    request = world.get(name, "running")
    return (
        request is not None
        and not request.job
        and request.written < len(request.tokens)
        and num_tokens >= 1
    )


def forward(world: TierState, name: str, num_tokens: int) -> bool:
    """Run a step: read the written KV, write more, publish."""
    job = f"{name}.now"
    return launch(world, name, num_tokens, job) and done(world, job)


def launch(world: TierState, name: str, num_tokens: int, job: str) -> bool:
    """Enqueue a step after all requested operations."""
    if not _can_step(world, name, num_tokens) or job in world.jobs:
        return False
    take(world)
    return cache_compute.launch(world, name, num_tokens, job)


def done(world: TierState, name: str) -> bool:
    """Complete a step; a late completion changes nothing."""
    before, job = see(world), world.jobs.get(name)
    holding = world.tier_model.holdings.get(job.request) if job is not None else None
    num_shared = len(holding.shared) if holding is not None else 0
    if job is not None and job.request in world.requests:  # its blocks may be published already
        world.order.touch(world.requests[job.request].path(world.block_size))
    if not cache_compute.done(world, name):
        return False
    see(world)
    check_lost(world, before)
    at_once = world.config["write"] == "through" and not world.config["hits"]
    if at_once and holding is not None and len(holding.shared) > num_shared:
        world.to_copy.append(list(holding.shared))
    return True


def fail(world: TierState, name: str) -> bool:
    """Let a step fail: its KV is garbage."""
    return cache_compute.fail(world, name)


def publish_again(world: TierState, name: str, num_tokens: int) -> bool:
    """Publish again the tokens of an earlier completion."""
    return name not in world.loads and cache_compute.again(world, name, num_tokens)


def append(world: TierState, name: str, tokens: list[int]) -> bool:
    """Append tokens to a request that has computed all its tokens, if there is room."""
    before, request = see(world), world.get(name, "running")
    if request is None or not cache_compute.append(world, name, tokens):
        return False
    _grown(world, before)
    return True


def append_batch(world: TierState, tokens: list[tuple[str, int]]) -> bool:
    """Append one token to each of several requests, to all or none."""
    before = see(world)
    if not cache_compute.append_batch(world, tokens):
        return False
    _grown(world, before)
    return True


def _grown(world: TierState, before: Seen) -> None:
    for request in world.running():
        world.learn(request)
    see(world)
    check_lost(world, before, world.uncopied(before), needs_room=True)


def evict(world: TierState, num_blocks: int) -> bool:
    """Ask the device tier to evict some blocks."""
    before = see(world)
    cache_end.evict(world, num_blocks)
    see(world)
    check_order(world, before)
    check_lost(world, before, world.uncopied(before), needs_room=True)
    return True

"""Operations of arriving requests: submit, match, admit."""

from __future__ import annotations

from ...model.cache import CacheModel, Holding
from ...model.ghost import Tag
from ...rules import cache as rules
from ...rules.rule import require
from .requests import NAMESPACES, Request
from .state import CacheState


def submit(world: CacheState, name: str, prompt: list[int], more: int, namespace: int) -> bool:
    """Submit a request, which may grow by `more` tokens."""
    if not prompt or any(request.name == name for request in world.past):
        return False
    request = Request(name, NAMESPACES[namespace], list(prompt), len(prompt) + more)
    start = request.tokens[: world.block_size]
    world.situations["two namespaces share tokens"] += len(start) == world.block_size and any(
        other.namespace != request.namespace and other.tokens[: len(start)] == start
        for other in world.past
    )
    world.requests[name] = request
    world.past.append(request)
    return True


def match(world: CacheState, name: str) -> bool:
    """Match a waiting request, for an admission now or later."""
    if "match" not in world.target.can or not (request := world.get(name, "waiting")):
        return False
    hit = world.target.match(name, request.tokens, request.namespace)
    if world.model is not None and world.promises.hits_all:
        blocks = len(published(world, world.model, request))
        require(
            hit == blocks * world.block_size,
            rules.H6, "{} matches {} tokens, {} blocks are published", name, hit, blocks,
        )  # fmt: skip
    world.situations["match"] += 1
    request.matched_at = world.num_steps + 1
    return True


def _hittable(world: CacheState, request: Request) -> list[Tag]:
    end = len(request.tokens) - (not world.promises.hits_last)
    return request.path(world.block_size)[: end // world.block_size]


def published(world: CacheState, model: CacheModel, request: Request) -> list[Tag]:
    """The published prefixes that an admission may hit."""
    hittable = _hittable(world, request)
    return hittable[: model.longest_hit(hittable)]


def admit(world: CacheState, name: str) -> bool:
    """Admit a waiting request, or check that its refusal is right."""
    if not (request := world.get(name, "waiting")):
        return False
    model, total = world.model, world.blocks_for(len(request.tokens))
    needed, can = total, world.target.available()
    before = can
    if model is not None:
        wanted = published(world, model, request)
        due = wanted if world.promises.hits_all else []
        needed -= len(due)
        can = model.available(due)
        holding = Holding(request.path(world.block_size), request.root)
        model.arrive(name, holding, wanted, needed)
        num_published = len(model.cached)
    if 0 < request.matched_at < world.num_steps:
        world.situations["admitted with an old match"] += 1
    request.matched_at = 0
    hit = world.target.admit(name, request.tokens, request.namespace)
    if hit is None:
        _refused(world, name, model, needed, can, total)
        if model is not None:
            evicted = num_published - len(model.cached)
            require(not evicted, rules.A8, "{} was refused, and {} evicted", name, evicted)
        require(world.target.available() == before, rules.A8, "{} was refused, not unchanged", name)
        return True
    request.table = world.target.block_table(name)
    world.demand += len(request.table)
    _check_hit(world, request, hit)
    if model is not None:
        model.hit(name, hit // world.block_size)
        if not world.promises.one_copy:
            model.look(name, request.table)  # which copies it uses
    _begin(world, request, hit)
    return True


def _refused(
    world: CacheState, name: str, model: CacheModel | None, needed: int, can: int, total: int
) -> None:
    world.situations["refused"] += 1
    size = world.config["num_blocks"]
    if model is not None:
        model.refuse(name)
    if not world.promises.refuses_only_short:
        return
    require(
        needed > can,
        rules.A6, "{} was refused {} blocks, and {} are free or unused", name, needed, can,
    )  # fmt: skip
    if "refusal" not in world.target.can or model is None:
        return
    answer, is_too_large = world.target.refusal(), total > size
    world.situations["too large"] += is_too_large
    rule, numbers = (rules.A9, (total, size)) if is_too_large else (rules.A7, (needed, can))
    why = "{} needs {} of {}, the refusal says {}"
    require(answer == numbers, rule, why, name, *numbers, answer)


def _check_hit(world: CacheState, request: Request, hit: int) -> None:
    name, num_tokens = request.name, len(request.tokens)
    require(
        hit % world.block_size == 0 and 0 <= hit <= num_tokens,
        rules.H3, "{} hit {} of {} tokens", name, hit, num_tokens,
    )  # fmt: skip
    if not world.promises.hits_last:
        require(hit < num_tokens, rules.H4, "{} hit all {} tokens", name, num_tokens)
    if world.promises.hits_all and world.demand <= world.config["num_blocks"]:
        known = 0
        for tag in _hittable(world, request):
            if tag not in world.written:
                break
            known += world.block_size
        require(hit >= known, rules.H5, "{} hit {} of {} tokens", name, hit, known)


def _begin(world: CacheState, request: Request, hit: int) -> None:
    request.state, request.written, request.published = "running", hit, hit
    request.admission += 1
    world.num_admitted += 1
    world.num_hit_blocks += hit // world.block_size
    world.situations["admitted"] += 1
    if hit == len(request.tokens):
        world.situations["full hit"] += 1
    elif hit:
        world.situations["hit"] += 1
    if request.admission > 1:
        world.situations["resumed with a hit" if hit else "resumed"] += 1

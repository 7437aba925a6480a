"""Operations of running requests: steps that complete or fail, publication, appended tokens."""

from __future__ import annotations

from collections.abc import Callable

from ...model.cache import CacheModel, Holding
from ...rules import cache as rules
from ...rules.rule import Rule, require
from .requests import Request
from .state import CacheState
from .stream import Job


def forward(world: CacheState, name: str, num_tokens: int) -> bool:
    """Run a step: read the written KV, write more, publish."""
    job = f"{name}.now"
    return launch(world, name, num_tokens, job) and done(world, job)


def launch(world: CacheState, name: str, num_tokens: int, job: str) -> bool:
    """Enqueue a named step with the current block table."""
    request = world.get(name, "running")
    if request is None or request.job or request.written == len(request.tokens):
        return False
    if num_tokens < 1 or job in world.jobs:
        return False
    table, start = world.target.block_table(name), request.written
    tags = request.tags[start : start + num_tokens]
    end, why = start + len(tags), "{} has {} blocks for {} tokens"
    require(len(table) >= world.blocks_for(end), rules.A4, why, name, len(table), end)
    for other in world.running():
        shared = set(table[start // world.block_size :]) & set(other.table)
        require(
            other is request or not shared,
            rules.C2, "{} writes blocks {}, which {} reads", name, shared, other.name,
        )  # fmt: skip
    request.num_jobs += 1
    request.job = job
    reads = request.tags[:start]
    world.jobs[job] = Job(name, request.admission, table, reads, tags)
    world.stream.queue.append(world.jobs[job])
    return True


def done(world: CacheState, name: str) -> bool:
    """Complete a step; a late completion, after its request was released, changes nothing."""
    return _complete(world, name, failing=False)


def fail(world: CacheState, name: str) -> bool:
    """Let a step fail: its KV is garbage."""
    return _complete(world, name, failing=True)


def _complete(world: CacheState, name: str, failing: bool) -> bool:
    job = world.jobs.pop(name, None)
    if job is None:
        return False
    world.stream.run_through(job, failing)
    request = _request_of(world, job)
    if request is None:
        world.situations["late completion"] += 1
        return True
    request.job = ""
    if failing:
        world.situations["failed step"] += 1
        return True
    request.written = job.end
    _publish(world, request, job.end)
    return True


def _request_of(world: CacheState, job: Job) -> Request | None:
    """The request of a step in flight, unless it has lost its blocks since."""
    request = world.get(job.request, "running")
    return request if request is not None and request.admission == job.admission else None


def begin_step(world: CacheState) -> bool:
    """Begin a step that may read, until it ends, all that is written through the present tables."""
    if "begin_step" not in world.target.can:
        return False
    table_of = world.target.block_table
    world.flights.append([
        Job(each.name, each.admission, table_of(each.name), each.tags[: each.written], [])
        for each in world.running()
    ])  # fmt: skip
    world.target.run("begin_step")
    if world.model is not None:
        world.model.begin_step()
    return True


def end_step(world: CacheState) -> bool:
    """End the first of these steps: it still finds all that it reads."""
    if not world.flights:
        return False
    for job in world.flights.pop(0):
        if _request_of(world, job) is not None:
            world.device.read_sequence(job.table, job.reads, job.request)
    if world.model is not None:
        world.model.end_step()
    world.target.run("end_step")
    return True


def again(world: CacheState, name: str, num_tokens: int) -> bool:
    """Publish again the tokens of an earlier completion."""
    request = world.get(name, "running")
    if request is None or num_tokens > request.written:
        return False
    if num_tokens < request.written and not world.promises.ignores_late:
        return False
    holding = world.model.holdings[name] if world.model is not None else Holding([], 0)
    before = dict(holding.tags)
    _publish(world, request, num_tokens)
    # A private copy may be published now, if the other one was evicted in between.
    more = holding.tags.keys() - before.keys() if world.promises.shares_duplicates else ()
    require(
        not more
        and before.items() <= holding.tags.items()
        and world.target.block_table(name) == request.table,
        rules.P6, "{} published {} tokens again, and its blocks changed", name, num_tokens,
    )  # fmt: skip
    world.situations["publication repeated"] += 1
    return True


def _publish(world: CacheState, request: Request, num_tokens: int) -> None:
    model, name = world.model, request.name
    path = request.path(world.block_size)
    last = num_tokens // world.block_size
    if model is not None:
        holding = model.holdings[name]
        holding.path, holding.computed = path, request.written
        model.actor, model.needed = name, 0
        _count_duplicates(world, model, holding, last)
    world.target.publish(name, request.tokens[:num_tokens])
    world.written.update(path[:last])
    if model is None or not world.promises.shares_duplicates:
        return
    require(
        len(holding.shared) >= last,
        rules.P4, "{} has {} blocks computed and {} shared", name, last, len(holding.shared),
    )  # fmt: skip
    table = world.target.block_table(name)
    wanted = [model.copies[tag][0] for tag in holding.shared]
    require(
        table[: len(wanted)] == wanted,
        rules.P5, "the table of {} is {}, published are {}", name, table, wanted,
    )  # fmt: skip


def _count_duplicates(world: CacheState, model: CacheModel, holding: Holding, last: int) -> None:
    if last <= len(holding.shared):
        return
    tag = holding.path[len(holding.shared)]
    if tag in model.copies:
        world.situations["duplicate beside a step in flight"] += bool(world.flights)
        held = not model.in_use().isdisjoint(model.copies[tag])
        world.situations["duplicate of a held copy" if held else "duplicate of an unheld copy"] += 1


def append(world: CacheState, name: str, tokens: list[int]) -> bool:
    """Append tokens to a request that has computed all its tokens, if there is room."""
    request = world.get(name, "running")
    tokens = tokens[: request.limit - len(request.tokens)] if request is not None else []
    if request is None or not tokens or not _is_ready(request):
        return False
    needed = world.blocks_for(len(request.tokens) + len(tokens)) - len(request.table)
    if _grow(world, [request], needed, lambda: world.target.append(name, tokens), rules.A6):
        request.tokens += tokens
        request.extend_tags()
    return True


def append_batch(world: CacheState, tokens: list[tuple[str, int]]) -> bool:
    """Append one token to each of several requests, to all or none."""
    if "append_batch" not in world.target.can:
        return False
    chosen: list[tuple[Request, int]] = []
    for name, token in tokens:
        request = world.get(name, "running")
        if request is not None and _is_ready(request) and len(request.tokens) < request.limit:
            chosen.append((request, token))
    requests = [request for request, _ in chosen]
    crossing = sum(len(request.tokens) % world.block_size == 0 for request in requests)
    names = [request.name for request in requests]
    if _grow(world, requests, crossing, lambda: world.target.append_batch(names), rules.A10):
        world.situations["batch that needs blocks"] += crossing > 1
        for request, token in chosen:
            request.tokens.append(token)
            request.extend_tags()
    return True


def _is_ready(request: Request) -> bool:
    return not request.job and request.written == len(request.tokens)


def _grow(
    world: CacheState, requests: list[Request], needed: int, call: Callable[[], bool], reason: Rule
) -> bool:
    model, before = world.model, world.target.available()
    can = before
    if model is not None:
        can = model.available()
        model.actor, model.needed = "growth", needed
        num_published = len(model.cached)
    if call():
        if needed > 0:
            world.situations["grown into a new block"] += 1
        return True
    world.situations["growth refused"] += 1
    if world.promises.refuses_only_short:
        require(needed > can, reason, "{} blocks were refused, and {} can be had", needed, can)
        if "refusal" in world.target.can:
            answer, why = world.target.refusal(), "{} of {} needed, the refusal says {}"
            require(answer == (needed, can), rules.A7, why, needed, can, answer)
    for request in requests:
        require(
            world.target.block_table(request.name) == request.table,
            rules.A8, "{} was refused, and its table changed", request.name,
        )  # fmt: skip
    if model is not None:
        evicted = num_published - len(model.cached)
        require(not evicted, rules.A8, "growth was refused, and {} evicted", evicted)
        found = world.target.available()
        require(found == before, rules.A8, "{} available after a refusal, {} before", found, before)
    return False

"""Checks of a cache manager after each call, at each depth."""

from __future__ import annotations

from collections.abc import Hashable

from ...adapters.cache import AdapterError, Snapshot
from ...model.cache import FREE, CacheModel
from ...model.ghost import Tag
from ...rules import cache as rules
from ...rules.rule import Violation, require
from .admit import published
from .requests import PROBE, Request
from .state import CacheState


def check_all(world: CacheState) -> None:
    """Check every rule about a state (not about a step)."""
    running = world.running()
    for request in running:
        table = world.target.block_table(request.name)
        world.demand += max(len(table) - len(request.table), 0)
        request.table = table
        _check_table(world, request)
    if world.model is None:
        _check_available(world)
        return
    world.model.settled()
    if world.promises.counts_available:
        world.model.check_available(world.target.available())
    if world.depth == "full":
        world.seen = world.target.snapshot()
        _check_inside(world, world.model, world.seen)


def _check_table(world: CacheState, request: Request) -> None:
    name, table = request.name, request.table
    needed = world.blocks_for(len(request.tokens))
    require(
        len(table) >= needed,
        rules.A4, "{} has {} blocks for {} tokens", name, len(table), len(request.tokens),
    )  # fmt: skip
    if world.promises.holds_exactly:
        require(
            len(table) == needed, rules.A5, "{} has {} blocks, needs {}", name, len(table), needed
        )
    require(len(set(table)) == len(table), rules.A3, "the table of {} is {}", name, table)
    if world.model is not None:
        world.model.look(name, table)
    world.device.read_sequence(table, request.tags[: request.written], name)


def _check_available(world: CacheState) -> None:
    """Check the available blocks against those that are held: no other are known at depth api."""
    running, num_blocks = world.running(), world.config["num_blocks"]
    held = {block for request in running for block in request.table}
    found, most = world.target.available(), num_blocks - len(held)
    # Exactly the blocks that no request holds, but for duplicates that steps in flight may read.
    exactly = world.promises.counts_available and not world.flights
    if 0 <= found <= most and (found == most or not exactly):
        return
    limit = "" if exactly else "at most "
    tables = "".join(f", {request.name} holds {request.table}" for request in running)
    why = "{} of {} available, should be {}{}{}"
    try:
        require(False, rules.S2, why, found, num_blocks, limit, most, tables)
    except Violation as violation:
        more = _both(world, found) if found > most else ""
        raise Violation(rules.S2, violation.why + more) from None


def _both(world: CacheState, num_blocks: int) -> str:
    """Allocate the available blocks, and name those of them that a request holds too."""
    tokens, name = [0] * (num_blocks * world.block_size), "probe"
    try:
        if world.target.admit(name, tokens, PROBE) is None:
            return ""
        given = set(world.target.block_table(name))
    except (Violation, AdapterError):
        return ""  # it is broken, so anything may happen
    both = [f"{b} of {r.name}" for r in world.running() for b in r.table if b in given]
    return f"; free as well: block {', '.join(both)}" if both else ""


def _check_inside(world: CacheState, model: CacheModel, shot: Snapshot) -> None:
    free = sorted(shot.free)
    wrong = [block for block in free if model.owner.get(block, FREE) != FREE]
    require(not wrong, rules.W1, "blocks {} are in the pool, but somebody has them", wrong)
    require(
        len(set(free)) == len(free) == model.num_free,
        rules.W1, "the pool holds {}, but {} blocks are free", free, model.num_free,
    )  # fmt: skip
    _check_cached(world, model, shot)
    _check_idle(model, shot)
    _check_reports(world, model, shot)


def _check_cached(world: CacheState, model: CacheModel, shot: Snapshot) -> None:
    tags = {prefix: world.tag_of(prefix) for prefix in shot.cached}
    found = {tags[prefix]: block for prefix, block in shot.cached.items()}
    published = {entry.tag: block for block, entry in model.cached.items()}
    if found != published and (  # unless it names another copy
        found.keys() != published.keys()
        or any(block not in model.copies[tag] for tag, block in found.items())
    ):
        cached, blocks = sorted(found.values()), sorted(model.cached)
        raise Violation(rules.W2, f"cached are blocks {cached}, published {blocks}")
    users = dict.fromkeys(model.copies, 0)
    for holding in model.holdings.values():
        for tag in holding.tags.values():
            users[tag] += 1
    for prefix, number in shot.users.items():
        there_are = users[tags[prefix]] if prefix in tags else None
        if there_are != number:
            block = shot.cached.get(prefix)
            raise Violation(rules.W3, f"block {block} counts {number} users, has {there_are}")


def _check_idle(model: CacheModel, shot: Snapshot) -> None:
    unused = model.unused()
    if sorted(shot.idle) != (wanted := sorted(unused)):
        raise Violation(rules.W4, f"idle are blocks {shot.idle}, unused {wanted}")
    if model.promises.lru:
        ages = [(unused[block].last_use, -unused[block].depth) for block in shot.idle]
        require(ages == sorted(ages), rules.W5, "the idle blocks {} are not in order", shot.idle)


def _check_reports(world: CacheState, model: CacheModel, shot: Snapshot) -> None:
    for name, row in shot.rows.items():
        table = world.requests[name].table
        wanted = table + [0] * (len(row) - len(table))
        require(list(row) == wanted, rules.R2, "the row of {} is {}, not {}", name, row, wanted)
    for name, number in shot.available_after.items():
        left = model.available(published(world, model, world.requests[name]))
        require(number == left, rules.S2, "{} available after {}, not {}", number, name, left)
    expected = {**world.counts(), **model.counts} if shot.counts else {}
    for word, number in shot.counts.items():
        if number != (counted := expected.get(word, 0)):
            raise Violation(rules.S3, f"{word} is {number}, should be {counted}")
    _check_next_blocks(world, model, shot)


def _check_next_blocks(world: CacheState, model: CacheModel, shot: Snapshot) -> None:
    prefixes: dict[Hashable, Tag] = {}  # the prefix that each next block would hold
    for name, next_block in shot.next_blocks.items():
        prefix = _next_prefix(world, name, len(model.holdings[name].shared))
        require((next_block is None) == (prefix is None), rules.H7, "{} names {}", name, next_block)
        if prefix is not None:
            known = prefixes.setdefault(next_block, prefix)
            require(known == prefix, rules.H7, "{} names another's next block", name)
    names = {prefix: next_block for next_block, prefix in prefixes.items()}
    require(len(names) == len(prefixes), rules.H7, "one next block has several names")
    for name, next_block in shot.waiting_blocks.items():
        path = world.requests[name].path(world.block_size)
        prefix = _next_prefix(world, name, model.longest_hit(path))
        if prefix in names:
            require(next_block == names[prefix], rules.H7, "{} waits for another block", name)
        else:
            require(next_block not in prefixes, rules.H7, "{} waits for another's block", name)


def _next_prefix(world: CacheState, name: str, num_blocks: int) -> Tag | None:
    path = world.requests[name].path(world.block_size)
    return path[num_blocks] if num_blocks < len(path) else None

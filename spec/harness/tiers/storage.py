"""Operations of storage (prefetch, cancel), of the whole cache, and of the two-tier law."""

from __future__ import annotations

from ...model.tiers.operations import Prefetch
from ...rules import tiers as rules
from ...rules.cache import D1, R4
from ...rules.rule import require
from ..cache import end as cache_end
from ..cache.requests import NAMESPACES
from .copies import fence, result
from .requests import admit, done, finish, forward, submit, unpark
from .state import TierState, checked
from .take import take


@checked()
def prefetch(world: TierState, name: str) -> bool:
    """Prefetch the blocks of a waiting request from storage to the host."""
    request, model = world.get(name, "waiting"), world.tiers
    if request is None or name in model.prefetches:
        return False
    path, before, known = request.path(world.block_size), world.step.before, 0
    for tier in (before.device, before.host):
        while known < len(path) and path[known] in tier:
            known += 1
    asked = world.ask("prefetch", name, request.tokens, request.namespace)
    wanted = known if world.config["storage"] and known < len(path) else None
    require(asked == wanted, rules.T4, "{} of {} blocks are cached, and {} asks from {} on", known,
            len(path), name, asked)  # fmt: skip
    if asked is not None:
        # A pin keeps whole runs, which may be longer than the path.
        paths = world.prefixes.path
        blocks = {block for tag, block in before.host.items() if paths[tag][0] == path[0]}
        held = [tag for tag in path[:known] if tag not in before.device]
        model.prefetches[name] = Prefetch(path, known, blocks=blocks, held=held)
    return True


def elsewhere(world: TierState, name: str, num_blocks: int) -> bool:
    """Another process computes a waiting request and stores its first blocks."""
    request = world.get(name, "waiting")
    if request is None or not world.config["storage"]:
        return False
    path = request.path(world.block_size)[:num_blocks]
    fits = path[: world.config["num_blocks"]][::-1]
    world.storage_law.use(fits)  # that process reports its uses, too
    world.storage_law.store(fits)
    for tag in path:
        world.executor.storage[world.prefixes.key[tag]] = list(world.prefixes.content[tag])
    return True


@checked()
def cancel(world: TierState, name: str) -> bool:
    """Cancel a prefetch, as if its request had ended."""
    if world.tiers.prefetches.pop(name, None) is None:
        return False
    world.step.otherwise = rules.T39
    for flight in world.executor.flights:
        if flight.owner == name and flight.kind in ("lookup", "fetch") and flight.is_open:
            world.cancel_copy(flight.copy.id, "")
    world.ask("cancel", name)
    _require_nothing(world, name)
    world.situations["prefetch cancelled"] += 1
    return True


def _require_nothing(world: TierState, name: str) -> None:
    """Check that a prefetch has ended with nothing."""
    answer = world.ask("prefetched", name)
    require(answer == 0, rules.T39, "{} was cancelled, and {} blocks came", name, answer)


def reset(world: TierState, keep: list[int]) -> bool:
    """Reset all namespaces but some, as after a change of their weights."""
    names, model, running = [NAMESPACES[number] for number in keep], world.tiers, world.running()
    world.situations["reset with live leases"] += bool(running)
    world.situations["reset with operations"] += bool(world.executor.flights)
    world.situations["reset with loads"] += bool(model.loads)
    world.situations["reset with parked requests"] += bool(model.parked)
    world.situations["reset with prefetches"] += bool(model.prefetches)
    num_dropped = model.counts["dropped_blocks"]
    _reset(world, names)
    world.written.clear()
    for name, parked in model.parked.items():
        parked.is_void = parked.is_void or world.requests[name].namespace not in names
    world.renew([name for name in NAMESPACES if name not in names])
    model.counts["dropped_blocks"] = num_dropped  # a reset is no lack of room
    for request in running:
        request.stop()
    world.see()
    return True


@checked()
def _reset(world: TierState, names: list[bytes]) -> bool:
    step, model, flights = world.step, world.tiers, world.executor.flights
    for name, load in list(model.loads.items()):
        world.cancel_copy(load.copy, name)
    for flight in flights:
        if flight.is_open:
            world.cancel_copy(flight.copy.id, "")
        flight.old = True
    model.order.touch(step.before.anywhere)
    model.resetting, model.actor = True, "a reset"
    world.ask("reset_but", names)
    model.resetting = False
    if not names:  # the manager tells everybody to forget everything
        world.told.clear()
    left = [name for name in model.holdings if not name.startswith("op ")]
    require(not left, R4, "{} have leases after a reset", left)
    roots = {world.root_of(name) for name in names}
    kept = {tag for tag in step.before.anywhere if world.prefixes.root_of(tag) in roots}
    step.reset(kept)
    step.otherwise = rules.T40
    wrong = world.see().device.keys() ^ kept & step.before.device.keys()
    require(not wrong, rules.T40, "a reset keeps or drops {} blocks wrongly", len(wrong))
    for name in model.prefetches:
        _require_nothing(world, name)
    model.forget(roots)
    return True


def settle(world: TierState) -> None:
    """Take and end operations until there are none."""
    for _ in range(9):
        take(world)
        if not world.executor.flights:
            return
        while world.executor.flights:
            name = world.executor.names()[0]
            if not result(world, name, [], 1):
                fence(world, name)
    require(False, rules.T44, "operations do not come to an end")


def drain(world: TierState) -> bool:
    """Let all requests compute and end; then every block of every tier must be available."""
    settle(world)
    for name in list(world.tiers.parked):
        unpark(world, name)
    for name in list(world.jobs):
        done(world, name)
    for request in world.running():
        if request.written < len(request.tokens):
            forward(world, request.name, len(request.tokens))
        settle(world)
        finish(world, request.name)
    settle(world)
    num_blocks = world.config["num_blocks"]
    found = world.target.available()
    require(found == num_blocks, D1, "{} of {} blocks can be had", found, num_blocks)
    now = world.tiers.now
    num_host, is_idle = world.config["host_blocks"], now.idle.keys() == now.host.keys()
    require(is_idle and len(now.host) + now.num_free == num_host, rules.T44,
            "of {} host blocks {} are free, {} cached, {} can be dropped", num_host, now.num_free,
            len(now.host), len(now.idle))  # fmt: skip
    cache_end.check(world)
    cache_end.use_all(world, num_blocks)
    world.see()
    settle(world)
    reset(world, [])
    world.target.check_empty()
    return True


def serve(world: TierState, name: str, prompt: list[int], namespace: int) -> bool:
    """Run one request alone, with all operations ending at once, to check the two-tier law."""
    size = world.block_size
    prompt = prompt[: min(len(prompt) // size, world.config["num_blocks"]) * size]
    if world.running() or not prompt or not submit(world, name, prompt, 0, namespace):
        return False
    request = world.requests[name]
    settle(world)
    admit(world, name)
    num_hit = request.written // size
    settle(world)
    num_loaded = request.written // size - num_hit
    forward(world, name, len(prompt))
    finish(world, name)
    settle(world)
    wanted = world.law.use(request.path(size))
    counts = world.shot.counts
    found = (num_hit, num_loaded, counts["demoted_blocks"], counts["dropped_blocks"])
    require(found == wanted, rules.T26, "hit, loaded, demoted and dropped are {}, by the law {}",
            found, wanted)  # fmt: skip
    world.situations["served by the law"] += 1
    return True

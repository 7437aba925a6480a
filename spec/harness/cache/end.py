"""Operations that end requests, evict, reset and drain; and wrong calls."""

from __future__ import annotations

from ...rules import cache as rules
from ...rules.rule import require
from .admit import admit
from .compute import done, end_step, forward
from .requests import PROBE, Request
from .state import CacheState


def finish(world: CacheState, name: str) -> bool:
    """End a running request at any point: finished or aborted."""
    if not (request := world.get(name, "running")):
        return False
    _release(world, request)
    request.state = "ended"
    del world.requests[name]
    return True


def preempt(world: CacheState, name: str) -> bool:
    """Preempt a running request: it loses its blocks and waits with all its tokens."""
    if not (request := world.get(name, "running")):
        return False
    if request.written < len(request.tokens):
        world.situations["preempted in prefill"] += 1
    _release(world, request)
    world.situations["preempted"] += 1
    return True


def _release(world: CacheState, request: Request) -> None:
    model = world.model
    if request.job:
        world.situations["released with a step in flight"] += 1
    if model is not None:
        model.ends(request.name)
    world.target.release(request.name)
    if model is not None:
        model.ended(request.name)
    request.stop()


def evict(world: CacheState, num_blocks: int) -> bool:
    """Ask the cache to evict some blocks."""
    if "evict" not in world.target.can:
        return False
    model, promises = world.model, world.promises
    world.demand += num_blocks * world.config["num_blocks"]  # from here on, anything may be gone
    if model is not None:
        model.actor, model.needed = "", model.num_free + num_blocks
        wanted = min(num_blocks, len(model.unused()))
    evicted = world.target.evict(num_blocks)
    if model is not None and (promises.evicts_exactly or promises.counts_available):
        is_right = evicted == wanted if promises.evicts_exactly else evicted >= wanted
        require(is_right, rules.E6, "evicted {} of {}, not {}", evicted, num_blocks, wanted)
    return True


def reset(world: CacheState) -> bool:
    """Reset the cache, as after a change of weights; running requests start again."""
    if "reset" not in world.target.can:
        return False
    running = world.running()
    world.situations["reset with live leases"] += bool(running)
    if world.model is not None:
        world.model.actor, world.model.resetting = "", True
    world.target.run("reset")
    if world.model is not None:
        world.model.reset()
    for request in running:
        request.stop()
    world.written.clear()
    world.flights.clear()
    found = world.target.available()
    require(found == world.config["num_blocks"], rules.R4, "{} available after a reset", found)
    return True


def misuse(world: CacheState, kind: int, name: str = "") -> bool:
    """Make a wrong call; the adapter checks that it is refused."""
    if "misuse" not in world.target.can:
        return False
    world.target.misuse(kind, name if world.get(name, "running") else "")
    world.situations["misuse"] += 1
    return True


def check(world: CacheState) -> bool:
    """Call the manager's own check."""
    if "check" not in world.target.can:
        return False
    world.target.run("check")
    return True


def drain(world: CacheState) -> bool:
    """Let all requests compute and end; then every block must be available and usable."""
    for name in list(world.jobs):
        done(world, name)
    while end_step(world):
        pass
    for request in world.running():
        if request.written < len(request.tokens):
            forward(world, request.name, len(request.tokens))
        finish(world, request.name)
    num_blocks = world.config["num_blocks"]
    found = world.target.available()
    require(found == num_blocks, rules.D1, "{} of {} blocks can be had", found, num_blocks)
    check(world)
    use_all(world, num_blocks)
    world.target.check_empty()
    return True


def use_all(world: CacheState, num_blocks: int) -> None:
    """Admit and end a request that needs the whole pool."""
    probe = Request("probe", PROBE, [0] * (num_blocks * world.block_size), 0)
    world.requests[probe.name] = probe
    admit(world, probe.name)
    require(probe.state == "running", rules.D2, "an idle cache refused {} blocks", num_blocks)
    finish(world, probe.name)

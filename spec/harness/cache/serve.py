"""Requests that run one after another, whose hits an LRU list of blocks foretells."""

from __future__ import annotations

from ...rules.cache import H8
from ...rules.rule import require
from .admit import admit, submit
from .compute import forward
from .end import finish
from .state import CacheState


def serve(world: CacheState, name: str, prompt: list[int], namespace: int) -> bool:
    """Run a request of whole blocks alone; it applies to a cache that has served nothing else."""
    size, is_serial = world.block_size, world.num_served == world.num_steps
    prompt = prompt[: min(len(prompt) // size, world.config["num_blocks"]) * size]
    if not (prompt and is_serial and submit(world, name, prompt, 0, namespace)):
        return False
    world.num_served += 1
    request = world.requests[name]
    admit(world, name)
    hit, path = request.written // size, request.path(size)
    forward(world, name, len(prompt))
    finish(world, name)
    known = world.lru.use(path)
    promises = world.promises
    # Without `hits_last`, a request that is cached to its end needs room for one copy more.
    if promises.lru and promises.hits_all and promises.hits_last and promises.evicts_exactly:
        require(hit >= known, H8, "{} hit {} blocks, {} of its first are among the {} last used",
                name, hit, known, world.config["num_blocks"])  # fmt: skip
        world.situations["served alone"] += 1
        world.situations["served alone, with a hit"] += bool(known)
    return True

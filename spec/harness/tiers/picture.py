"""The state of a world with tiers as text."""

from __future__ import annotations

from ..cache import picture as cache_picture
from .state import TierState


def picture(world: TierState) -> str:
    """Draw the current state: device, host, operations in flight."""
    lines = [cache_picture.picture(world)]
    seen, words = world.tiers.now, _words(world)
    places = {
        **{block: words[tag] for tag, block in seen.host.items()},
        **{block: f"{words[tag]} offloading" for tag, block in seen.offloading.items()},
    }
    for block in range(1, world.config["host_blocks"] + 1):
        owner = world.tiers.host.get(block, "free")
        lines.append(f"host {block}: {places.get(block, owner)}")
    for name, flight in zip(world.executor.names(), world.executor.flights, strict=True):
        copy = flight.copy
        state = "given up" if flight.cancelled else "not fenced" if flight.has_result else "open"
        lines.append(
            f"{name} {list(copy.sources)} -> {list(copy.destinations)}, "
            f"{len(copy.keys)} keys, {state}"
        )
    for name, parked in world.tiers.parked.items():
        state = "being saved" if parked.writers else "saved"
        lines.append(f"{name} parked with {parked.num_tokens} tokens, {state}")
    if world.executor.storage:
        lines.append(f"storage: {len(world.executor.storage)} blocks")
    return "\n".join(lines)


def _words(world: TierState) -> dict[int, str]:
    size = world.block_size
    words: dict[int, str] = {}
    for request in world.past:
        for index, tag in enumerate(request.path(size)):
            words[tag] = str(request.tokens[: (index + 1) * size])
    return words

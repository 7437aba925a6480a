"""The state of a cache world as text: tree of published blocks, requests, pool."""

from __future__ import annotations

from typing import Final

from ...model.cache import CACHED, EVICTED, FREE, LEFT, CacheModel
from ...model.ghost import Tag
from .state import CacheState


def picture(world: CacheState) -> str:
    """Draw the current state."""
    lines = _tree(world, world.model) if world.model is not None else []
    for request in world.requests.values():
        state = f"{request.name} {request.state}, {request.written}/{len(request.tokens)} computed"
        if request.table:
            state += f", table {request.table}"
        if request.job:
            state += f", step {request.job} in flight"
        lines.append(state)
    if world.model is not None:
        lines.append(_pool(world.model, world.config["num_blocks"]))
    return "\n".join(lines)


def _tree(world: CacheState, model: CacheModel) -> list[str]:
    size = world.block_size
    words: dict[Tag, str] = {}
    for request in world.past:
        for index, tag in enumerate(request.path(size)):
            words[tag] = " ".join(map(str, request.tokens[index * size : (index + 1) * size]))
    children: dict[Tag, list[int]] = {}
    for block, entry in model.cached.items():
        children.setdefault(entry.parent, []).append(block)
    lines: list[str] = []

    def draw(parent: Tag, depth: int) -> None:
        for block in children.pop(parent, []):
            entry = model.cached[block]
            users = [name for name, held in model.holdings.items() if block in held.table]
            use = f"used by {', '.join(users)}" if users else f"unused since {entry.last_use}"
            word = words.get(entry.tag, "?")
            lines.append(f"{'   ' * depth}+- [{word}] block {block}, {use}")
            draw(entry.tag, depth + 1)

    for root in [parent for parent in children if parent not in model.copies]:
        draw(root, 0)
    return lines


SIGNS: Final = {FREE: ".", CACHED: "c", EVICTED: "!", LEFT: "!"}


def _pool(model: CacheModel, num_blocks: int) -> str:
    owners = [SIGNS.get(owner, "r") for _, owner in sorted(model.owner.items())]
    owners += ["."] * (num_blocks - len(owners))
    return f"blocks |{''.join(owners)}|  . free  r private  c cached  ! belongs to nobody"

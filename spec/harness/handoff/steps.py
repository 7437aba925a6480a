"""Steps of nodes: the computation of prompts and tokens over ghost memory."""

from __future__ import annotations

from ...adapters.handoff import Chunk
from ...model.handoff import DecodeModel, PrefillModel, Tokens, next_token, tagged
from ...rules.handoff import X13
from ...rules.rule import require
from .events import publish, settle
from .state import HandoffState, LiveNode


def compute(world: HandoffState, name: str) -> bool:
    """P plans a step, or computes one group of layers of the planned one."""
    node = world.nodes.get(name)
    if node is None or not isinstance(node.model, PrefillModel):
        return False
    target, model = node.prefill, node.model
    if not node.is_stepping:
        _plan(world, node)
        for chunk in target.chunks():
            model.computes(chunk.name, chunk.start)
        counts = target.counts()
        model.counted(counts.hits, counts.on_device)
        return True
    chunks = target.chunks()
    _write(world, node, node.num_written)
    node.num_written += 1
    if node.num_written < world.num_groups:
        target.wrote(node.num_written - 1)
        return True
    owned: list[Chunk] = []  # P may postpone others: D reads them, and the tree has a part
    for chunk in chunks:
        model.computed[chunk.name] += chunk.stop - chunk.start
        has_offers = any(each[0] == chunk.name for each in model.offers.values())
        num_cached = node.num_cached(_kv(chunk, chunk.stop))
        is_first = num_cached <= chunk.num_shared * world.block_size
        if world.num_groups == 1 or not has_offers or is_first:
            owned.append(chunk)
    _end_step(world, node)
    for chunk in owned:
        publish(node, _kv(chunk, chunk.stop))
    return True


def decode(world: HandoffState, name: str) -> bool:
    """D plans a step, or computes it."""
    node = world.nodes.get(name)
    if node is None or not isinstance(node.model, DecodeModel):
        return False
    if not node.is_stepping:
        _plan(world, node)
        return True
    for group in range(world.num_groups):
        _write(world, node, group)
    chunks = node.target.chunks()
    _end_step(world, node)
    for chunk in chunks:
        if not chunk.is_aborted:
            publish(node, _kv(chunk, chunk.stop))
    return True


def _plan(world: HandoffState, node: LiveNode) -> None:
    plan = node.target.schedule()
    published = node.model.published
    settle(node)
    for name, tokens, num_hit, namespace in plan.admitted:
        if isinstance(node.model, PrefillModel):
            node.model.admitted(name, tokens, num_hit)
        published.hit(tagged(namespace, tokens), num_hit, name)
    if plan.preempted:
        world.situations["preempted"] += len(plan.preempted)
        may = world.config["reserve_tokens"] is not None
        require(may, X13, "{} preempts {}", node.name, plan.preempted)
    node.is_stepping, node.num_written = plan.num_chunks > 0, 0


def _write(world: HandoffState, node: LiveNode, group: int) -> None:
    """Compute one group of layers of a step."""
    device = node.model.device
    for chunk in node.target.chunks():
        device.read(chunk.table, _kv(chunk, chunk.start), group, chunk.name)
        tokens = _kv(chunk, chunk.stop)
        device.write(chunk.table, chunk.num_shared, tokens, chunk.start, group)


def _end_step(world: HandoffState, node: LiveNode) -> None:
    node.is_stepping = False
    node.target.update(
        [
            next_token(chunk.seed, chunk.tokens) if chunk.stop == len(chunk.tokens) else -1
            for chunk in node.target.chunks()
        ]
    )


def _kv(chunk: Chunk, stop: int) -> Tokens:
    return tagged(chunk.namespace, chunk.tokens[:stop])

"""Steps of nodes: the computation of prompts and tokens over ghost memory."""

from __future__ import annotations

from collections.abc import Sequence

from ...adapters.handoff import Chunk
from ...model.handoff import DecodeModel, PrefillModel, Tokens, next_token, tagged
from ...rules.handoff import X13
from ...rules.rule import require
from .events import check_cached, publish, settle
from .state import HandoffState, LiveNode


def compute(world: HandoffState, name: str) -> bool:
    """P plans a step, or computes one group of layers of the planned one."""
    node = world.nodes.get(name)
    if node is None or not isinstance(node.model, PrefillModel):
        return False
    target, model = node.prefill, node.model
    if not node.flights:
        for chunk in _plan(world, node):
            model.computes(chunk.name, chunk.start)
        counts = target.counts()
        model.counted(counts.hits, counts.on_device)
        return True
    _write(world, node, node.num_written)
    node.num_written += 1
    if node.num_written < world.num_groups:
        target.wrote(node.num_written - 1)
        for chunk in node.flights[0]:  # it is not published before all groups are written
            check_cached(node, _kv(chunk, chunk.stop))
        return True
    owned: list[Chunk] = []  # P may postpone others: D reads them, and the tree has a part
    for chunk in node.flights[0]:
        model.computed[chunk.name] += chunk.stop - chunk.start
        has_offers = any(each[0] == chunk.name for each in model.offers.values())
        num_cached = node.num_cached(_kv(chunk, chunk.stop))
        is_first = num_cached <= chunk.num_shared * world.block_size
        if world.num_groups == 1 or not has_offers or is_first:
            owned.append(chunk)
    _end_step(node)
    for chunk in owned:
        publish(node, _kv(chunk, chunk.stop))
    return True


def decode(world: HandoffState, name: str) -> bool:
    """D plans a step, or computes the first one in flight if it can plan none."""
    node = world.nodes.get(name)
    if node is None or not isinstance(node.model, DecodeModel):
        return False
    if len(node.flights) == world.system.depth or not _plan(world, node):
        complete(world, name)
    return True


def complete(world: HandoffState, name: str) -> bool:
    """D computes the first step in flight."""
    node = world.nodes.get(name)
    if node is None or not isinstance(node.model, DecodeModel) or not node.flights:
        return False
    for group in range(world.num_groups):
        _write(world, node, group)
    chunks = node.flights[0]
    for chunk, counts in zip(chunks, _end_step(node), strict=True):
        if counts:
            publish(node, _kv(chunk, chunk.stop))
        world.situations["chunk discarded"] += not counts
    return True


def _plan(world: HandoffState, node: LiveNode) -> Sequence[Chunk]:
    """Let a node plan a step; return what it computes, perhaps nothing."""
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
    if plan.chunks:
        node.flights.append(plan.chunks)
        node.model.launched({chunk.name: chunk.table for chunk in plan.chunks})
        world.situations["steps in flight"] += len(node.flights) > 1
    return plan.chunks


def _write(world: HandoffState, node: LiveNode, group: int) -> None:
    """Compute one group of layers of the first step in flight."""
    device = node.model.device
    for chunk in node.flights[0]:
        device.read(chunk.table, _kv(chunk, chunk.start), group, chunk.name)
        tokens = _kv(chunk, chunk.stop)
        device.write(chunk.table, chunk.num_shared, tokens, chunk.start, group)


def _end_step(node: LiveNode) -> Sequence[bool]:
    """Tell a node the results of the first step in flight; return which of them count."""
    chunks, node.num_written = node.flights.popleft(), 0
    node.model.completed()
    return node.target.update(
        [
            next_token(chunk.seed, _tokens(chunk)) if chunk.stop >= len(chunk.tokens) else -1
            for chunk in chunks
        ]
    )


def _tokens(chunk: Chunk) -> Tokens:
    """Return the tokens of a request, with those that earlier steps in flight have sampled."""
    tokens = chunk.tokens
    while len(tokens) < chunk.stop:
        tokens += (next_token(chunk.seed, tokens),)
    return tokens


def _kv(chunk: Chunk, stop: int) -> Tokens:
    return tagged(chunk.namespace, _tokens(chunk)[:stop])

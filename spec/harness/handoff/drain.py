"""The end of a hand-off's world without further faults, and the rules about what is left."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from ...adapters.handoff import BACKOFF, SILENCE, TRANSFER
from ...rules.handoff import X20, X21, X22, X23, X24, X28
from ...rules.rule import require
from ..engine import Operation
from .events import check_cached
from .state import HandoffState, LiveNode

STEPS_PER_ROUND: Final = 8
"""Operations of each node on its steps in a round."""

ROUNDS_PER_HANDOFF: Final = 4
"""Rounds in which the messages of one attempt arrive."""

ROUNDS_PER_LOAD: Final = 2
"""Rounds in which copies from the host tiers of both nodes arrive."""

ROUNDS_PER_FETCH: Final = 4
"""Rounds in which both nodes look up and load what storage has."""

MAX_NEW: Final = 8
"""Most requests of a flood at a time."""


def drain(world: HandoffState) -> None:
    """Run rounds without faults until everything has ended, and check what is left.

    Raises:
        Violation: something does not end within the bound, a request has no answer, a node still
            holds blocks, or a cached block has the wrong content.
    """
    run_rounds(world)
    world.check_caches()
    loads = world.gateway.loads()
    require(not any(loads.values()), X24, "the loads are {}", loads)
    for node in world.live():
        _check_empty(world, node)


def run_rounds(world: HandoffState) -> None:
    """Run rounds without faults until everything has ended, within the bound."""
    bound = bound_of(world)
    number = 0
    while number == 0 or not is_drained(world):
        require(number < bound, X20, "{} rounds, and there are {}", bound, pending(world))
        number += 1
        for operation in fair_round(world):
            world.apply(operation)
    require(not world.model.open(), X20, "{} have no answer", world.model.open())


def run_flood(
    world: HandoffState, old: list[str], name: str, prompt: Sequence[int], max_new_tokens: int
) -> None:
    """Run rounds without faults, with new requests, until the old ones have ended, in time."""
    bound = flood_bound(world, len(prompt) + max_new_tokens)
    number = num_new = 0
    while waiting := [each for each in old if each not in world.model.answers]:
        require(number < bound, X21, "{} rounds, and there is no answer to {}", bound, waiting)
        number += 1
        while len(world.model.open()) < len(waiting) + MAX_NEW:
            num_new += 1
            world.apply(["submit", f"{name}-{num_new}", prompt, max_new_tokens, 0, 0])
        for operation in fair_round(world):
            world.apply(operation)
    world.situations["flooded"] += 1


def run_partition(world: HandoffState) -> None:
    """Run rounds without other faults until all requests have ended, though links are severed."""
    bound, number = partition_bound(world), 0
    while waiting := world.model.open():
        cut = list(world.severed)
        require(number < bound, X28, "{} rounds, {} are severed, and there is no answer to {}",
                bound, cut, waiting)  # fmt: skip
        number += 1
        for operation in fair_round(world, mends=False):
            world.apply(operation)
    world.situations["partitioned"] += 1


def partition_bound(world: HandoffState) -> int:
    """Return a number of rounds after which all requests have ended, with links severed.

    Each pair may lose an attempt of each request, and its nodes hold what it had until then.
    """
    num_pairs = len(world.prefill_names) * len(world.decode_names)
    return bound_of(world) * 2 * (1 + num_pairs)


def run_probe(
    world: HandoffState, name: str, prompt: Sequence[int], max_new_tokens: int, lost: int
) -> None:
    """Let all end; then run a request of which one message is lost, in one attempt."""
    run_rounds(world)
    for _ in range(SILENCE + 1):  # until the gateway misses the nodes that have left
        for operation in fair_round(world):
            world.apply(operation)
    world.apply(["submit", name, prompt, max_new_tokens, 0, 0])
    bound, number = bound_of(world), 0
    num_refused = world.situations["arrived: Refuse"]
    for _ in range(bound):
        for operation in fair_round(world):
            if operation[0] == "deliver" and not world.network[0].is_status:
                operation = ["drop" if number == lost else "deliver", operation[1]]
                number += 1
            world.apply(operation)
        if is_drained(world):
            break
    num_attempts = len(world.requests[name].attempts)
    is_right = name in world.model.answers and num_attempts == 1
    is_refused = world.situations["arrived: Refuse"] > num_refused
    require(is_right or is_refused, X22, "{} has {} attempts", name, num_attempts)
    world.situations["probed"] += 1


def run_interrupt(
    world: HandoffState,
    name: str,
    prompt: Sequence[int],
    max_new_tokens: int,
    seed: int,
    num_told: int,
) -> None:
    """Let all end; then reboot the decode node of a request whose client got some tokens."""
    run_rounds(world)
    world.apply(["submit", name, prompt, max_new_tokens, seed, 0])
    bound = bound_of(world)
    for _ in range(bound):
        for operation in fair_round(world):
            world.apply(operation)
            if num_told <= world.model.num_told(name):
                for node in world.decode_names:
                    world.apply(["reboot", node])
                num_told = max_new_tokens + 1
                world.situations["interrupted"] += 1
        if is_drained(world):
            break


def run_crowd(
    world: HandoffState,
    name: str,
    prompt: Sequence[int],
    max_new_tokens: int,
    seed: int,
    number: int,
) -> None:
    """Let all end; then submit several requests, which decode one step a round for a while."""
    run_rounds(world)
    for each in range(1, number + 1):
        world.apply(["submit", f"{name}-{each}", [*prompt, each], max_new_tokens, seed, 0])
    for _ in range(2 * max_new_tokens):
        previous: Operation = []
        for operation in fair_round(world):
            if operation != previous or operation[0] != "decode":
                world.apply(operation)
            previous = operation
    run_rounds(world)
    world.situations["crowded"] += 1


def flood_bound(world: HandoffState, num_tokens: int) -> int:
    """Return a number of rounds after which all requests have ended, though others come.

    Args:
        world: the world before the flood.
        num_tokens: of each new request.
    """
    each = BACKOFF + ROUNDS_PER_HANDOFF + -(-num_tokens * (1 + world.num_groups) // STEPS_PER_ROUND)
    num_passing: int = world.config["max_overtaken"] + MAX_NEW
    return 2 * (bound_of(world) + each * num_passing)


def bound_of(world: HandoffState) -> int:
    """Return a number of rounds after which all has ended: at worst, requests run one by one.

    Each may wait for its next attempt, D for a request that it refused earlier. Each needs some
    rounds for messages and copies, and a node does `STEPS_PER_ROUND` of its steps in a round.
    Before, the nodes give up what the faults left.
    """
    lost = SILENCE + TRANSFER + BACKOFF
    each_waits = BACKOFF + SILENCE + ROUNDS_PER_HANDOFF
    if world.config["host_blocks"]:
        each_waits += ROUNDS_PER_LOAD
    if world.config.get("storage"):
        each_waits += ROUNDS_PER_FETCH
    requests = [world.requests[name] for name in world.model.open()]
    tokens = [len(each.prompt) + each.max_new_tokens for each in requests]
    steps = [-(-each * (1 + world.num_groups) // STEPS_PER_ROUND) for each in tokens]
    return lost + sum(each_waits + each for each in steps)


def fair_round(world: HandoffState, *, mends: bool = True) -> Iterator[Operation]:
    """Yield operations that let every pending event happen once, without faults, and a tick.

    Args:
        world: the world.
        mends: whether severed links are mended before. Otherwise their pulls do not end.
    """
    for name in list(world.severed) if mends else ():
        yield ["mend", name, 0]
    for name in world.down():
        yield ["restart", name]
    while world.network:  # answers arrive before messages are repeated
        yield ["deliver", world.network[0].name]
    for transfer in world.transfers[:]:
        if not world.is_severed(transfer.node, transfer.peer):
            yield ["pull_write", transfer.name]
            yield ["pull_end", transfer.name, transfer.is_whole, True]
        if transfer in world.transfers:  # it had ended unfenced, or hangs
            yield ["pull_fence", transfer.name]
    for attempt in [attempt for node in world.live() for attempt in node.withdrawn]:
        yield ["offer_fence", attempt]
    for name in [name for node in world.live() for name in node.copies]:
        yield ["copy", name, True]
    for word, names in (("compute", world.prefill_names), ("decode", world.decode_names)):
        for name in names:
            for _ in range(STEPS_PER_ROUND):
                node = world.nodes[name]
                if node is not None and (node.flights or node.system.has_work()):
                    yield [word, name]
    yield ["tick", 1]


def is_drained(world: HandoffState) -> bool:
    """Whether nothing is pending but signs of life."""
    return not pending(world)


def pending(world: HandoffState) -> dict[str, int]:
    """Return what has not ended, by kind."""
    live = world.live()
    counts = [node.system.counts() for node in live]
    found = {
        "requests without answer": world.gateway.num_open(),
        "nodes that are down": len(world.down()),
        "attempts": sum(each.num_open for each in counts),
        "nodes with work": sum(node.system.has_work() for node in live),
        "copies": sum(len(node.copies) for node in live),
        "messages": sum(not envelope.is_status for envelope in world.network),
        "messages without answer": world.gateway.num_unacked()
        + sum(each.num_unacked for each in counts),
        "pulls": len(world.transfers),
        "resets": sum(node.is_draining for node in live),
    }
    return {name: number for name, number in found.items() if number}


def _check_empty(world: HandoffState, node: LiveNode) -> None:
    """Check the content of a node's cache, and that eviction frees all of its blocks."""
    target, name = node.target, node.name
    counts = target.counts()
    is_free = counts.held == 0 and counts.available == counts.num_blocks
    require(is_free, X23, "{} has {}", name, counts)
    for request in world.requests.values():
        check_cached(node, request.kv)
    target.evict(counts.num_blocks)
    free = target.num_free()
    require(free == counts.num_blocks, X23, "{} has {} free blocks", name, free)

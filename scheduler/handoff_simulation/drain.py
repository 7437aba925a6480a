"""How a simulation is brought to its end, without more faults, and what must be left then."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from .invariants import (
    ALL_END,
    IDLE_NODES,
    NO_LEAK,
    SimulationError,
)
from .nodes import Node, PrefillNode
from .operations import Op, Simulation

MAX_ROUNDS: Final = 400
"""Rounds of a network without faults in which everything must have ended."""

STEPS_OF_A_ROUND: Final = 8


def check(simulation: Simulation) -> None:
    """Assert every invariant of all managers."""
    for node in nodes(simulation):
        node.manager.check()


def nodes(simulation: Simulation) -> list[Node]:
    """The nodes that are up."""
    return [node for node in simulation.nodes.values() if node is not None]


def finish(simulation: Simulation) -> None:
    """Let everything end with no more faults.

    Raises:
        SimulationError: if something does not end, or a request has no answer.
    """
    for _ in range(MAX_ROUNDS):
        for op in fair_round(simulation):
            simulation.apply(op)
        if is_done(simulation):
            break
    else:
        raise SimulationError(
            ALL_END, f"after {MAX_ROUNDS} rounds without faults: {_state(simulation)}"
        )
    missing = simulation.jobs.keys() - simulation.answers.keys()
    if missing:
        raise SimulationError(ALL_END, f"no answer to {sorted(missing)}")


def settle(simulation: Simulation) -> None:
    """Let everything end with no more faults, check that it has ended well, and empty the nodes.

    Raises:
        SimulationError: if something does not end, a request has no answer, a node still holds
            blocks, or what is cached is not what its tokens say.
    """
    finish(simulation)
    check(simulation)
    if any(simulation.gateway.loads.values()):
        raise SimulationError(IDLE_NODES, f"loads are {simulation.gateway.loads}")
    for node in simulation.nodes.values():
        assert node is not None, "a node was not restarted"
        _check_drained(simulation, node)


def fair_round(simulation: Simulation) -> Iterator[Op]:
    """Let everything that can happen once do so, without faults; then time passes."""
    for place in range(len(simulation.names)):
        yield ["restart", place]
    while simulation.network:  # an answer comes before anybody asks again
        yield ["deliver", 0]
    for transfer in simulation.pulls[:]:
        yield ["land", 0]
        yield ["pull_end", 0, transfer.landed, True]
        if transfer in simulation.pulls:  # it had ended before, and was not fenced
            yield ["pull_fence", 0]
    for node in nodes(simulation):
        for _ in node.withdrawn[:] if isinstance(node, PrefillNode) else ():
            yield ["offer_fence", 0]
    for _ in range(sum(len(node.copies.flying) for node in nodes(simulation))):
        yield ["copy", 0, True]
    for word, names in (
        ("compute", simulation.prefill_names),
        ("decode", simulation.decode_names),
    ):
        for place, name in enumerate(names):
            each = simulation.nodes[name]
            for _ in range(STEPS_OF_A_ROUND):
                if each is not None and (each.plan is not None or each.scheduler.has_work):
                    yield [word, place]
    yield ["tick", 1]


def is_done(simulation: Simulation) -> bool:
    """Whether nothing is left that could happen, but for signs of life."""
    return not any(_state(simulation).values())


def _state(simulation: Simulation) -> dict[str, int]:
    up = nodes(simulation)
    return {
        "requests without answer": simulation.gateway.num_open,
        "nodes that are down": len(simulation.names) - len(up),
        "attempts": sum(node.scheduler.num_open for node in up),
        "work": sum(node.scheduler.has_work for node in up),
        "copies": sum(len(node.copies.flying) for node in up),
        "messages": sum(not envelope.is_alive for envelope in simulation.network),
        "messages without answer": simulation.gateway.num_unacked
        + sum(node.reporter.num_unacked for node in up),
        "pulls": len(simulation.pulls),
        "resets": len(simulation.draining),
    }


def _check_drained(simulation: Simulation, node: Node) -> None:
    """Check what a node has cached, then that all of its blocks come free."""
    manager, num_groups = node.manager, simulation.config.num_groups
    stats = manager.stats()
    if stats.live_leases or manager.available != stats.num_blocks:
        raise SimulationError(NO_LEAK, f"{type(node).__name__} leaks: {stats}")
    for job in simulation.jobs.values():
        match = manager.match(job.prompt)
        hit = job.prompt[: match.num_tokens]
        lease = manager.admit(manager.match(hit))
        for group in range(num_groups):
            node.memory.read(lease, hit, group, f"the cache of {type(node).__name__}")
        manager.release(lease)
    if stats.tiers is not None and stats.tiers.parked:
        raise SimulationError(NO_LEAK, f"{type(node).__name__} leaks: {stats.tiers}")
    manager.evict(stats.num_blocks)
    if manager.stats().free_blocks != stats.num_blocks:
        raise SimulationError(NO_LEAK, f"{type(node).__name__} is not empty: {manager.stats()}")

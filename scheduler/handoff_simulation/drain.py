"""Runs a simulation to its end without further faults, and checks what is left."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from .invariants import ALL_END, IDLE_NODES, NO_LEAK, SimulationError
from .nodes import Node, PrefillNode
from .simulation import Op, Simulation

MAX_ROUNDS: Final = 400
"""Rounds without faults after which everything must have ended."""

STEPS_PER_ROUND: Final = 8


def check_managers(simulation: Simulation) -> None:
    """Assert the invariants of all cache managers."""
    for node in live_nodes(simulation):
        node.manager.check()


def live_nodes(simulation: Simulation) -> list[Node]:
    """Return the nodes that have not crashed."""
    return [node for node in simulation.nodes.values() if node is not None]


def drain(simulation: Simulation) -> None:
    """Run rounds without faults until everything has ended.

    Raises:
        SimulationError: if something does not end, or a request has no answer.
    """
    for _ in range(MAX_ROUNDS):
        for op in fair_round(simulation):
            simulation.apply(op)
        if is_drained(simulation):
            break
    else:
        raise SimulationError(
            ALL_END, f"after {MAX_ROUNDS} rounds without faults: {_state(simulation)}"
        )
    missing = simulation.jobs.keys() - simulation.answers.keys()
    if missing:
        raise SimulationError(ALL_END, f"no answer to {sorted(missing)}")


def drain_and_check(simulation: Simulation) -> None:
    """Drain the simulation, check the final state, and empty the nodes.

    Raises:
        SimulationError: if something does not end, a request has no answer, a node still holds
            blocks, or a cached block has the wrong content.
    """
    drain(simulation)
    check_managers(simulation)
    if any(simulation.gateway.loads.values()):
        raise SimulationError(IDLE_NODES, f"loads are {simulation.gateway.loads}")
    for node in simulation.nodes.values():
        assert node is not None, "a node was not restarted"
        _check_drained(simulation, node)


def fair_round(simulation: Simulation) -> Iterator[Op]:
    """Yield operations that let every pending event happen once, without faults, and a tick."""
    for place in range(len(simulation.names)):
        yield ["restart", place]
    while simulation.network:  # answers arrive before messages are repeated
        yield ["deliver", 0]
    for transfer in simulation.pulls[:]:
        yield ["pull_write", 0]
        yield ["pull_end", 0, transfer.written, True]
        if transfer in simulation.pulls:  # it had ended unfenced
            yield ["pull_fence", 0]
    for node in live_nodes(simulation):
        for _ in node.withdrawn[:] if isinstance(node, PrefillNode) else ():
            yield ["offer_fence", 0]
    for _ in range(sum(len(node.copies.in_flight) for node in live_nodes(simulation))):
        yield ["copy", 0, True]
    for word, names in (
        ("compute", simulation.prefill_names),
        ("decode", simulation.decode_names),
    ):
        for place, name in enumerate(names):
            each = simulation.nodes[name]
            for _ in range(STEPS_PER_ROUND):
                if each is not None and (each.plan is not None or each.scheduler.has_work):
                    yield [word, place]
    yield ["tick", 1]


def is_drained(simulation: Simulation) -> bool:
    """Whether nothing is pending but signs of life."""
    return not any(_state(simulation).values())


def _state(simulation: Simulation) -> dict[str, int]:
    up = live_nodes(simulation)
    return {
        "requests without answer": simulation.gateway.num_open,
        "nodes that are down": len(simulation.names) - len(up),
        "attempts": sum(node.scheduler.num_open for node in up),
        "work": sum(node.scheduler.has_work for node in up),
        "copies": sum(len(node.copies.in_flight) for node in up),
        "messages": sum(not envelope.is_status for envelope in simulation.network),
        "messages without answer": simulation.gateway.num_unacked
        + sum(node.reporter.num_unacked for node in up),
        "pulls": len(simulation.pulls),
        "resets": len(simulation.draining),
    }


def _check_drained(simulation: Simulation, node: Node) -> None:
    """Check the content of a node's cache, and that eviction frees all of its blocks."""
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

"""Random programs for the simulation, how each is brought to its end, and its replay from JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from itertools import accumulate
from operator import mul
from random import Random
from typing import Final

from .actions import Timing
from .invariants import ALL_END, IDLE_NODES, NO_LEAK, SimulationError
from .nodes import Node, PrefillNode, SimulationConfig
from .prefill_side import ORDERS
from .simulation import Op, Simulation

MAX_ROUNDS: Final = 400
"""Rounds of a network without faults in which everything must have ended."""

WEIGHTS: Final = {
    "submit": 4,
    "cancel": 0.4,
    "deliver": 60,
    "duplicate": 5,
    "drop": 4,
    "cut": 0.3,
    "compute": 20,
    "decode": 18,
    "land": 22,
    "pull_end": 20,
    "pull_fence": 3,
    "offer_fence": 2,
    "crash": 0.6,
    "restart": 8,
    "new_desk": 0.05,
    "copy": 8,
    "evict": 1,
    "drain": 0.1,
    "tick": 3,
}
STEPS_OF_A_ROUND: Final = 8
_WORDS: Final = list(WEIGHTS)


def random_config(random: Random) -> SimulationConfig:
    """Draw sizes, from too small for two requests to comfortable; in some, D is crowded."""
    config = SimulationConfig(
        prefill_blocks=random.choice([5, 8, 14]),
        decode_blocks=random.choice([6, 9, 16]),
        host_blocks=random.choice([0, 0, 4, 12]),
        block_size=random.choice([1, 2, 3]),
        num_groups=random.choice([1, 2]),
        budget=random.choice([2, 5, 16]),
        max_running=random.choice([1, 2, 4]),
        order=random.choice(ORDERS),
        reserve_tokens=random.choice([0, 0, 0, 2, None]),
        num_prefill=random.choice([1, 1, 2]),
        num_decode=random.choice([1, 1, 2]),
        request_s=random.choice([30, 5000, 5000]),
    )
    if random.random() < 0.4:
        crowd = random.choice([4, 6])
        return replace(
            config, prefill_blocks=24, decode_blocks=20, max_running=crowd, budget=16, num_decode=1
        )
    return config


def random_prompt(random: Random) -> list[int]:
    """Draw a prompt that often begins as others do."""
    tokens = [random.choice((1, 1, 1, 2))] * random.randint(1, 4)
    return tokens + [random.choice((1, 2)) for _ in range(random.randint(0, 4))]


def random_weights(random: Random) -> list[float]:
    """Draw how often each operation comes: a program may be slow at one thing, rich in another."""
    factors = [random.choice((0.1, 1, 1, 1, 3)) for _ in _WORDS]
    return list(accumulate(map(mul, WEIGHTS.values(), factors)))


def random_op(random: Random, weights: list[float]) -> Op:
    """Draw an operation; the weights are summed up."""
    word = random.choices(_WORDS, cum_weights=weights)[0]
    index = random.choice((0, 0, random.randrange(16)))
    match word:
        case "submit":
            return [
                word,
                random_prompt(random),
                random.randint(1, random.choice((3, 8, 16))),
                random.randrange(4),
            ]
        case "pull_end":
            return [word, index, random.random() < 0.9, random.random() < 0.5]
        case "copy":
            return [word, index, random.random() < 0.9]
        case "cut" | "crash" | "restart" | "drain":
            return [word, random.randrange(4)]
        case "new_desk":
            return [word]
        case "evict":
            return [word, random.randrange(4), random.randint(1, 4)]
        case "tick":
            return [word, random.choice((1, 1, 1, 1, 4))]
    return [word, index]


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
    if any(simulation.desk.loads.values()):
        raise SimulationError(IDLE_NODES, f"loads are {simulation.desk.loads}")
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
        "requests without answer": simulation.desk.num_open,
        "nodes that are down": len(simulation.names) - len(up),
        "attempts": sum(node.scheduler.num_open for node in up),
        "work": sum(node.scheduler.has_work for node in up),
        "copies": sum(len(node.copies.flying) for node in up),
        "messages": sum(not letter.is_alive for letter in simulation.network),
        "messages without answer": simulation.desk.num_unheard
        + sum(node.link.num_unheard for node in up),
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


class Failure(Exception):
    """A program that breaks a rule; `trace` replays it."""

    def __init__(self, error: Exception, config: SimulationConfig, ops: list[Op]) -> None:
        super().__init__(f"after {len(ops)} operations: {error}")
        self.trace = to_json(config, ops)


def run(config: SimulationConfig, ops: Iterable[Op]) -> Simulation:
    """Run a program to its end.

    Raises:
        Failure: if it breaks a rule; with the program so far.
    """
    simulation = Simulation(config)
    done: list[Op] = []
    try:
        for op in ops:
            done.append(op)
            simulation.apply(op)
            if len(done) % 16 == 0:
                check(simulation)
        settle(simulation)
    except Exception as error:
        raise Failure(error, config, done) from error
    return simulation


def run_random(seed: int, num_ops: int = 300) -> Simulation:
    """Run the random program of a seed.

    Raises:
        Failure: if it breaks a rule.
    """
    random = Random(seed)
    config, weights = random_config(random), random_weights(random)
    return run(config, (random_op(random, weights) for _ in range(num_ops)))


def to_json(config: SimulationConfig, ops: Iterable[Op]) -> str:
    """Write a program down."""
    return json.dumps({"config": asdict(config), "ops": [list(op) for op in ops]})


def replay(trace: str) -> Simulation:
    """Run a program that was written down.

    Raises:
        Failure: if it breaks a rule.
    """
    data = json.loads(trace)
    data["config"]["timing"] = Timing(**data["config"]["timing"])
    return run(SimulationConfig(**data["config"]), data["ops"])

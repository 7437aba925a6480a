"""Programs of operations: random generation, execution, and replay from JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, replace
from itertools import accumulate
from operator import mul
from random import Random
from typing import Final

from ..handoff.actions import Timing
from ..handoff.prefill_side import ORDERS
from .drain import check_managers, drain_and_check
from .nodes import SimulationConfig
from .simulation import Op, Simulation

WEIGHTS: Final = {
    "submit": 4,
    "cancel": 0.4,
    "deliver": 60,
    "duplicate": 5,
    "drop": 4,
    "cut": 0.3,
    "compute": 20,
    "decode": 18,
    "pull_write": 22,
    "pull_end": 20,
    "pull_fence": 3,
    "offer_fence": 2,
    "crash": 0.6,
    "restart": 8,
    "new_gateway": 0.05,
    "copy": 8,
    "evict": 1,
    "drain": 0.1,
    "tick": 3,
}
_WORDS: Final = list(WEIGHTS)


def random_config(random: Random) -> SimulationConfig:
    """Draw sizes, from too small for two requests to ample; some overload D."""
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
    """Draw a prompt that often shares a prefix with others."""
    tokens = [random.choice((1, 1, 1, 2))] * random.randint(1, 4)
    return tokens + [random.choice((1, 2)) for _ in range(random.randint(0, 4))]


def random_weights(random: Random) -> list[float]:
    """Draw cumulative weights of the operations; each program favours some and neglects others."""
    factors = [random.choice((0.1, 1, 1, 1, 3)) for _ in _WORDS]
    return list(accumulate(map(mul, WEIGHTS.values(), factors)))


def random_op(random: Random, weights: list[float]) -> Op:
    """Draw an operation by cumulative weights."""
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
        case "new_gateway":
            return [word]
        case "evict":
            return [word, random.randrange(4), random.randint(1, 4)]
        case "tick":
            return [word, random.choice((1, 1, 1, 1, 4))]
    return [word, index]


class Failure(Exception):
    """A program that breaks an invariant; `trace` replays it."""

    def __init__(self, error: Exception, config: SimulationConfig, ops: list[Op]) -> None:
        super().__init__(f"after {len(ops)} operations: {error}")
        self.trace = to_json(config, ops)


def run(config: SimulationConfig, ops: Iterable[Op]) -> Simulation:
    """Run a program, and drain the simulation.

    Raises:
        Failure: if it breaks an invariant; with the program so far.
    """
    simulation = Simulation(config)
    done: list[Op] = []
    try:
        for op in ops:
            done.append(op)
            simulation.apply(op)
            if len(done) % 16 == 0:
                check_managers(simulation)
        drain_and_check(simulation)
    except Exception as error:
        raise Failure(error, config, done) from error
    return simulation


def run_random(seed: int, num_ops: int = 300) -> Simulation:
    """Run the random program of a seed.

    Raises:
        Failure: if it breaks an invariant.
    """
    random = Random(seed)
    config, weights = random_config(random), random_weights(random)
    return run(config, (random_op(random, weights) for _ in range(num_ops)))


def to_json(config: SimulationConfig, ops: Iterable[Op]) -> str:
    """Return a program as JSON."""
    return json.dumps({"config": asdict(config), "ops": [list(op) for op in ops]})


def replay(trace: str) -> Simulation:
    """Run a program from JSON.

    Raises:
        Failure: if it breaks an invariant.
    """
    data = json.loads(trace)
    data["config"]["timing"] = Timing(**data["config"]["timing"])
    return run(SimulationConfig(**data["config"]), data["ops"])

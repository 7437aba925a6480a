"""Random traffic without Hypothesis: fast, and for any copy of the package."""

from __future__ import annotations

import inspect
import random
from collections import Counter
from types import ModuleType
from typing import Final

import numpy as np

import radixkv.kvcache

from .harness import BOUNDS, Config, Harness

WEIGHTS: Final = {
    "submit": 4,
    "serve": 6,
    "admit": 6,
    "twin": 5,
    "compute": 3,
    "publish": 3,
    "finish": 7,
    "extend": 2,
    "extend_batch": 2,
    "release": 10,
    "evict": 1,
    "refuse": 2,
    "reset": 0.2,
}
"""How often the random driver takes a rule."""


def drive(
    seed: int,
    num_steps: int,
    kvcache: ModuleType = radixkv.kvcache,
    *,
    white_box: bool = True,
    steps_per_case: int = 80,
) -> Counter[str]:
    """Run the rules in random order on one tiny configuration after another.

    Args:
        seed, num_steps: the same give the same run.
        kvcache: the package to test.
        white_box: whether to call the manager's own `check` after each step.
        steps_per_case: steps on one configuration.

    Returns:
        How often each situation of interest came up.
    """
    rng = random.Random(seed)
    names, weights = list(WEIGHTS), list(WEIGHTS.values())
    parameters = {
        name: list(inspect.signature(getattr(Harness, name)).parameters)[1:] for name in names
    }
    seen: Counter[str] = Counter()
    for _ in range(num_steps // steps_per_case):
        harness = Harness(random_config(rng), kvcache, white_box)
        for name in rng.choices(names, weights, k=steps_per_case):
            arguments = [rng.randrange(BOUNDS[parameter]) for parameter in parameters[name]]
            getattr(harness, name)(*arguments)
            harness.settle()
        harness.drain()
        seen += harness.seen
    return seen


def random_config(rng: random.Random) -> Config:
    return Config(rng.randint(4, 14), rng.randint(1, 4), rng.randint(2, 3))


def drive_pool(seed: int, num_steps: int, kvcache: ModuleType = radixkv.kvcache) -> None:
    """Allocate and recycle, rightly and wrongly, beside a set of the ids that are free."""
    rng = random.Random(seed)
    num_blocks = rng.randint(1, 8)
    pool, free = kvcache.BlockPool(num_blocks), set(range(1, num_blocks + 1))
    for _ in range(num_steps):
        if rng.random() < 0.4:
            number = rng.randint(0, num_blocks)
            try:
                ids = pool.allocate(number).tolist()
            except kvcache.OutOfBlocksError:
                assert number > len(free)
            else:
                assert len(set(ids)) == number and free.issuperset(ids), f"allocated {ids}"
                free -= set(ids)
        else:
            ids = [rng.randint(-1, num_blocks + 1) for _ in range(rng.randint(0, 4))]
            refused = []
            for block in ids:
                if 1 <= block <= num_blocks and block not in free:
                    free.add(block)
                else:
                    refused.append(block)
            try:
                pool.recycle(np.array(ids, np.int32))
            except kvcache.RecycleError as error:
                assert list(error.refused) == refused, f"{error}, should be {refused}"
            else:
                assert not refused, f"recycled {ids}, but {refused} were not allocated"
        assert sorted(pool.free_ids().tolist()) == sorted(free)

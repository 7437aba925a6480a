"""What an operation applies to: in a shrunk trace, names and numbers may fit no longer."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any, Final

import pytest

from radixkv.scheduler.fuzz import cache_adapter
from radixkv.spec.harness.cache.world import CacheSubject, CacheWorld
from radixkv.spec.harness.engine import Operation, Trace
from radixkv.spec.harness.operations import name_drawn
from radixkv.spec.harness.subjects import WHATS, What

from .traffic import subject_of

NEW: Final = ("new", "on trunk")
"""Groups of names that nobody has yet."""

OF_ANYBODY: Final = ("misuse", "step_misuse")
"""Operations that need no request, whatever its name."""


@pytest.mark.parametrize("what", [what for what in WHATS if what != "pool"])
def test_an_operation_of_nobody_does_not_apply_and_changes_nothing(what: What) -> None:
    subject = subject_of(what)
    drawn: dict[str, Operation] = {}
    places: dict[str, int] = {}
    for seed in range(60):
        below = random.Random(seed).randrange
        world = subject.world(subject.configure(below))
        rows = [
            each for each in world.table
            if name_drawn in each.arguments.values()
            and each.group not in NEW and each.word not in OF_ANYBODY
        ]  # fmt: skip
        places |= {row.word: [*row.arguments.values()].index(name_drawn) + 1 for row in rows}
        for _ in range(60):
            groups = world.table.groups(world)
            for row in rows:
                if row.word not in drawn and groups[row.group]:
                    drawn[row.word] = row.draw(world, groups[row.group], below)
            world.apply(world.draw(below))
        for word, operation in drawn.items():
            of_nobody = [*operation]
            of_nobody[places[word]] = "nobody9"
            before = world.picture(), Counter(world.situations)
            assert not world.apply(of_nobody), of_nobody
            assert (world.picture(), world.situations) == before, of_nobody
        if seed and drawn.keys() == places.keys():
            break
    else:
        raise AssertionError(f"not drawn are {places.keys() - drawn.keys()}")


START: Final[Trace] = [
    ["submit", "waits", [1, 2, 3], 2, 0],
    ["submit", "computes", [4, 5, 6], 2, 0],
    ["submit", "is ready", [7, 8], 1, 0],
    ["submit", "is full", [9], 0, 0],
    ["submit", "has begun", [3, 2, 1], 0, 0],
    ["submit", "has ended", [1], 0, 0],
    *[["admit", name] for name in ("computes", "is ready", "is full", "has begun", "has ended")],
    ["launch", "computes", 2, "computes.1"],
    ["forward", "is ready", 2],
    ["forward", "is full", 1],
    ["forward", "has begun", 1],
    ["finish", "has ended"],
]

RUNNING: Final = {"computes", "is ready", "is full", "has begun"}

APPLIES: Final[list[tuple[Operation, set[str]]]] = [
    (["admit", "NAME"], {"waits"}),
    (["match", "NAME"], {"waits"}),
    (["forward", "NAME", 1], {"has begun"}),
    (["forward", "NAME", 0], set()),
    (["launch", "NAME", 1, "step"], {"has begun"}),
    (["launch", "NAME", 1, "computes.1"], set()),
    (["append", "NAME", [0, 0, 0]], {"is ready"}),
    (["append", "NAME", []], set()),
    (["again", "NAME", 1], {"is ready", "is full", "has begun"}),
    (["again", "NAME", 2], {"is ready"}),
    (["again", "NAME", 0], RUNNING),
    (["finish", "NAME"], RUNNING),
    (["preempt", "NAME"], RUNNING),
    (["done", "NAME.1"], {"computes"}),
    (["fail", "NAME.1"], {"computes"}),
    (["submit", "NAME", [1], 0, 0], set()),
    (["submit", "new", [], 0, 0], set()),
]


def world_of(trace: Trace) -> CacheWorld:
    subject = CacheSubject(cache_adapter.make_factory(), "full")
    config = {"num_blocks": 12, "block_size": 1, "max_running": 9, "alphabet": 1}
    world = subject.world(config)
    assert all([world.apply(operation) for operation in trace])
    return world


@pytest.mark.parametrize(
    ("operation", "names"),
    APPLIES,
    ids=lambda each: str(sorted(each) if isinstance(each, set) else each),
)
def test_an_operation_of_a_cache_applies_to_requests_in_some_states(
    operation: Operation, names: set[str]
) -> None:
    found = set()
    for name in (*RUNNING, "waits", "has ended"):
        world = world_of(START)
        before = world.picture(), Counter(world.situations), world.num_steps
        named: Any = [each.replace("NAME", name) if type(each) is str else each
                      for each in operation]  # fmt: skip
        if world.apply(named):
            found.add(name)
        else:
            assert (world.picture(), world.situations, world.num_steps) == before
    assert found == names


def test_a_batch_is_of_the_requests_that_can_grow() -> None:
    world = world_of(START)
    assert world.apply(["append_batch", [[name, 5] for name in (*RUNNING, "waits", "nobody")]])
    lengths = {name: len(request.tokens) for name, request in world.requests.items()}
    assert lengths == {"waits": 3, "computes": 3, "is ready": 3, "is full": 1, "has begun": 3}


def test_a_request_grows_up_to_its_limit() -> None:
    world = world_of(START)
    assert world.apply(["append", "is ready", [5, 6]])
    assert world.requests["is ready"].tokens == [7, 8, 5]

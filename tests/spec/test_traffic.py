"""What the worlds draw is what is committed: a weaker world is a change that shows."""

from __future__ import annotations

import json

import pytest

from radixkv.spec.harness.subjects import WHATS, What

from .traffic import COMMITTED, NUM_CASES, Traffic, subject_of, traffic_of


@pytest.fixture(scope="module")
def committed() -> dict[What, Traffic]:
    table: dict[What, Traffic] = json.loads(COMMITTED.read_text("utf-8"))
    return table


@pytest.mark.parametrize("what", WHATS)
def test_a_world_draws_what_is_committed(what: What, committed: dict[What, Traffic]) -> None:
    wanted, found = committed[what], traffic_of(subject_of(what), *NUM_CASES[what])
    for part, counts in wanted.items():
        assert found[part] == counts, (
            f"if it is meant: python -m tests.spec.traffic > tests/spec/{COMMITTED.name}"
        )
    assert found.keys() == wanted.keys()


@pytest.mark.parametrize("what", WHATS)
def test_a_world_is_what_its_configuration_says(what: What) -> None:
    subject = subject_of(what)
    config = subject.configure(lambda bound: bound - 1)
    world = subject.world(dict(config))
    assert world.config == config
    assert {operation.word for operation in world.table} <= {each.word for each in subject.table}
    assert world.picture() and world.apply(["drain"])

"""The guards of the specification bite: a planted bug breaks each of them, and none before it.

`test_tier_planted` and `test_handoff_planted` replay the bugs of the other tables.
"""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Final

import pytest

from .guards import COMMITTED, Proof, broken_by, guards, proofs

TABLE: Final[dict[str, list[str]]] = json.loads(COMMITTED.read_text("utf-8"))

MOST_UNBROKEN: Final = 82
"""Guards that no planted bug breaks: other tests break many of them, by hand."""

BY_FILE: Final[defaultdict[str, list[str]]] = defaultdict(list)
for _name, (_table, *_) in TABLE.items():
    if _table == "kills":
        BY_FILE[_name.partition(":")[0]].append(_name)


@pytest.fixture(scope="module")
def by_key() -> dict[tuple[str, ...], list[Proof]]:
    found = defaultdict(list)
    for proof in proofs():
        found[tuple(proof.key)].append(proof)
    return found


@pytest.mark.parametrize("file", BY_FILE)
def test_a_guard_is_broken_by_its_bug(
    file: str, by_key: dict[tuple[str, ...], list[Proof]]
) -> None:
    for name in BY_FILE[file]:
        found = [broken_by(proof) for proof in by_key[tuple(TABLE[name])]]
        assert name in found, "write the table anew: python -m tests.spec.guards"


def test_the_table_has_guards_that_exist_and_most_of_them() -> None:
    names = {guard.name for guard in guards()}
    assert TABLE.keys() <= names, "write the table anew: python -m tests.spec.guards"
    unbroken = len(names - TABLE.keys())
    assert unbroken <= MOST_UNBROKEN, "a guard is new, and no planted bug breaks it"

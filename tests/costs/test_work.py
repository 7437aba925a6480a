"""The work of a call does not depend on what it need not look at; counted, not timed."""

from __future__ import annotations

from functools import cache

import pytest
from _pytest.mark import ParameterSet

from . import engine_bugs
from .all_subjects import BY_NAME, SUBJECTS
from .measure import Work, measured, run, work_of
from .planting import Bug, planted, planted_source
from .subjects import Subject
from .work_bugs import WALKS

PLANTED = [
    (BY_NAME[name], bug) for name, bugs in (WALKS | engine_bugs.WALKS).items() for bug in bugs
]
NUM_BYTES = 1_500
"""Memory that two equal calls may differ by: a table of Python that grows just then."""


def as_parameters(planted: tuple[Subject, Bug]) -> ParameterSet:
    """Return a test's subject and bug; those of nodes take long."""
    is_slow = planted[0].name.startswith("nodes")
    return pytest.param(*planted, marks=[pytest.mark.slow] if is_slow else [])


@cache
def _warm(subject: Subject) -> None:
    run(subject.calls(subject.few))  # what is made at the first call only


def differences(subject: Subject, small: int, large: int) -> dict[str, tuple[list, list]]:
    """Return the calls whose work depends on the number that the subject has.

    The memory is that of all threads. Where it alone differs, because another thread took some at
    that moment, the calls are measured again, and the least counts.
    """
    _warm(subject)
    few = measured(subject.calls(small), work_of)
    many = measured(subject.calls(large), work_of)
    assert few.keys() == many.keys()
    for _ in range(4):
        found = {
            name: (few[name], many[name])
            for name in few
            if not _are_equal(subject, name, few[name], many[name])
        }
        if not found or any(
            [each.ours for each in one] != [each.ours for each in other]
            for one, other in found.values()
        ):
            break
        again = measured(subject.calls(large), work_of)
        many = {
            name: [
                min(pair, key=lambda work: work.peak_bytes)
                for pair in zip(many[name], again[name], strict=True)
            ]
            for name in many
        }
    return found


def _are_equal(subject: Subject, name: str, few: list[Work], many: list[Work]) -> bool:
    if len(few) != len(many):
        return False
    pairs = list(zip(few, many, strict=True))
    if name in subject.grows:
        return all(
            other.total <= 1.5 * one.total and other.peak_bytes <= 8 * one.peak_bytes
            for one, other in pairs
        )
    return all(
        one.ours == other.ours
        and (subject.has_jax or one.total == other.total)
        and other.peak_bytes < one.peak_bytes + NUM_BYTES
        for one, other in pairs
    )


@pytest.mark.parametrize("subject", SUBJECTS, ids=str)
def test_the_work_is_the_same_with_many(subject: Subject) -> None:
    assert differences(subject, subject.few, subject.many) == {}


@pytest.mark.parametrize(("subject", "bug"), [*map(as_parameters, PLANTED)], ids=str)
def test_a_walk_is_found(subject: Subject, bug: Bug) -> None:
    with planted(bug):
        assert differences(subject, subject.few, 16 * subject.few)


def test_every_bug_fits() -> None:
    for _, bug in PLANTED:
        planted_source(bug)
    assert len({bug.name for _, bug in PLANTED}) == len(PLANTED)


def test_work_is_instructions_and_memory() -> None:
    def loop(number: int) -> int:
        return sum(each for each in range(number))

    (first, few), (last, many) = work_of(lambda: loop(10)), work_of(lambda: loop(1_010))
    assert (first, last) == (45, 509_545)
    assert few.ours == many.ours == 0
    assert 3_000 <= many.total - few.total <= 10_000
    _, copied = work_of(lambda: list(range(10_000)))
    assert copied.total < 100 and copied.peak_bytes > 80_000


def test_the_work_is_the_same_when_it_is_counted_again() -> None:
    subject = BY_NAME["the cache with idle blocks"]
    _warm(subject)
    first, second = (measured(subject.calls(subject.few), work_of) for _ in range(2))
    assert {name: [each[:2] for each in works] for name, works in first.items()} == {
        name: [each[:2] for each in works] for name, works in second.items()
    }

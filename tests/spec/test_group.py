"""The ledger of processes that share a model: what it accepts, and which rule else is broken."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from radixkv.spec.model.group import GroupLedger

from .violations import code

CALLS = st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 2)), min_size=1, max_size=6)
"""Calls of process 0, each with the weights that it has then."""


def ledger_of(calls: list[tuple[str, int]], executed: list[int]) -> GroupLedger[str]:
    """Return a ledger whose processes 1, 2, ... have executed these numbers of calls."""
    ledger = GroupLedger[str](range(1, 1 + len(executed)))
    for call, weights in calls:
        ledger.send(call, weights)
    for process, number in enumerate(executed, 1):
        for place, (call, weights) in enumerate(calls[:number], 1):
            used = weights if place % 2 else None  # every other call needs no weights
            ledger.execute(process, place, call, is_damaged=False, weights=used)
    return ledger


@given(CALLS, st.data())
def test_calls_are_executed_in_order_unchanged_with_the_weights_of_their_sending(
    calls: list[tuple[str, int]], data: st.DataObject
) -> None:
    number = data.draw(st.integers(0, len(calls) - 1))
    call, due = calls[number]
    given_number = data.draw(st.integers(0, len(calls)))
    is_damaged = data.draw(st.booleans())
    weights = data.draw(st.none() | st.integers(0, 2))
    ledger = ledger_of(calls, [number])
    found = code(
        lambda: ledger.execute(1, given_number, call, is_damaged=is_damaged, weights=weights)
    )
    if given_number != number + 1:
        assert found == "G1"
    elif is_damaged:
        assert found == "G2"
    else:
        assert found == ("" if weights in (None, due) else "G5")
    assert len(ledger.executed[1]) == number + (not found)


@given(CALLS, st.data())
def test_results_are_used_when_every_process_has_executed_all_calls(
    calls: list[tuple[str, int]], data: st.DataObject
) -> None:
    executed = data.draw(st.lists(st.integers(0, len(calls)), max_size=3))
    ledger = ledger_of(calls, executed)
    assert code(ledger.use) == ("" if all(each == len(calls) for each in executed) else "G3")
    other = GroupLedger[str]([1])
    other.send("a", 0)
    other.execute(1, 1, "b", is_damaged=False, weights=None)
    assert code(other.use) == "G3", "another call"


def test_a_process_ends_only_after_a_fault() -> None:
    ledger = GroupLedger[str]([1])
    assert code(lambda: ledger.end("a reason")) == "G4"
    ledger.is_faulty = True
    assert code(lambda: ledger.end("a reason")) == ""

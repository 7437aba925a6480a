"""Accounts of simulated requests, compared with the set of positions that had KV."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from radixkv.scheduler.replay.simulation.accounting import AnswerLog, ClusterAccounts, NodeAccounts
from radixkv.scheduler.request import FinishReason, Request
from radixkv.scheduler.step_plan import Chunk, StepPlan

NUM_PROMPT, NUM_OUTPUTS = 9, 4


class Naive:
    """A request of a node that keeps which positions had KV, and counts those computed again.

    Attributes:
        cursor: next position that is computed; None while it has no blocks.
        prefill_end: number of its tokens when it was admitted, up to which it does not decode.
    """

    def __init__(self, accounts: NodeAccounts, hits: tuple[int, int, int]) -> None:
        self.accounts, self.now_s = accounts, 0.0
        self.request = Request("a", [1] * NUM_PROMPT, NUM_OUTPUTS)
        self.request.num_hit_tokens, self.request.num_host_hit_tokens = hits[:2]
        self.request.num_storage_hit_tokens = hits[2]
        self.cursor: int | None = None
        self.prefill_end = 0
        self.had_kv: set[int] = set()
        self.recomputed = self.preemptions = 0
        self.first_token_s: float | None = None
        accounts.arrive(self.request, 0.0)

    def step(self, start: int, length: int) -> None:
        """Compute up to length tokens, from start on if the request has just been admitted."""
        self.now_s += 1.0
        last, plan = self.request.num_tokens - 1, StepPlan()
        decodes = self.cursor == last and last >= self.prefill_end
        if self.cursor is None:
            self.cursor, self.prefill_end = min(start, last), self.request.num_tokens
            self.had_kv |= {*range(self.cursor)}
        end = min(self.cursor + length, last + 1)
        if not decodes:  # a decode row computes what was never lost
            plan.add_prefill(Chunk(self.request, self.cursor, end - self.cursor))
            self.recomputed += len(self.had_kv & {*range(self.cursor, end)})
        self.accounts.record_step(plan, self.now_s)
        self.had_kv |= {*range(self.cursor, end)}
        self.cursor = end
        if end == self.request.num_tokens:
            self.first_token_s = self.first_token_s or self.now_s
            self.request.finish_reason = self.request.append(1)

    def preempt(self) -> None:
        """Take its blocks."""
        self.accounts.record_step(StepPlan(preempted=[self.request]), self.now_s)
        self.preemptions += 1
        self.cursor = None


@given(
    hits=st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 2)),
    calls=st.lists(st.none() | st.tuples(st.integers(0, 9), st.integers(1, 5)), max_size=20),
)
@example(hits=(0, 0, 0), calls=[(0, 5), None, (0, 2), None, (0, 5), (0, 5)])
@example(hits=(0, 0, 0), calls=[(0, 4), (0, 5), (0, 1), None, (5, 5), (0, 1), None])
def test_accounts_of_a_request_are_those_of_its_positions(
    hits: tuple[int, int, int], calls: list[tuple[int, int] | None]
) -> None:
    """Whenever it is preempted: also before it has recomputed what it lost before."""
    accounts = NodeAccounts()
    naive, num_hits = Naive(accounts, hits), sum(hits)
    for call in (*calls, *[(0, 5)] * (NUM_PROMPT + NUM_OUTPUTS)):
        if naive.request.finish_reason is not None:
            break
        if call is None:
            naive.preempt()
        else:
            naive.step(call[0] if naive.had_kv else num_hits, call[1])
        assert accounts.recomputed_tokens == naive.recomputed
        assert accounts.preemptions == naive.preemptions
    accounts.finish(naive.request, naive.now_s)
    assert [check.ok for check in accounts.checks(1)] == [True, True], accounts.checks(1)
    assert (accounts.hit_tokens, accounts.host_hit_tokens, accounts.storage_hit_tokens) == hits
    [times] = accounts.answers.times
    assert (times.arrival_s, times.last_token_s) == (0.0, naive.now_s)
    assert times.first_token_s == naive.first_token_s
    assert times.num_outputs == NUM_OUTPUTS
    assert accounts.answers.prompt_tokens == NUM_PROMPT


@pytest.mark.parametrize("num_outputs", [1, 2])
@pytest.mark.parametrize("reason", ["length", "stop", "abort", None])
def test_an_answer_has_its_length_for_its_reason(
    num_outputs: int, reason: FinishReason | None
) -> None:
    log, request = AnswerLog(), Request("a", [1, 2], 2)
    log.arrive(request, 0.0)
    request.output_tokens += [1] * num_outputs
    request.finish_reason = reason
    assert log.finish(request, 1.0, 2.0)
    is_right = num_outputs == 2 and reason == "length"
    assert log.check(1).ok is is_right
    assert (
        log.violations == []
        if is_right
        else [f"request a: {num_outputs} tokens of 2, finish_reason {reason}"]
    )


@pytest.mark.parametrize("again_s", [0.5, 2.0])
def test_a_second_start_is_found_at_any_time(again_s: float) -> None:
    accounts, request = ClusterAccounts(4), Request("a", [1, 2], 2)
    accounts.start(request, 0, 1.0)
    accounts.start(request, 0, again_s)
    assert accounts.answers.violations == ["request a: starts twice"]

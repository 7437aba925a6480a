"""A million random operations with faults, a Hypothesis state machine, and replays."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from radixkv.scheduler.handoff import DECODE_MOVES, PREFILL_MOVES, Commit, DecodeSide, PrefillSide
from radixkv.scheduler.handoff import attempts as attempts_module
from radixkv.scheduler.handoff.prefill_side import ORDERS
from radixkv.scheduler.handoff_simulation import (
    Failure,
    Simulation,
    SimulationConfig,
    check_managers,
    drain_and_check,
    replay,
    run,
    run_random,
    to_json,
)
from radixkv.scheduler.request import GREEDY

from .stepped_simulation import SteppedSimulation

NUM_OPS = 500
PROGRAMS = 250
"""Programs per test; eight tests run a million operations in all, and drain each program."""


PARTS = [0, *(pytest.param(part, marks=pytest.mark.slow) for part in range(1, 8))]


@pytest.mark.parametrize("part", PARTS)
def test_random_programs_with_faults_end_well(part: int) -> None:
    counts: Counter[str] = Counter()
    for seed in range(part * PROGRAMS, (part + 1) * PROGRAMS):
        counts += run_random(seed, NUM_OPS).counts
    assert counts["answers"] > PROGRAMS, "hardly any request succeeds under these faults"
    assert counts["failures"] > PROGRAMS / 4, "hardly any fault matters"
    assert counts["cached tokens"] > 0 and counts["hit tokens"] > 0
    assert counts["preemptions"] > 0 and counts["refusals"] > 0 and counts["resets"] > 0


@pytest.mark.parametrize("most", [1, 2])
def test_programs_with_small_parts_end_well(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    monkeypatch.setattr(attempts_module, "MAX_PART_BLOCKS", most)
    counts = Counter[str]()
    for seed in range(60):
        counts += run_random(seed, NUM_OPS).counts
    assert counts["answers"] > 60


def test_the_programs_use_every_move(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = set()
    for side in (PrefillSide, DecodeSide):
        move = side._move

        def spy(self, attempt, state, move=move):
            seen.add((attempt.state, state))
            move(self, attempt, state)

        monkeypatch.setattr(side, "_move", spy)
    for seed in range(200):
        run_random(seed, 300)
    give_up_while_the_host_is_read()  # random programs hardly ever do so in time
    moves = {*PREFILL_MOVES, *DECODE_MOVES}
    assert moves - seen == set()


def give_up_while_the_host_is_read() -> None:
    simulation = SteppedSimulation(host_blocks=40)
    simulation.submit([1] * 8, 1)
    simulation.finish()
    simulation.apply(["evict", 1, 40])
    simulation.copy()
    simulation.submit([1] * 9, 1)
    node = simulation.nodes["d0"]
    while not (node and node.copies.in_flight):
        simulation.step_p()
        simulation.deliver()
    simulation.apply(["cancel", 0])
    drain_and_check(simulation)


def test_a_run_is_the_same_again() -> None:
    first, again = run_random(7), run_random(7)
    assert (first.counts, first.answers, first.now) == (again.counts, again.answers, again.now)


def test_a_failure_replays_from_json(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_seed(*values):
        return replace(Commit(*values), sampling=GREEDY)

    with monkeypatch.context() as context:
        context.setattr(attempts_module, "Commit", without_seed)
        with pytest.raises(Failure, match=r"\[H3 same-tokens\]") as found:
            for seed in range(100):
                run_random(seed)
        with pytest.raises(Failure) as again:
            replay(found.value.trace)
        assert str(again.value) == str(found.value)
        assert again.value.trace == found.value.trace
    replay(found.value.trace)  # without the bug it passes


def test_every_operation_may_find_nothing() -> None:
    words = [
        "cancel",
        "deliver",
        "duplicate",
        "drop",
        "compute",
        "decode",
        "pull_write",
        "pull_fence",
    ]
    ops: list[list] = [[word, 3] for word in [*words, "offer_fence"]]
    ops += [["new_gateway"], ["pull_end", 0, True, True], ["evict", 1, 2], ["restart", 0]]
    ops += [["copy", 0, True], ["drain", 1]]
    for node in (0, 1):
        ops += [["crash", node], ["crash", node], ["evict", node, 1], ["drain", node], ["tick", 1]]
    simulation = run(SimulationConfig(), ops)
    assert not simulation.answers


WORDS = ["deliver", "deliver", "duplicate", "drop", "cancel"]
WORDS += ["compute", "decode", "pull_write", "pull_fence", "offer_fence"]
index = st.integers(0, 5)
node = st.integers(0, 3)


class HandoffMachine(RuleBasedStateMachine):
    """The operations of the simulation as rules; a failure prints its trace."""

    @initialize(
        sizes=st.fixed_dictionaries(
            {
                "prefill_blocks": st.integers(4, 12),
                "decode_blocks": st.integers(4, 12),
                "host_blocks": st.sampled_from([0, 0, 3]),
                "block_size": st.integers(1, 3),
                "num_groups": st.integers(1, 3),
                "budget": st.integers(1, 6),
                "max_running": st.integers(1, 3),
                "order": st.sampled_from(ORDERS),
                "reserve_tokens": st.sampled_from([0, 2, None]),
                "num_prefill": st.integers(1, 2),
                "num_decode": st.integers(1, 2),
            }
        )
    )
    def start(self, sizes: dict[str, Any]) -> None:
        self.config = SimulationConfig(**sizes)
        self.simulation = Simulation(self.config)
        self.ops: list[list] = []

    def do(self, *op) -> None:
        self.ops.append(list(op))
        try:
            self.simulation.apply(op)
            check_managers(self.simulation)
        except Exception as error:
            error.add_note(to_json(self.config, self.ops))
            raise

    @rule(
        prompt=st.lists(st.integers(1, 2), min_size=1, max_size=8),
        max_new_tokens=st.integers(1, 6),
        seed=st.integers(0, 3),
    )
    def submit(self, prompt: list[int], max_new_tokens: int, seed: int) -> None:
        self.do("submit", prompt, max_new_tokens, seed)

    @rule(
        word=st.sampled_from(WORDS),
        index=index,
        times=st.integers(1, 4),
    )
    def go_on(self, word: str, index: int, times: int) -> None:
        for _ in range(times):
            self.do(word, index)

    @rule(index=index, ok=st.booleans(), fenced=st.booleans())
    def end_pull(self, index: int, ok: bool, fenced: bool) -> None:
        self.do("pull_end", index, ok, fenced)

    @rule(word=st.sampled_from(["crash", "restart", "drain"]), node=node)
    def at_a_node(self, word: str, node: int) -> None:
        self.do(word, node)

    @rule()
    def open_another_gateway(self) -> None:
        self.do("new_gateway")

    @rule(index=index, ok=st.booleans())
    def copy(self, index: int, ok: bool) -> None:
        self.do("copy", index, ok)

    @rule(node=node, num_blocks=st.integers(1, 3))
    def evict(self, node: int, num_blocks: int) -> None:
        self.do("evict", node, num_blocks)

    @rule(ticks=st.integers(1, 6))
    def tick(self, ticks: int) -> None:
        self.do("tick", ticks)

    def teardown(self) -> None:
        if hasattr(self, "simulation"):
            drain_and_check(self.simulation)


TestHandoff = HandoffMachine.TestCase

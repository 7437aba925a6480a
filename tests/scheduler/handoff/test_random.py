"""Random programs with faults, a Hypothesis state machine, and replays."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from radixkv.scheduler import handoff
from radixkv.scheduler.handoff import DECODE_MOVES, PREFILL_MOVES, Commit, DecodeSide, PrefillSide
from radixkv.scheduler.handoff import attempts as attempts_module
from radixkv.scheduler.request import GREEDY
from radixkv.spec.harness.engine import Finding
from radixkv.spec.harness.handoff.draw import OPERATIONS, ORDERS
from radixkv.spec.harness.shrink import shrink
from radixkv.spec.harness.trace_file import TraceFile, read_trace_file
from radixkv.spec.rules.rule import Violation

from .worlds import (
    SteppedWorld,
    below_of,
    is_found_again,
    run_random,
    subject_of,
    world_of,
)

NUM_STEPS = 150
PROGRAMS = 250
"""Programs per test; eight tests run a million operations in all, with those that drain."""


PARTS = [0, *(pytest.param(part, marks=pytest.mark.slow) for part in range(1, 8))]


def run_programs(seeds: range) -> Counter[str]:
    counts: Counter[str] = Counter()
    for seed in seeds:
        run = run_random(handoff, seed, NUM_STEPS)
        assert run.finding is None, f"seed {seed}: {run.finding}"
        counts += run.situations
    return counts


@pytest.mark.parametrize("part", PARTS)
def test_random_programs_with_faults_end_well(part: int) -> None:
    counts = run_programs(range(part * PROGRAMS, (part + 1) * PROGRAMS))
    assert counts["answers"] > 4 * PROGRAMS, "hardly any request succeeds under these faults"
    assert counts["failures"] > PROGRAMS, "hardly any fault matters"
    assert counts["cached tokens"] > 0 and counts["hit tokens"] > 0
    assert counts["preemptions"] > 0 and counts["refusals"] > 0 and counts["resets"] > 0


@pytest.mark.parametrize("most", [1, 2])
def test_programs_with_small_parts_end_well(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    monkeypatch.setattr(attempts_module, "MAX_PART_BLOCKS", most)
    assert run_programs(range(60))["answers"] > 240


def test_the_programs_use_every_move(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = set()
    for side in (PrefillSide, DecodeSide):
        move = side._move

        def spy(self, attempt, state, move=move):
            seen.add((attempt.state, state))
            move(self, attempt, state)

        monkeypatch.setattr(side, "_move", spy)
    run_programs(range(200))
    give_up_while_the_host_is_read()  # random programs hardly ever do so in time
    moves = {*PREFILL_MOVES, *DECODE_MOVES}
    assert moves - seen == set()


def give_up_while_the_host_is_read() -> None:
    world = SteppedWorld(host_blocks=40)
    world.ask([1] * 8, 1)
    world.finish()
    world.apply(["evict", "d0", 40])
    world.copy_all()
    world.ask([1] * 9, 1)
    node = world.nodes["d0"]
    while not (node and node.copies):
        world.step_p()
        world.arrive()
    world.apply(["cancel", "r2"])
    world.apply(["drain"])


def test_a_run_is_the_same_again() -> None:
    assert run_random(handoff, 7, 300) == run_random(handoff, 7, 300)


def test_a_finding_is_shrunk_and_replays_from_its_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def without_seed(*values):
        return replace(Commit(*values), sampling=GREEDY)

    path = tmp_path / "found.trace.json"
    with monkeypatch.context() as context:
        context.setattr(attempts_module, "Commit", without_seed)
        runs = (run_random(handoff, seed, NUM_STEPS) for seed in range(100))
        found = next(run.finding for run in runs if run.finding is not None)
        assert found.rule.endswith("same-tokens")
        finding = shrink(subject_of(handoff), found)
        path.write_text(TraceFile(finding, "handoff").text())
        file = read_trace_file(path)
        assert (file.what, file.finding) == ("handoff", finding)
        assert is_found_again(handoff, file.finding)
    assert not is_found_again(handoff, file.finding), "without the bug it passes"
    words = [operation[0] for operation in finding.trace]
    assert words.count("submit") == 1 and len(words) <= 20, finding.trace


def test_a_trace_without_some_operations_still_applies() -> None:
    """Names do not depend on other requests, so that a trace can be cut anywhere."""
    subject = subject_of(handoff)
    config = subject.configure(below_of(3))
    world = subject.world(config)
    trace: list[list] = []
    for _ in range(200):
        trace.append(world.draw(below_of(len(trace))))
        world.apply(trace[-1])
    assert len({repr(operation) for operation in trace}) > 50
    alone = [each for each in trace if not any(str(word).startswith("r1.") for word in each)]
    world = subject.world(config)
    applied = sum(world.apply(operation) for operation in alone)
    assert applied > len(alone) / 2


def test_every_operation_may_find_nothing() -> None:
    trace: list[list] = [["submit", "r1", [], 1, 0], ["submit", "r1", [1], 0, 0], ["cancel", "r1"]]
    trace += [[word, "x"] for word in ("deliver", "duplicate", "drop", "cut", "compute", "decode")]
    trace += [[word, "x"] for word in ("pull_write", "pull_fence", "offer_fence", "crash")]
    trace += [["compute", "d0"], ["decode", "p0"], ["pull_end", "x", True, True], ["reset", "x"]]
    trace += [["evict", "x", 2], ["restart", "p0"], ["restart", "x"], ["copy", "x", True]]
    world = world_of(handoff)
    assert not any(world.apply(operation) for operation in trace)
    for name in ("p0", "d0"):
        assert world.apply(["crash", name])
        lost = [["crash", name], ["evict", name, 1], ["reset", name], ["compute", name]]
        assert not any(world.apply(operation) for operation in lost)
        assert world.apply(["tick", 1])
    assert world.apply(["drain"]) and not world.model.answers


GOES_ON = ["deliver", "deliver", "duplicate", "drop", "cancel"]
GOES_ON += ["compute", "decode", "pull_write", "pull_fence", "offer_fence"]
INDEX = st.integers(0, 5)


class HandoffMachine(RuleBasedStateMachine):
    """The operations of the table as rules; a failure prints its trace."""

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
                "max_overtaken": st.sampled_from([1, 256]),
            }
        )
    )
    def start(self, sizes: dict[str, Any]) -> None:
        self.world = world_of(handoff, **sizes)
        self.trace: list[list] = []

    def do(self, word: str, *arguments: Any) -> None:
        self.trace.append([word, *arguments])
        try:
            self.world.apply(self.trace[-1])
            self.world.check_caches()
        except Violation as violation:
            found = Finding(violation.rule.name, violation.why, self.world.config, self.trace)
            violation.add_note(TraceFile(found, "handoff").text())
            raise

    def do_to_one(self, word: str, index: int, *arguments: Any) -> None:
        names = OPERATIONS[word].names
        if names is not None and (choices := names(self.world)):
            self.do(word, choices[index % len(choices)], *arguments)

    @rule(
        prompt=st.lists(st.integers(1, 2), min_size=1, max_size=8),
        max_new_tokens=st.integers(1, 6),
        seed=st.integers(0, 3),
    )
    def submit(self, prompt: list[int], max_new_tokens: int, seed: int) -> None:
        self.do_to_one("submit", 0, prompt, max_new_tokens, seed)

    @rule(word=st.sampled_from(GOES_ON), index=INDEX, times=st.integers(1, 4))
    def go_on(self, word: str, index: int, times: int) -> None:
        for _ in range(times):
            self.do_to_one(word, index)

    @rule(index=INDEX, ok=st.booleans(), fenced=st.booleans())
    def end_pull(self, index: int, ok: bool, fenced: bool) -> None:
        self.do_to_one("pull_end", index, ok, fenced)

    @rule(word=st.sampled_from(["crash", "restart", "reset", "cut"]), index=INDEX)
    def at_a_node(self, word: str, index: int) -> None:
        self.do_to_one(word, index)

    @rule()
    def open_another_gateway(self) -> None:
        self.do("new_gateway")

    @rule(index=INDEX, ok=st.booleans())
    def copy(self, index: int, ok: bool) -> None:
        self.do_to_one("copy", index, ok)

    @rule(index=INDEX, num_blocks=st.integers(1, 3))
    def evict(self, index: int, num_blocks: int) -> None:
        self.do_to_one("evict", index, num_blocks)

    @rule(ticks=st.integers(1, 6))
    def tick(self, ticks: int) -> None:
        self.do("tick", ticks)

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.do("drain")


TestHandoff = HandoffMachine.TestCase

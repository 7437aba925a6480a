"""Random programs with faults, a Hypothesis state machine, and replays."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis.stateful import invariant

from radixkv.scheduler import handoff
from radixkv.scheduler.fuzz import targets
from radixkv.scheduler.handoff import (
    DECODE_MOVES,
    PREFILL_MOVES,
    Commit,
    DecodeSide,
    PrefillSide,
    part_cut,
)
from radixkv.scheduler.handoff import attempts as attempts_module
from radixkv.scheduler.request import GREEDY
from radixkv.spec.harness.engine import Below, Config
from radixkv.spec.harness.findings.shrink import shrink
from radixkv.spec.harness.findings.trace_file import TraceFile, read_trace_file
from radixkv.spec.harness.handoff import world as world_module
from radixkv.spec.harness.handoff.configuration import draw_config
from radixkv.spec.harness.handoff.drain import fair_round
from radixkv.spec.harness.machine import HandoffMachine
from radixkv.spec.rules.handoff import X16

from ...profiles import scaled
from .worlds import (
    SteppedWorld,
    below_of,
    is_found_again,
    run_random,
    subject_of,
    world_of,
)

NUM_STEPS = 150
PROGRAMS = 100
"""The same programs in each run; `kvspec.toml` has new ones for each commit, and many more."""


def run_programs(seeds: range) -> Counter[str]:
    counts: Counter[str] = Counter()
    for seed in seeds:
        run = run_random(handoff, seed, NUM_STEPS)
        assert run.finding is None, f"seed {seed}: {run.finding}"
        counts += run.situations
    return counts


def test_random_programs_with_faults_end_well(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = set()
    for side in (PrefillSide, DecodeSide):
        move = side._move

        def spy(self, attempt, state, move=move):
            seen.add((attempt.state, state))
            move(self, attempt, state)

        monkeypatch.setattr(side, "_move", spy)
    counts = run_programs(range(PROGRAMS))
    assert counts["answered"] > 4 * PROGRAMS, "hardly any request succeeds under these faults"
    assert counts["failed"] > PROGRAMS, "hardly any fault matters"
    assert counts["token cached on D"] > 0 and counts["token hit on P"] > 0
    assert counts["preempted"] > 0 and counts["busy"] > 0 and counts["reset"] > 0
    give_up_while_the_host_is_read()  # random programs hardly ever do so in time
    give_up_while_parts_are_served()
    give_up_before_the_first_part()
    moves = {*PREFILL_MOVES, *DECODE_MOVES}
    assert moves - seen == set()


@pytest.mark.parametrize("most", [1, 2])
def test_programs_with_small_parts_end_well(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """Of so few blocks, only those of the same size end together."""

    def draw_equal(below: Below) -> Config:
        return {
            key: value for key, value in draw_config(below).items() if key != "decode_block_size"
        }

    monkeypatch.setattr(part_cut, "MAX_PART_BLOCKS", most)
    monkeypatch.setattr(world_module, "draw_config", draw_equal)
    assert run_programs(range(40))["answered"] > 160


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


def give_up_while_parts_are_served() -> None:
    world = SteppedWorld()
    world.ask([1] * 24, 1)
    world.step_p()
    world.arrive()
    while not world.transfers:
        world.step_p()
        world.arrive()
    world.apply(["cancel", "r1"])
    world.apply(["drain"])


def give_up_before_the_first_part() -> None:
    world = SteppedWorld()
    world.ask([1] * 24, 1)
    world.step_p()
    world.arrive()
    world.apply(["cancel", "r1"])
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
        runs = (run_random(handoff, seed, NUM_STEPS) for seed in range(100, 200))
        findings = (run.finding for run in runs if run.finding is not None)
        found = next(each for each in findings if each.rule == X16.name)  # others: X26
        finding = shrink(subject_of(handoff), found)
        path.write_text(TraceFile(finding, "handoff").text())
        file = read_trace_file(path)
        assert (file.what, file.finding) == ("handoff", finding)
        assert is_found_again(handoff, file.finding)
    assert not is_found_again(handoff, file.finding), "without the bug it passes"
    words = [operation[0] for operation in finding.trace]
    num_requests = words.count("submit") + words.count("interrupt")
    assert num_requests == 1 and len(words) <= 20, finding.trace


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
    trace += [["hold", "x"], ["release", "x"], ["hang", "x"], ["reboot", "x"], ["leave", "p0"]]
    trace += [["flood", "f1", [1], 1], ["probe", "r1", [], 1, 0], ["probe", "r1", [1], 0, 0]]
    trace += [["probe", "r1", [1] * 99, 1, 0]]
    trace += [["evict", "x", 2], ["restart", "p0"], ["restart", "x"], ["copy", "x", True]]
    world = world_of(handoff)
    assert not any(world.apply(operation) for operation in trace)
    for name in ("p0", "d0"):
        assert world.apply(["crash", name])
        lost: list[list] = [["crash", name], ["evict", name, 1], ["reset", name], ["compute", name]]
        assert not any(world.apply(operation) for operation in lost)
        assert world.apply(["tick", 1])
    assert world.apply(["drain"]) and not world.model.answers


@scaled(40, 60)
class TestHandoff(HandoffMachine):
    make = targets.handoff

    @invariant()
    def caches_are_consistent(self) -> None:
        if self.trace:
            self.world.check_caches()


def test_a_node_that_has_left_does_not_come_back() -> None:
    world = world_of(handoff, num_prefill=2)
    world.apply(["submit", "r1", [1, 2, 3], 3, 1])
    assert world.apply(["leave", "p0"])
    assert not world.apply(["restart", "p0"]) and not world.apply(["leave", "p1"])
    assert world.apply(["drain"])
    assert world.nodes["p0"] is None and world.model.answers["r1"].tokens is not None


def test_a_pull_that_hangs_ends_when_d_cancels_it() -> None:
    world = world_of(handoff, num_groups=1)
    world.apply(["submit", "r1", [1, 2, 3], 3, 1])
    while not world.transfers:
        for operation in fair_round(world):
            world.apply(operation)
            if world.transfers:
                break
    name = world.transfers[0].name
    assert world.apply(["hang", name]) and not world.apply(["hang", name])
    assert world.apply(["pull_write", name])
    assert not world.apply(["pull_end", name, True, True])
    assert not world.apply(["pull_fence", name])
    world.apply(["drain"])
    assert world.model.answers["r1"].tokens is not None and world.situations["attempt"] == 2


def test_a_held_copy_arrives_when_it_is_released() -> None:
    world = world_of(handoff)
    world.apply(["submit", "r1", [1, 2, 3], 3, 1])
    [first] = [each for each in world.network if not each.is_status]
    world.apply(["hold", first.name])
    world.apply(["deliver", first.name])
    [copy] = [each for each in world.network if each.is_held]
    world.apply(["release", copy.name])
    assert not copy.is_held and world.apply(["deliver", copy.name])
    assert world.apply(["drain"]) and world.situations["attempt"] == 1


def test_a_flood_and_a_probe_end_well() -> None:
    world = world_of(handoff, max_overtaken=1, decode_blocks=6)
    for number in (1, 2, 3):
        world.apply(["submit", f"r{number}", [number] * 9, 3, 1])
    assert world.apply(["flood", "f4", [1], 1])
    assert {"r1", "r2", "r3"} <= set(world.model.answers)
    for lost in range(12):
        assert world.apply(["probe", f"r{100 + lost}", [1, lost], 2, lost])
    assert world.situations["probed"] == 12

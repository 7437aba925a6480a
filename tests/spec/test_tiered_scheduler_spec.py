"""The specification of a scheduler over tiers: ours keeps to it, and bugs of the seam are found."""

from __future__ import annotations

import json
from collections import Counter
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

import pytest

from radixkv.spec.adapters.cache import AdapterError
from radixkv.spec.adapters.tiers import Copy
from radixkv.spec.harness.engine import Below, Config, Operation, Trace, replay
from radixkv.spec.harness.findings.shrink import shrink
from radixkv.spec.harness.random_engine import run
from radixkv.spec.harness.scheduler.copies import Copies
from radixkv.spec.harness.scheduler.world import SchedulerSubject
from radixkv.spec.harness.tiers.executor import Flight
from radixkv.spec.model.ghost import POISON, GhostMemory

from .designs.schedulers import ChunkWise
from .floors import TIERED_SCHEDULER_FLOORS, too_rare
from .planted.plant import Bug, bug
from .planted.plant_scheduler import load_scheduler, subject_with, tiered_subject
from .planted.tiered_scheduler_bugs import TIERED_SCHEDULER_BUGS

NUM_STEPS = 20_000


def submit(name: str, prompt: list[int], max_new_tokens: int) -> Operation:
    return ["submit", name, prompt, max_new_tokens, 0, [], 0]


def config(**sizes: object) -> Config:
    return {
        "policy": "fcfs", "reserve_tokens": 0, "prefix_cache": True, "alphabet": 2, "storage": 0,
        "write": "back", "preempt": "host", "late": 0, **sizes,
    }  # fmt: skip


def test_our_scheduler_over_tiers_keeps_to_every_rule() -> None:
    result = run(tiered_subject(), seed=0, num_steps=5_000)
    assert result.finding is None, result.finding


@pytest.mark.nightly
def test_the_generator_meets_every_situation() -> None:
    result = run(tiered_subject(), seed=2, num_steps=30_000)
    assert result.finding is None, result.finding
    rare = too_rare(result.situations, TIERED_SCHEDULER_FLOORS, result.num_steps)
    assert not rare, "the generator does not come to these any more"


QUICK = ("storage is not told of new weights", "a reset forgets the parked requests",
         "an aborted request counts as ahead in the prefetches",
         "a decode step waits for blocks while any copy is in flight")  # fmt: skip
"""Bugs that a scheduler without tiers, and tiers without a scheduler, do not show."""


@pytest.mark.parametrize("name", QUICK)
def test_a_bug_of_the_seam_is_found_and_replayed(name: str) -> None:
    [planted] = [each for each in TIERED_SCHEDULER_BUGS if each.name == name]
    found = run(subject_with(planted), seed=0, num_steps=NUM_STEPS).finding
    assert found is not None
    shown = json.loads(json.dumps(found.to_json()))
    violation = replay(subject_with(planted), shown["config"], shown["trace"])
    assert violation is not None and violation.rule.name == found.rule
    # The same program on a scheduler without the bug is right.
    assert replay(tiered_subject(), shown["config"], shown["trace"]) is None


@pytest.mark.nightly
@pytest.mark.parametrize("planted", TIERED_SCHEDULER_BUGS, ids=lambda planted: planted.name)
def test_a_planted_bug_is_found_and_shrunk(planted: Bug) -> None:
    subject = subject_with(planted)
    found = run(subject, seed=0, num_steps=NUM_STEPS).finding
    assert found is not None
    small = shrink(subject, found)
    assert len(small.trace) <= 30


def test_an_adapter_without_tiers_is_refused() -> None:
    subject = SchedulerSubject(ChunkWise, has_tiers=True)
    config = tiered_subject().configure(lambda bound: 0)
    with pytest.raises(AdapterError, match=r"ChunkWise has no method take; it needs take\(\)"):
        subject.world(config)


def test_operations_that_name_nothing_are_skipped() -> None:
    world = tiered_subject().world(tiered_subject().configure(lambda bound: 0))
    for operation in (["copy", "out1", [], 1], ["elsewhere", "r1", 2]):
        assert not world.apply(operation)
    assert world.apply(["reset", [], 1]) and world.apply(["drain"])


LOADED_FREES_NOTHING = bug(
    "preempting a loaded request seems to free nothing",
    "reservation.py",
    (
        "            self.add(request, lease.num_blocks, lease.num_blocks - lease.",
        "            frees = 0 if lease.num_promoted_blocks else 1\n"
        "            self.add(request, lease.num_blocks, frees * lease.num_blocks - frees * lease.",
    ),
)
"""The random engine takes up to 40,000 steps to it, so its trace is kept."""


def test_private_blocks_of_a_loaded_request_count_for_an_admission() -> None:
    package = load_scheduler(LOADED_FREES_NOTHING)
    sizes = config(
        num_blocks=7, block_size=3, max_running=2, token_budget=2, host_blocks=1, alphabet=1,
        policy="priority", write="exclusive", preempt="recompute",
    )  # fmt: skip
    trace = [
        submit("r1", [0, 0, 0, 0, 0, 0], 11),
        submit("r2", [1], 7),
        submit("r3", [0, 0, 1], 1),
        submit("r4", [0, 0, 0], 11),
        ["drain"],
    ]
    violation = replay(tiered_subject(package), sizes, trace)
    assert violation is not None and violation.rule.name == "Q7 admit-what-fits", violation
    assert replay(tiered_subject(), sizes, trace) is None


def test_a_prompt_that_was_loaded_as_a_whole_is_shared_as_a_whole() -> None:
    """Its last token is computed again, and the block of that token is published all the same."""
    sizes = config(num_blocks=7, block_size=2, max_running=3, token_budget=9, host_blocks=1)
    trace: Trace = [
        submit("r1", [0], 2),
        submit("r2", [2], 4),
        submit("r3", [0, 0, 0, 0], 6),
        *[["step"]] * 6,
        ["copy", "out1", [], 0],
        submit("r4", [0, 2], 1),
        ["step"],
        submit("r5", [0, 0, 0, 0, 0, 0], 8),
        ["copy", "in1", [], 1],
        ["step"],
    ]
    world = tiered_subject().world({**sizes, "policy": "priority", "alphabet": 3})
    for operation in trace:
        assert world.apply(operation)
    assert "r5 waiting" in world.picture()


def test_storage_need_not_be_asked_for_a_prompt_that_was_cached_when_its_turn_came() -> None:
    """A prefetch was put off; at the second try the device had all blocks; it lost them later."""
    sizes = config(
        num_blocks=5, block_size=2, max_running=2, token_budget=3, host_blocks=5, storage=1,
        reserve_tokens=None, late=1,
    )  # fmt: skip
    trace: Trace = [
        submit("r1", [0], 10),
        *[["step"]] * 4,
        submit("r2", [0, 0, 0, 0], 1),
        *[["step"]] * 3,
        submit("r3", [0, 1, 0, 0, 0], 3),
        ["step"],
        ["copy", "lookup2", [], 1],
        submit("r4", [1, 0, 0, 0], 4),
        submit("r5", [0, 1, 0, 0], 4),
        *[["step"]] * 5,
        ["copy", "lookup2", [], 0],
        *[["step"]] * 6,
    ]
    world = tiered_subject().world(sizes)
    for operation in trace:
        assert world.apply(operation)
    assert "r5 running, 4/5 computed" in world.picture()


RECEIVED_BLOCKS_SEEM_FREE = bug(
    "a decode node waits for blocks that requests being received hold",
    "batching/preemption.py",
    ("(*self._queues.running, *self._others())", "self._queues.running"),
)
"""The random engine takes 6,000 steps of a decode node that runs several requests to it."""


def test_a_decode_node_waits_for_no_block_of_a_request_that_it_receives() -> None:
    sizes = config(
        num_blocks=10, block_size=1, max_running=3, token_budget=8, host_blocks=6, alphabet=1,
        write="through", late=1, decode=1,
    )  # fmt: skip
    trace: Trace = [
        submit("r1", [1, 1, 1], 8),
        submit("r2", [1, 1], 9),
        submit("r3", [1, 1, 1, 1, 0, 0], 3),
        ["step"],
        submit("r4", [1, 1, 1], 3),
        ["reset", [], 0],
        submit("r5", [1, 1, 1, 0], 1),
        ["step"],
        ["step"],
        ["drain"],
    ]
    package = load_scheduler(RECEIVED_BLOCKS_SEEM_FREE)
    violation = replay(tiered_subject(package), sizes, trace)
    assert violation is not None and violation.rule.name.startswith("Q18 "), violation
    assert replay(tiered_subject(), sizes, trace) is None


PARKED_OUTLIVE_A_RESET = bug(
    "a decode node's reset keeps what is parked",
    "decode.py",
    (
        "        self._batch.reset_cache(keep, weights_revision)\n",
        "        parked = {each: each.parked for each in self._queues.preempted}\n"
        "        for request in parked:\n            request.parked = None\n"
        "        self._batch.reset_cache(keep, weights_revision)\n"
        "        for request in parked:\n            request.parked = parked[request]\n",
    ),
)
"""The random engine takes 1,300 steps of a decode node to it, of which one world in six has one."""


def test_a_reset_of_a_decode_node_drops_what_is_parked() -> None:
    sizes = config(
        num_blocks=4, block_size=3, max_running=2, token_budget=3, policy="priority",
        host_blocks=3, write="through", storage=1, preempt="storage", late=1, decode=1,
    )  # fmt: skip
    trace: Trace = [
        submit("r1", [0, 0], 6), submit("r2", [0], 6), *[["step"]] * 5, ["reset", [], 0],
    ]  # fmt: skip
    violation = replay(tiered_subject(load_scheduler(PARKED_OUTLIVE_A_RESET)), sizes, trace)
    assert violation is not None and violation.rule.name.startswith("Q33 "), violation
    assert replay(tiered_subject(), sizes, trace) is None


def test_a_decode_node_keeps_to_every_rule() -> None:
    class DecodeSubject(SchedulerSubject):
        def configure(self, below: Below) -> Config:
            return {**super().configure(below), "decode": 1}

    subject = DecodeSubject(tiered_subject().factory, has_tiers=True)
    result = run(subject, seed=0, num_steps=3_000)
    assert result.finding is None, result.finding
    assert result.situations["received after a load"]


@pytest.mark.parametrize("first_block", [4, 5])
@pytest.mark.parametrize("is_loading", [True, False])
@pytest.mark.parametrize("owner", ["r1", "r2", ""])
def test_a_load_counts_for_a_request_that_waits_for_it_in_these_blocks(
    owner: str, is_loading: bool, first_block: int
) -> None:
    """A request that was preempted meanwhile has other blocks."""
    request: Any = SimpleNamespace(name="r1", is_loading=is_loading)
    model: Any = SimpleNamespace(
        live={"r1": request}, tables={"r1": [4, 6]}, device=GhostMemory(1)
    )  # fmt: skip
    copies = Copies(Mock(), model, has_storage=False)
    flight = Flight(Copy(1, "in", (7, 8), (first_block, 6), ()), [[1], [2]], owner=owner)
    is_due = owner == "r1" and is_loading and first_block == 4
    assert copies._loaded_by(flight) is (request if is_due else None)


def test_a_copy_of_a_scheduler_writes_garbage_until_its_fence() -> None:
    model: Any = SimpleNamespace(live={}, situations=Counter(), device=GhostMemory(1))
    target = Mock(take_cancelled=Mock(return_value=[]))
    copies = Copies(target, model, has_storage=False)
    model.device.append([1, 2], 0, 21)
    model.device.append([1, 2], 1, 22)
    [flight] = copies.executor.begin([Copy(3, "out", (1, 2), (5, 6), ())])
    copies.end(flight, [1], False)
    assert [copies.executor.content("host", block) for block in (5, 6)] == [[21], [POISON]]
    copies.executor._put("host", 6, [9])
    copies.end(flight, [], True)  # it has its result, so this is the fence
    assert [copies.executor.content("host", block) for block in (5, 6)] == [[21], [POISON]]
    assert target.mock_calls[-1] == call.fence(3) and not copies.executor.flights
    assert call.complete(3, [True, False], False) in target.mock_calls


@pytest.mark.parametrize("storage", [0, 1])
@pytest.mark.parametrize("decode", [0, 1])
def test_only_who_computes_prompts_must_ask_storage_for_them(decode: int, storage: int) -> None:
    sizes = config(num_blocks=4, block_size=1, max_running=2, token_budget=3, host_blocks=3)
    world = tiered_subject().world({**sizes, "decode": decode, "storage": storage})
    assert world.copies is not None and world.is_decode_node == bool(decode)
    assert world.copies.has_storage == (storage and not decode)
    assert world.apply(submit("r1", [0, 1], 1))
    assert world.copies.unasked == ({"r1"} if storage and not decode else set())

"""The model of a scheduler, driven by hand: what a decision and a state may not say."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from radixkv.spec.model.scheduler import Limits, Request, SchedulerModel, Step, root_tag
from radixkv.spec.model.scheduler_policies import (
    check_asked,
    check_overtaken,
    led_blocks,
    next_block,
    reserve,
)

from .violations import code

LIMITS = Limits(
    num_blocks=8, block_size=2, token_budget=6, max_running=2, reserve_tokens=0,
    prefix_cache=True, promised=(),
)  # fmt: skip


def request(name: str, prompt: list[int], more: int = 3, order: int = 0) -> Request:
    return Request(name, prompt, more, (order,), root_tag(0), alphabet=3)


def model_of(*requests: Request, **limits: Any) -> SchedulerModel:
    """A model in which some requests wait."""
    model = SchedulerModel(replace(LIMITS, **limits))
    for each in requests:
        model.submit(each, accepted=True)
    return model


def admits(model: SchedulerModel, *chunks: tuple[str, int, int], **changed: Any) -> Step:
    """A decision that admits the requests of some chunks, without hits, into own blocks."""
    names = [name for name, _, _ in chunks]
    admitted = [model.live[name] for name in dict.fromkeys(names)]
    tables = {
        each.name: [4 * place + block for block in range(model.blocks_for(len(each.tokens)))]
        for place, each in enumerate(admitted)
    }
    none = dict.fromkeys(tables, 0)
    planned = [(model.live[name], start, length) for name, start, length in chunks]
    step = Step(planned, admitted, tables, admitted, [], none, none, available=8, left=4)
    for name, value in changed.items():
        setattr(step, name, value)
    return step


@pytest.mark.parametrize(
    ("chunks", "changed", "rule"),
    [
        ([("r1", 0, 3)], {}, ""),
        ([("r1", 0, 2)], {}, ""),
        ([("r1", 0, 2), ("r2", 0, 4)], {}, ""),
        ([], {}, "Q14"),
        ([], {"num_copies": 1}, ""),  # it waits for a copy
        ([("r1", 0, 3), ("r2", 0, 4)], {}, "Q15"),
        ([("r1", 0, 1), ("r2", 0, 1), ("r3", 0, 1)], {}, "Q16"),
        ([("r1", 0, 1), ("r1", 1, 1)], {}, "Q19"),  # two chunks
        ([("r1", 0, 4)], {}, "Q19"),  # more than there is
        ([("r1", 1, 1)], {}, "Q19"),  # a gap
        ([("r1", 0, 0)], {}, "Q19"),
        ([("r1", 0, 3)], {"tables": {"r1": [0]}}, "Q20"),
        ([("r1", 0, 3)], {"tables": {"r1": [1, 1]}}, "Q20"),
        ([("r1", 0, 3)], {"begun": {"r1": 2}}, "Q10"),
        ([("r1", 2, 1)], {"begun": {"r1": 2}, "hits": {"r1": 2}}, ""),
        ([("r1", 2, 1)], {"begun": {"r1": 1}, "hits": {"r1": 1}}, "Q10"),
        ([("r1", 0, 3)], {"begun": {}}, "Q19"),  # it waits for its copies
        ([("r1", 0, 3)], {"admitted": [], "begun": {}}, "Q2"),  # it waits for blocks
    ],
)  # fmt: skip
def test_what_a_decision_may_say(
    chunks: list[tuple[str, int, int]], changed: dict[str, Any], rule: str
) -> None:
    model = model_of(request("r1", [0, 1, 2]), request("r2", [1] * 4), request("r3", [2] * 2))
    assert code(model.decide, admits(model, *chunks, **changed)) == rule


@pytest.mark.parametrize(
    ("running", "waiting", "computed", "available", "rule"),
    [
        (["r1"], ["r2"], 2, 6, ""),
        (["r1", "r2"], [], 2, 6, "Q2"),
        (["r1"], [], 2, 6, "Q2"),
        (["r1"], ["r2", "r2"], 2, 6, "Q2"),
        (["r1"], ["r2"], 1, 6, "Q19"),
        (["r1"], ["r2"], 2, 7, "Q36"),
        (["r1"], ["r2"], 2, 5, "Q36"),
    ],
)
def test_what_a_state_may_say(
    running: list[str], waiting: list[str], computed: int, available: int, rule: str
) -> None:
    first, second = request("r1", [0, 1, 2]), request("r2", [1])
    model = model_of(first, second, promised=("exact",))
    step = admits(model, ("r1", 0, 2))
    for act in (model.decide, model.launch, model.compute):
        act(step)
    model.complete(step, [])
    tables = {"r1": [0, 1], "r2": []}
    state: tuple[Any, ...] = running, waiting, tables, {"r1": computed, "r2": 0}, available, {}
    assert code(model.settle, *state) == rule


def test_a_request_reads_through_blocks_that_it_has() -> None:
    model = model_of(request("r1", [0, 1, 2]))
    first = model.live["r1"]
    for position in range(3):
        model.device.append([5, 6], position, first.tags[position])
    for end, table in product(range(4), ([5, 6], [5], [])):
        due = "" if 2 * len(table) >= end else "Q20"
        assert code(model.read, first, table, end, "now") == due
    assert code(model.read, first, [6, 5], 3, "now") == "Q22"


@pytest.mark.parametrize("num_more", range(1, 15))
def test_a_request_is_refused_if_it_can_never_fit(num_more: int) -> None:
    """The KV of the last token is never written."""
    for accepted in (True, False):
        model = SchedulerModel(LIMITS)
        fits = 3 + num_more - 1 <= 16
        each = request("r1", [0, 1, 2], num_more)
        assert code(model.submit, each, accepted) == ("" if fits == accepted else "Q1")


def test_a_leader_computes_its_next_block() -> None:
    leader, other = request("r1", [0, 1, 2, 0, 1]), request("r2", [0, 1, 2, 0, 2])
    model = model_of(leader, other, promised=("leaders",))
    for computed, block in ((0, 1), (1, 1), (2, 3), (3, 3), (4, None)):
        leader.computed, leader.target = computed, 5
        due = leader.tags[block] if block else None
        assert next_block(model, leader) == due
        assert led_blocks(model, other, [leader]) == ({due} - {None})
    leader.computed, leader.target = 2, 2  # it decodes
    assert next_block(model, leader) is None
    for limits in ({"prefix_cache": False}, {"promised": ()}):
        model = model_of(request("r1", [0, 1, 2]), **{"promised": ("leaders",), **limits})
        model.live["r1"].target = 3
        assert next_block(model, model.live["r1"]) is None


@pytest.mark.parametrize("horizon", [None, 0, 1, 2, 3, 4])
def test_what_must_be_left_for_running_requests(horizon: int | None) -> None:
    """Each may grow within the horizon; and one can run to its end if the others are preempted."""
    one, two = request("r1", [0, 1, 2], 7), request("r2", [1, 1], 2)
    model = model_of(one, two, reserve_tokens=horizon)
    model.tables = {"r1": [0, 1], "r2": [4]}
    one.phase = two.phase = "running"
    one.computed, two.computed = 2, 0
    growth, lack = reserve(model, [one, two])
    tokens = 9 if horizon is None else min(9, 3 + horizon)
    both = -(-tokens // 2) - 2 + (horizon != 0)
    # The first one shares a block of five; each of them has a private one.
    assert (growth, lack) == (both, 4 - 2)
    two.phase = "waiting"
    assert reserve(model, [one, two])[1] == 4 - 1


@pytest.mark.parametrize(
    ("host_blocks", "is_ahead", "rule"),
    [(3, True, ""), (4, True, "Q12"), (5, True, "Q12"), (1, False, "Q12")],
)
def test_storage_is_not_asked_while_others_fill_the_host(
    host_blocks: int, is_ahead: bool, rule: str
) -> None:
    """Two prompts of two blocks want four."""
    model = model_of(request("r1", [0] * 4), request("r2", [1] * 4), host_blocks=host_blocks)
    unbegun = [model.live["r2"]]
    if is_ahead:
        unbegun.insert(0, model.live["r1"])
    step = admits(model, ("r2", 0, 4), unasked={"r2"}, unbegun=unbegun)
    assert code(check_asked, model, step) == rule


@pytest.mark.parametrize(
    ("ended", "rule"),
    [(["r1"], ""), ([], "Q28"), (["r1", "r1"], "Q28"), (["r1", "r2"], "Q28"), (["r2"], "Q28")],
)
def test_the_end_of_a_request_is_told_once(ended: list[str], rule: str) -> None:
    model = model_of(request("r1", [0, 1], more=1), request("r2", [1] * 4))
    step = admits(model, ("r1", 0, 2), ("r2", 0, 4))
    model.decide(step)
    model.launch(step)
    model.compute(step)
    assert code(model.complete, step, ended) == rule


@pytest.mark.parametrize("most", [0, 1, 2, 3])
def test_overtaking_is_counted_from_the_last_time_that_a_request_began_to_wait(most: int) -> None:
    """It is overtaken by two, admitted, preempted, and overtaken by two others."""
    requests = [request(f"r{number}", [0, 1], order=number) for number in range(5)]
    model = model_of(*requests, max_overtaken=most)
    first, *later = requests
    found = []
    for admitted in (later[:2], [first], later[2:]):
        first.phase = "waiting"
        for each in admitted:
            each.phase = "running"
        step = admits(model, admitted=admitted)
        found.append(code(check_overtaken, model, step))
    assert found == ["Q6" if most < 2 else "", "", "Q6" if most < 2 else ""]


@pytest.mark.parametrize(("available", "rule"), [(5, ""), (6, "Q23")])
def test_a_step_in_flight_uses_the_blocks_of_its_decision(available: int, rule: str) -> None:
    """A request that gets another block meanwhile gives the old one back after the step."""
    model = model_of(request("r1", [0, 1, 2]), promised=("keeps_in_flight",))
    step = admits(model, ("r1", 0, 3))
    model.decide(step)
    model.launch(step)
    state: tuple[Any, ...] = ["r1"], [], {"r1": [2, 1]}, {"r1": 0}, available, {}
    assert code(model.settle, *state) == rule
    assert (step.tables, model.tables) == ({"r1": [0, 1]}, {"r1": [2, 1]})

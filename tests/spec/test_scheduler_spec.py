"""The specification of schedulers: ours keeps to it, and every rule bites."""

from __future__ import annotations

import json
import random
import re
from itertools import permutations
from types import SimpleNamespace
from typing import Any

import pytest

from radixkv import scheduler as own_scheduler
from radixkv.scheduler.fuzz.scheduler_adapter import MixedAdapter, make_factory
from radixkv.spec.adapters.cache import AdapterError
from radixkv.spec.adapters.scheduler import SchedulerPromises
from radixkv.spec.harness import hypothesis_engine
from radixkv.spec.harness.engine import Trace, replay
from radixkv.spec.harness.findings.shrink import shrink
from radixkv.spec.harness.random_engine import run
from radixkv.spec.harness.scheduler.configuration import draw_prompt
from radixkv.spec.harness.scheduler.counts import Books
from radixkv.spec.harness.scheduler.differential import WAYS, check_same, draw_requests
from radixkv.spec.harness.scheduler.world import SchedulerSubject
from radixkv.spec.model import scheduler_policies
from radixkv.spec.model.scheduler import next_token, root_tag
from radixkv.spec.rules.rule import Violation, not_judging

from .floors import SCHEDULER_FLOORS, too_rare
from .planted.plant import Bug, bug
from .planted.plant_scheduler import load_scheduler, subject_with
from .planted.scheduler_bugs import SCHEDULER_BUGS

NUM_STEPS = 60_000
"""Far more than any bug takes; half as many are enough for any situation."""

CONFIG = {
    "num_blocks": 6,
    "block_size": 2,
    "max_running": 3,
    "token_budget": 8,
    "policy": "fcfs",
    "reserve_tokens": 0,
    "prefix_cache": True,
    "alphabet": 3,
}


def submit(name: str, prompt: list[int], max_new_tokens: int = 1) -> list[object]:
    return ["submit", name, prompt, max_new_tokens, 0, [], 0]


def test_our_scheduler_keeps_to_every_rule_and_meets_every_situation():
    result = run(SchedulerSubject(make_factory()), seed=0, num_steps=NUM_STEPS // 2)
    assert result.finding is None, result.finding
    assert set(result.situations) == set(SCHEDULER_FLOORS), "a situation has no floor"
    rare = too_rare(result.situations, SCHEDULER_FLOORS, result.num_steps)
    assert not rare, "the generator does not come to these any more"


def test_hypothesis_draws_from_the_same_table():
    result = hypothesis_engine.run(SchedulerSubject(make_factory()), seed=0, num_steps=2_000)
    assert result.finding is None, result.finding
    found = hypothesis_engine.run(subject_with(SCHEDULER_BUGS[0]), seed=0, num_steps=NUM_STEPS)
    assert found.finding is not None


@pytest.mark.nightly
@pytest.mark.parametrize("planted", SCHEDULER_BUGS, ids=lambda planted: planted.name)
def test_a_planted_bug_is_found_and_shrunk(planted: Bug):
    subject = subject_with(planted)
    found = run(subject, seed=0, num_steps=NUM_STEPS).finding
    assert found is not None
    small = shrink(subject, found)
    assert len(small.trace) <= 30
    shown = json.loads(json.dumps(small.to_json()))
    violation = replay(subject, shown["config"], shown["trace"])
    assert violation is not None and violation.rule.name == small.rule
    assert str(violation) == f"[{small.rule}] {small.why}"
    # The same program on a scheduler without the bug is right.
    assert replay(subject_with(None), shown["config"], shown["trace"]) is None


def test_a_bug_that_does_not_fit_is_told():
    gone = bug("gone", "batching/batch.py", ("no such text", ""))
    message = r"has 'no such text' 0 times: write the bug 'gone' anew"
    with pytest.raises(AssertionError, match=message):
        load_scheduler(gone)


def test_the_same_tokens_come_out_whatever_the_options():
    generator = random.Random(0)
    for _ in range(100):
        check_same(make_factory(), *draw_requests(make_factory(), generator.randrange))


class Forgetful(MixedAdapter):
    """Changes its outputs when all is over, if it has no prefix cache."""

    is_over = False

    def check(self) -> None:
        self.is_over = not self.scheduler.prefix_cache

    def output(self, name: str) -> list[int]:
        return [*super().output(name), 7] if self.is_over else super().output(name)


def test_other_tokens_under_other_options_are_told():
    package = load_scheduler(None)
    requests = [submit("r1", [0, 1, 2], 2)]
    with pytest.raises(Violation, match=r"\[Q29 .*'prefix_cache': False.* r1 generates .*7\]"):
        check_same(
            lambda config: Forgetful(config, package, SchedulerPromises.all()), CONFIG, requests
        )


class Under:
    """Makes schedulers of ours; one under certain options, not the first of these, is odd."""

    def __init__(self, options: dict[str, Any], method: str, answer: Any) -> None:
        self.options, self.method, self.answer = {**CONFIG, **options}, method, answer
        self.num_made = 0

    def __call__(self, config: dict[str, Any]) -> Any:
        made = MixedAdapter(config, own_scheduler, SchedulerPromises.all())
        self.num_made += config == self.options
        if config == self.options and (self.num_made > 1 or config != CONFIG):
            setattr(made, self.method, lambda *_: self.answer)
        return made


def test_outputs_are_compared_under_all_options_that_are_no_sizes_of_the_cache():
    options = {name for way in WAYS for name in way}
    assert options | {"policy", "num_blocks", "block_size", "alphabet"} == CONFIG.keys() | {
        "growth", "depth"
    }  # fmt: skip
    assert len({str({**CONFIG, "prefix_cache": None, **way}) for way in WAYS}) == len(WAYS) == 9


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_tokens_reasons_and_refusals_are_compared_under_all_options(way: dict[str, Any]) -> None:
    requests = [submit("r1", [0, 1, 2], 1), submit("r2", [1], 2)]
    shown = str(way if {**CONFIG, **way} != CONFIG else {})  # that comes first
    with not_judging(["Q1 refuse-only-too-large", "Q28 output-is-the-models"]):
        check_same(Under({"alphabet": 0}, "add", False), CONFIG, requests)
        for method, answer, told in (
            ("add", False, r"with {} \[\] are accepted, and without \['r1', 'r2'\]"),
            ("output", [7], r"with {} r1 generates \(\[7\], 'length'\), and without .*"),
            ("reason", "stop", r"with {} r1 generates \(\[\d\], 'stop'\), and without .*"),
        ):
            with pytest.raises(Violation, match=told.format(re.escape(shown))) as caught:
                check_same(Under(way, method, answer), CONFIG, requests)
            assert caught.value.rule.code == "Q29"


def test_a_picture_shows_who_runs_and_who_waits():
    world = SchedulerSubject(make_factory()).world({**CONFIG, "max_running": 1})
    assert world.picture() == "no request lives"
    for operation in (submit("r1", [0, 1, 2], 4), submit("r2", [0, 0, 0, 0], 2), ["step"]):
        assert world.apply(operation)
    first, second = world.picture().splitlines()
    assert first.startswith("r1 running, 3/4 computed, 1 generated, table [")
    assert second == "r2 waiting, 0/4 computed, 0 generated"


def test_what_names_nobody_is_skipped():
    world = SchedulerSubject(make_factory()).world(CONFIG)
    assert world.apply(submit("r1", [0, 1, 2], 2))
    for operation in (
        submit("r1", [0]),
        submit("r2", []),
        ["abort", "r9"],
        ["misuse", 0, "r9"],
        ["flood", "f1", [], 1],
    ):
        assert not world.apply(operation)
    assert world.apply(["drain"]) and not world.apply(["flood", "f1", [1], 1])


class Incomplete:
    """Has nothing of what is asked."""


class Boastful(MixedAdapter):
    """Promises in its own words."""

    def __init__(self, config: dict[str, object]) -> None:
        super().__init__(config, load_scheduler(None), SchedulerPromises())
        self.promises = "everything"  # type: ignore[assignment]


class Wordy(MixedAdapter):
    """Returns its plan, and not its chunks."""

    def __init__(self, config: dict[str, object]) -> None:
        super().__init__(config, load_scheduler(None), SchedulerPromises())

    def schedule(self) -> object:  # type: ignore[override]
        return ["r1"]


class Mine(MixedAdapter):
    """Ours, with a wrong answer in each class below."""

    def __init__(self, config: dict[str, object]) -> None:
        super().__init__(config, load_scheduler(None), SchedulerPromises())


class RunsNobody(Mine):
    def running(self) -> list[str]:
        return [*super().running(), "r9"]


class ComputesNobody(Mine):
    def schedule(self) -> list[tuple[str, int, int]]:
        return [*super().schedule(), ("r9", 0, 1)]


class ComputesTwice(Mine):
    def schedule(self) -> list[tuple[str, int, int]]:
        return [(name, start, 1) for name, start, _ in super().schedule()[:1] * 2]


class WaitsForNobody(Mine):
    def waiting(self) -> list[str]:
        return [*super().waiting(), "r9"]


class AbortsAgain(Mine):
    def abort(self, name: str) -> bool:
        super().abort(name)
        return True


class AbortsNothing(Mine):
    def abort(self, name: str) -> bool:
        super().abort(name)
        return False


class AbortsForAnotherReason(Mine):
    def reason(self, name: str) -> Any:
        return "stop" if super().reason(name) == "abort" else super().reason(name)


class ComputesMoreThanItSays(Mine):
    def num_computed(self, name: str) -> int:
        return super().num_computed(name) - (super().num_computed(name) > 2)


class KeepsTheEnded(Mine):
    def block_table(self, name: str) -> list[int]:
        return super().block_table(name) or ([1] if super().reason(name) else [])


@pytest.mark.parametrize(
    ("wrong", "rule"),
    [
        (Mine, ""),
        (RunsNobody, "Q2"),
        (ComputesNobody, "Q2"),
        (ComputesTwice, "Q19"),
        (WaitsForNobody, "Q2"),
        (AbortsAgain, "Q32"),
        (AbortsNothing, "Q32"),
        (AbortsForAnotherReason, "Q32"),
        (ComputesMoreThanItSays, "Q19"),
        (KeepsTheEnded, "Q2"),
    ],
)
def test_one_wrong_answer_breaks_its_rule(wrong: type[Mine], rule: str) -> None:
    trace: Trace = [submit("r1", [0, 1, 2], 2), submit("r2", [1, 1], 4), ["step"], ["abort", "r2"],
                    ["step"], ["step"]]  # fmt: skip
    violation = replay(SchedulerSubject(wrong), CONFIG, trace)
    assert (violation.rule.code if violation is not None else "") == rule, violation


def test_an_adapter_that_cannot_be_driven_is_told():
    with pytest.raises(AdapterError, match=r"^Incomplete has no method add; it needs add\(request"):
        SchedulerSubject(lambda config: Incomplete()).world(CONFIG)
    wanted = r"radixkv\.spec\.adapters\.scheduler\.SchedulerPromises"
    with pytest.raises(AdapterError, match=rf"^promises must be {wanted}, got 'everything'$"):
        SchedulerSubject(Boastful).world(CONFIG)
    with pytest.raises(AdapterError, match=r"^schedule must return chunks \(name, start, length\)"):
        SchedulerSubject(Wordy).world(CONFIG).apply(["step"])


def test_the_model_says_every_token_and_the_same_in_every_process():
    tags = [root_tag(0)]
    for _ in range(200):
        tags.append(hash((tags[-1], next_token(tags[-1], 3))))
    assert {next_token(tag, 3) for tag in tags} == {0, 1, 2}
    assert isinstance(root_tag(1), int) and root_tag(0) != root_tag(1)
    assert "recomputed_tokens" in vars(Books())


OLD_MATCH = bug(
    "an older match is kept while another computes what seems to follow it",
    "batching/batch.py",
    (
        "        match = request.match = self.manager.match(\n"
        "            request.tokens, request.namespace, max_hit_tokens=request.max_hit_tokens\n"
        "        )\n",
        "        match = request.match\n"
        "        if match is None or match.next_block not in in_progress:\n"
        "            match = self.manager.match(request.tokens, request.namespace)\n"
        "            request.match = match\n",
    ),
)
"""Ours, once. The random engine takes 300,000 steps to it, so its trace is kept."""


def test_a_request_does_not_wait_for_a_block_that_it_does_not_need():
    config = {
        **CONFIG,
        "num_blocks": 14,
        "block_size": 1,
        "token_budget": 9,
        "policy": "priority",
        "reserve_tokens": 2,
        "alphabet": 2,
    }
    trace: Trace = [
        ["submit", "r1", [1, 1, 1, 1, 0], 9, 1, [], 0],
        ["submit", "r2", [1, 0, 0], 9, 0, [], 0],
        *[["step"]] * 5,
        ["submit", "r3", [1, 1], 4, 0, [], 0],
        *[["step"]] * 4,  # the last one preempts r3
        ["submit", "r4", [0], 1, 1, [], 0],
        ["step"],
        ["drain"],
    ]
    violation = replay(subject_with(OLD_MATCH), config, trace)
    assert str(violation) == "[Q3 admit-in-policy-order] r4 is admitted before r1"
    assert replay(subject_with(None), config, trace) is None


@pytest.mark.parametrize("num_blocks", [1, 2, 3])
@pytest.mark.parametrize("block_size", [1, 2])
def test_a_prompt_fits_the_smallest_pools(num_blocks: int, block_size: int) -> None:
    config = {**CONFIG, "num_blocks": num_blocks, "block_size": block_size}
    lengths = {len(draw_prompt(random.Random(seed).randrange, [], config)) for seed in range(1_000)}
    assert lengths <= set(range(1, num_blocks * block_size + 3))


@pytest.mark.parametrize("orders", list(permutations(range(4), 2)))
def test_nobody_goes_on_who_comes_after_any_that_is_preempted(orders: tuple[int, ...]) -> None:
    requests: list[Any] = [SimpleNamespace(order=order) for order in range(4)]
    preempted = [requests[order] for order in orders]
    running = [each for each in requests if each not in preempted]
    model: Any = SimpleNamespace(promised={"policy"})
    step: Any = SimpleNamespace(preempted=preempted, running=running)
    if set(orders) == {2, 3}:
        scheduler_policies.check_preempted(model, step)
        return
    with pytest.raises(Violation) as caught:
        scheduler_policies.check_preempted(model, step)
    assert caught.value.rule.code == "Q26"

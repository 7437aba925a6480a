"""The mixed scheduler under random requests, aborts and sizes, checked from outside."""

import random
from collections import Counter
from functools import partial
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from radixkv.kvcache import RequestTooLargeError
from radixkv.scheduler.policy import Fcfs, Policy, Priority
from radixkv.scheduler.request import Request
from radixkv.scheduler.step_plan import StepPlan

from .harness import VOCABULARY, Harness, alone

POLICIES: list[Policy] = [Fcfs(), Priority()]
RESERVES = (None, 0, 2)


@st.composite
def options(draw: st.DrawFn) -> dict[str, Any]:
    max_running = draw(st.integers(1, 5))
    return {
        "num_blocks": draw(st.integers(4, 14)),
        "block_size": draw(st.integers(1, 4)),
        "token_budget": draw(st.integers(max_running, 12)),
        "max_running": max_running,
        "policy": draw(st.sampled_from(POLICIES)),
        "reserve_tokens": draw(st.sampled_from(RESERVES)),
        "prefix_cache": draw(st.sampled_from([True, True, True, False])),
    }


tokens = st.integers(0, VOCABULARY - 1)
prompts = st.lists(tokens, min_size=1, max_size=14)


def submit(harness: Harness, request: Request) -> None:
    """Add a request; check that it is refused if and only if it can never fit."""
    manager = harness.manager
    needed = -(-request.max_kv_tokens // manager.block_size)
    try:
        harness.add(request)
    except RequestTooLargeError as error:
        assert (error.needed, error.num_blocks) == (needed, manager.num_blocks)
        assert needed > manager.num_blocks
        harness.seen["too large"] += 1
    else:
        assert needed <= manager.num_blocks


def pick(harness: Harness, who: int) -> Request:
    """Choose a live request, or any if none is live."""
    live = [*harness.scheduler.running, *harness.scheduler.waiting] or harness.requests
    return live[who % len(live)]


class MixedSchedulerMachine(RuleBasedStateMachine):
    """Submits, steps and aborts in any order; in the end all requests finish correctly."""

    harness: Harness

    @initialize(options=options())
    def start(self, options: dict[str, Any]) -> None:
        self.harness = Harness(**options)

    @rule(
        prompt=prompts,
        max_new_tokens=st.integers(1, 10),
        priority=st.integers(0, 2),
        stop=st.lists(tokens, max_size=1),
        namespace=st.sampled_from([b"", b"", b"other"]),
    )
    def submit(
        self,
        prompt: list[int],
        max_new_tokens: int,
        priority: int,
        stop: list[int],
        namespace: bytes,
    ) -> None:
        request = Request(
            str(len(self.harness.requests)),
            prompt,
            max_new_tokens,
            priority=priority,
            stop_token_ids=stop,
            namespace=namespace,
        )
        submit(self.harness, request)

    @rule(count=st.integers(1, 4))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.harness.step()

    @precondition(lambda self: self.harness.requests)
    @rule(who=st.integers(0, 9))
    def abort(self, who: int) -> None:
        self.harness.abort(pick(self.harness, who))

    @precondition(lambda self: self.harness.requests)
    @rule(who=st.lists(st.integers(0, 9), min_size=1, max_size=2))
    def abort_within_a_step(self, who: list[int]) -> None:
        def abort(plan: StepPlan) -> None:
            for index in who:
                self.harness.abort(pick(self.harness, index))

        self.harness.step(during=abort)

    @invariant()
    def is_sound(self) -> None:
        self.harness.settle()

    def teardown(self) -> None:
        if hasattr(self, "harness"):
            self.harness.drain()
            if self.harness.scheduler.reserve_tokens is None:
                assert self.harness.scheduler.stats().preemptions == 0


TestMixedScheduler = MixedSchedulerMachine.TestCase


@given(
    requests=st.lists(st.tuples(prompts, st.integers(1, 8)), min_size=1, max_size=6),
    sizes=st.tuples(st.integers(6, 14), st.integers(2, 4)),
)
def test_the_same_tokens_come_out_whatever_the_options(requests, sizes):
    num_blocks, block_size = sizes
    outputs = set()
    for prefix_cache in (True, False):
        for token_budget, max_running in ((2, 2), (5, 3), (64, 6)):
            for reserve_tokens in (None, 0):
                harness = Harness(
                    num_blocks,
                    block_size,
                    token_budget=token_budget,
                    max_running=max_running,
                    reserve_tokens=reserve_tokens,
                    prefix_cache=prefix_cache,
                )
                for index, (prompt, max_new_tokens) in enumerate(requests):
                    submit(harness, Request(str(index), prompt, max_new_tokens))
                harness.drain()
                outputs.add(str([request.output_tokens for request in harness.requests]))
    assert len(outputs) == 1


def random_harness(rng: random.Random) -> Harness:
    max_running = rng.randint(3, 6)
    return Harness(
        rng.randint(8, 14),
        rng.randint(2, 4),
        token_budget=rng.choice([max_running, 20]),
        max_running=max_running,
        policy=rng.choice(POLICIES),
        reserve_tokens=rng.choice(RESERVES),
        prefix_cache=rng.random() < 0.9,
    )


def random_request(rng: random.Random, name: str) -> Request:
    prompt = [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 6))]
    shared = [0, 1, 2, 1, 0, 2, 2, 1][: rng.randint(0, 8)]
    return Request(name, shared + prompt, rng.randint(1, 12), priority=rng.randint(0, 2))


def abort_random(harness: Harness, rng: random.Random, plan: StepPlan | None = None) -> None:
    del plan
    request = pick(harness, rng.randrange(10))
    status, prefilling = request.status.value, request.is_prefilling
    if harness.abort(request):
        harness.seen[f"aborted {status}"] += 1
        harness.seen["aborted in prefill"] += prefilling


def test_random_runs_cover_every_situation():
    """Count the situations that the tests above rely on."""
    seen: Counter[str] = Counter()
    for seed in range(150):
        rng = random.Random(seed)
        harness = random_harness(rng)
        for index in range(30):
            if rng.random() < 0.5:
                submit(harness, random_request(rng, str(index)))
            if harness.requests and rng.random() < 0.08:
                abort_random(harness, rng)
            if harness.requests and rng.random() < 0.08:
                harness.step(during=partial(abort_random, harness, rng))
            harness.step()
        harness.drain()
        seen += harness.seen
        seen["duplicate"] += harness.manager.stats().duplicate_blocks
    wanted = {
        "aborted in prefill",
        "aborted preempted",
        "aborted running",
        "aborted waiting",
        "duplicate",
        "evicted",
        "preempted in decode",
        "preempted in prefill",
        "preempted twice",
        "resumed with a hit",
        "too large",
        "waited for a leader",
        "whole hit",
    }
    assert set(seen) == wanted, seen
    assert min(seen.values()) >= 5, seen


def test_the_fake_model_generates_every_token():
    outputs = alone(Request("a", [0, 1], 60))[0]
    assert set(outputs) == set(range(VOCABULARY))

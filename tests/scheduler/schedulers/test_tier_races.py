"""Races of preempt, abort, finish and reset with copies in every state: no leaks, no wrong tokens.

A world is a scheduler over small pools, a few requests with shared prefixes, and copies with random
fates: done, failed, partial, late, reported twice, or not fenced until later or until all requests
wait. A race is an event of a request while a copy is in flight. Races are counted by the event and
by the state of the copy that the request waits for: queued (not dispatched), dispatched, or
quarantined (completed and not fenced).
"""

import random
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import partial

import pytest

from radixkv.kvcache.ids import OpId
from radixkv.kvcache.tiers.host_tier import HostConfig, WritePolicy
from radixkv.kvcache.tiers.operations import Operation
from radixkv.scheduler.policy import Fcfs, Priority
from radixkv.scheduler.request import Request, RequestStatus
from radixkv.scheduler.step_plan import StepPlan
from radixkv.spec import prefix_tags

from .copier import Fate
from .tier_harness import VOCABULARY, TierHarness, alone

NUM_RACES = 10_000
STEPS_PER_WORLD = 40
RARE = ("loading", "being parked", "parked", "preempted")
DECIDED = ("queued", "dispatched")
IN_A_STEP = [(False, False)] * 17 + [(False, True)] * 2 + [(True, False)]
RARE_COPIES = ("storage to host", "host to device")
PREFIX = [0, 1, 2, 1, 0, 2, 2, 1, 1, 0]


class World:
    """A scheduler, its requests and its copies, all drawn from a seed."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        write: WritePolicy = rng.choice(["exclusive", "back", "through"])
        max_running = rng.randint(2, 5)
        preempt = rng.choice(["recompute", "host", "host", "host", "storage", "storage", "storage"])
        self.harness = TierHarness(
            rng.randint(4, 9),
            rng.randint(1, 3),
            host=HostConfig(rng.randint(3, 24), write),
            storage=preempt == "storage" or rng.random() < 0.2,
            token_budget=rng.choice([max_running, 12]),
            max_running=max_running,
            policy=rng.choice([Fcfs(), Priority()]),
            reserve_tokens=rng.choice([0, 0, 0, 1, None]),
            preempt=preempt,
        )
        self.harness.copier.fate = self.fate
        self.store_prefix()
        self.races: Counter[str] = Counter()
        self.copies: Counter[str] = Counter()
        self.resets = 0
        self.finished: set[Request] = set()

    def fate(self, operation: Operation) -> Fate:
        """Draw the fate of a copy."""
        rng = self.rng
        steps = rng.choice([0, 1, 2, 4, 8, None])
        bad = rng.random()
        good: object = 1.0
        if bad < 0.1:
            good = 0.0
        elif bad < 0.2:
            good = rng.random()
        elif bad < 0.25:
            good = partial(_is_odd, rng.randrange(2))
        fenced, twice = rng.random() < 0.75, rng.random() < 0.2
        return Fate(steps, good, fenced, twice and fenced)  # type: ignore[arg-type]

    def store_prefix(self) -> None:
        """Store the common prefix of the prompts, as another process would."""
        harness = self.harness
        manager, tags = harness.manager, prefix_tags(harness.weights, PREFIX)
        if manager.tiers is not None and manager.tiers.storage is not None:
            for place, key in enumerate(manager.tiers.storage.block_keys(PREFIX)):
                block = slice(place * manager.block_size, (place + 1) * manager.block_size)
                harness.memories.storage[key] = tuple(tags[block])

    def submit(self) -> None:
        """Add a request, if it fits."""
        rng, harness = self.rng, self.harness
        prompt = PREFIX[: rng.randint(0, len(PREFIX))]
        prompt += [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 4))]
        request = Request(
            str(len(harness.requests)), prompt, rng.randint(1, 12), priority=rng.randint(0, 2)
        )
        manager = harness.manager
        if request.max_kv_tokens <= manager.num_blocks * manager.block_size:
            harness.add(request)

    def state(self, request: Request) -> str:
        """Describe the state of a request, in more detail than its status."""
        if request.parked is not None:
            fetching = request.prefetch is not None and not request.prefetch.done
            return "fetched" if fetching else "parked" if request.parked.saved else "being parked"
        if request.prefetch is not None and not request.prefetch.done:
            return "fetched"
        return request.status.value

    def waits_for(self, request: Request) -> str:
        """Describe the copy that a request waits for, if any, and its state."""
        tiers = self.harness.manager.tiers
        assert tiers is not None
        op_id: OpId | None = None
        if request.lease is not None:
            op_id = request.lease.loading
        elif request.parked is not None and request.parked.op_id is not None:
            op_id = request.parked.op_id
        elif request.prefetch is not None and not request.prefetch.done:
            op_id = request.prefetch.op_id
        if op_id is None:
            return ""
        for flight in self.harness.copier.flights:
            if flight.operation.id == op_id:
                state = "quarantined" if flight.ended else "dispatched"
                return f"{flight.operation.kind.value}, {state}"
        return f"{tiers.state.operations._queued[op_id].kind.value}, queued"

    def race(self, what: str, request: Request) -> None:
        """Count an event with the states of the copies."""
        tiers = self.harness.manager.tiers
        assert tiers is not None
        if tiers.num_open_operations:
            self.races[f"{what}: {self.state(request)}"] += 1
            if copy := self.waits_for(request):
                self.copies[f"{what}: {copy}"] += 1

    def abort(self, plan: StepPlan | None = None) -> None:
        """Abort a request; with a plan, during its step."""
        live = [r for r in self.harness.requests if r.finish_reason is None]
        if live:
            # Prefer requests with copies; most are waiting or running.
            weights = [
                20
                if self.waits_for(r).startswith(RARE_COPIES)
                else 8
                if self.state(r) in RARE
                else 1
                for r in live
            ]
            [request] = self.rng.choices(live, weights)
            chunks = plan.chunks if plan is not None else []
            in_step = any(chunk.request is request for chunk in chunks)
            self.race("abort in a step" if in_step else "abort", request)
            assert self.harness.scheduler.abort(request.request_id)

    def weight(self, request: Request) -> int:
        """Return the weight of a request in the draw of aborts."""
        if self.waits_for(request).startswith(RARE_COPIES):
            return 20
        return 8 if self.state(request) in RARE else 1

    def step(self) -> None:
        """Do one round of random events."""
        rng, harness = self.rng, self.harness
        live = sum(request.finish_reason is None for request in harness.requests)
        if live < 6 and rng.random() < 0.6:
            self.submit()
        if rng.random() < 0.15:
            self.abort()
        parked = any(self.state(r) in ("parked", "being parked") for r in harness.requests)
        if rng.random() < (0.08 if parked else 0.015):
            for request in harness.requests:
                if request.finish_reason is None:
                    self.race("reset", request)
            self.resets += 1
            harness.reset(str(self.resets).encode())
            self.store_prefix()
        loading = {r for r in harness.requests if r.status is RequestStatus.LOADING}
        before, during = rng.choice(IN_A_STEP)
        plan = harness.step(*(self.abort if each else _nothing for each in (during, before)))
        for request in plan.preempted:
            if request.status is RequestStatus.PREEMPTED:
                self.race("preempt, loading" if request in loading else "preempt", request)
        for request in harness.requests:
            if request.status is RequestStatus.FINISHED and request not in self.finished:
                self.finished.add(request)
                self.race("finish", request)
        if rng.random() < 0.2:
            harness.manager.check()

    def play(self) -> None:
        """Run rounds, then drain: all requests end with the right tokens, and nothing leaks."""
        for _ in range(STEPS_PER_WORLD):
            self.step()
        self.harness.drain()
        for request in self.harness.requests:
            assert request.finish_reason is not None, request
            if not self.resets:
                outputs = alone(self.harness, request)
                whole = request.finish_reason != "abort"
                count = request.max_new_tokens if whole else len(request.output_tokens)
                assert request.output_tokens == outputs[:count], request


def _is_odd(start: int, place: int) -> bool:
    return (start + place) % 2 == 1


def _nothing(plan: StepPlan) -> None:
    pass


@pytest.mark.slow
def test_ten_thousand_races_leak_no_block_and_change_no_token():
    races: Counter[str] = Counter()
    copies: Counter[str] = Counter()
    seed = 0
    while races.total() < NUM_RACES:
        world = World(seed)
        try:
            world.play()
        except Exception as error:
            raise AssertionError(f"world {seed}") from error
        races += world.races
        copies += world.copies
        seed += 1
    wanted = _pairs(
        {
            "abort": ("waiting", "loading", "running", "preempted", "fetched", "being parked",
                      "parked"),
            "abort in a step": ("running",),
            "reset": ("waiting", "loading", "running", "preempted", "fetched", "being parked",
                      "parked"),
            "preempt": ("being parked", "preempted"),
            "preempt, loading": ("preempted",),
            "finish": ("finished",),
        }
    )  # fmt: skip
    assert wanted <= set(races), wanted - set(races)
    assert min(races[each] for each in wanted) >= 5, races
    fetches = ("look up in storage", "storage to host")
    moves = ("host to device", "device to host")
    wanted = _pairs(
        {
            "abort": (
                *(f"{kind}, {state}" for kind in (*fetches, *moves) for state in DECIDED),
                "host to device, quarantined",
            ),
            "reset": [f"{kind}, dispatched" for kind in (*fetches, *moves)],
            "preempt": ["device to host, dispatched"],
        }
    )
    assert wanted <= set(copies), wanted - set(copies)
    assert min(copies[each] for each in wanted) >= 5, copies


def _pairs(events: Mapping[str, Iterable[str]]) -> set[str]:
    return {f"{event}: {state}" for event, states in events.items() for state in states}

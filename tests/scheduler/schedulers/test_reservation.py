"""The reservation: its sum and its guard, by hand, against the formulas, and as properties."""

from collections import Counter
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.kvcache import CacheManager
from radixkv.scheduler import MixedScheduler
from radixkv.scheduler.batching.batch import BatchScheduler
from radixkv.scheduler.request import Request, lease_of
from radixkv.scheduler.reservation import HORIZON_CLIP_TOKENS, Reservation, needed_to_finish


def request(num_prompt: int, max_new_tokens: int = 1, num_outputs: int = 0) -> Request:
    made = Request("a", [0] * num_prompt, max_new_tokens)
    for _ in range(num_outputs):
        made.append(1)
    return made


def receiving(num_prompt: int, max_new_tokens: int) -> Request:
    """A request that holds the blocks of its prompt, of 4 tokens each."""
    made, manager = request(num_prompt, max_new_tokens), CacheManager(16, 4)
    made.lease = manager.admit(manager.match([0] * num_prompt))
    return made


def smallest_available(reservation: Reservation, candidate: Request, hit: int = 0) -> int:
    """The least number of available blocks with which a request is admitted."""
    return next(n for n in range(100_000) if reservation.allows(candidate, hit, n))


# By hand


def test_a_request_that_is_received_must_be_able_to_finish():
    # It holds 3 of the 7 blocks that it needs; the candidate and the running one give back theirs.
    reservation = Reservation([receiving(4, 1)], 4, 0, [receiving(9, 18)])
    assert smallest_available(reservation, request(4)) == 1 + 4 - 2


@pytest.mark.parametrize("reserve", [0, 3, None])
def test_a_request_that_is_received_keeps_none_waiting_if_nothing_runs(reserve):
    # It lacks 4 blocks, which it gets when the candidate, of 13 tokens at last, is preempted.
    reservation = Reservation([], 4, reserve, [receiving(9, 18)])
    assert smallest_available(reservation, request(4, 10)) == 4


@pytest.mark.parametrize(("num_prompt", "growth"), [(11, 0), (12, 1)])
def test_a_request_that_is_received_grows_by_its_first_token(num_prompt, growth):
    reservation = Reservation([], 4, 0, [receiving(num_prompt, 10)])
    assert reservation.needed_to_receive(request(3, 10), 0) == 1 + growth
    assert reservation.needed_to_receive(request(4, 10), 0) == 1 + growth + 1


@pytest.mark.parametrize(
    ("reserve", "blocks"),
    [
        (0, 3),  # the 9 tokens it has
        (3, 3),  # 12
        (4, 4),  # 13
        (7, 4),  # 16
        (8, 5),  # 17
        (1000, 5),  # it ends at 9 + 10 - 1 = 18
        (None, 5),
    ],
)
def test_a_request_alone_needs_its_blocks_and_its_growth(reserve, blocks):
    # The guard does not bind alone, but 5 blocks are needed to reach the end whatever the horizon.
    alone = Reservation([], 4, reserve)
    candidate = request(9, 10)
    assert smallest_available(alone, candidate) == max(blocks, 5)
    # Beside one that would give 10 blocks back, the horizon alone decides.
    beside = Reservation([], 4, reserve)
    beside.add(request(40, 1), held=10, private=10)
    assert smallest_available(beside, candidate) == blocks


def test_hit_blocks_are_not_needed_again():
    beside = Reservation([], 4, 0)
    beside.add(request(40, 1), held=10, private=10)
    assert [smallest_available(beside, request(9, 10), hit) for hit in (0, 1, 2)] == [3, 2, 1]
    # A whole hit: the last token is computed, but its block is there.
    assert smallest_available(beside, request(8, 1), hit=2) == 0


def test_the_growth_of_all_that_run_is_kept():
    reservation = Reservation([], 4, 4)
    reservation.add(request(4, 100), held=1, private=1)  # grows by one block within 4 tokens
    reservation.add(request(5, 100), held=2, private=2)  # 9 tokens: one more
    reservation.add(request(4, 2), held=1, private=1)  # ends at 5 tokens: one more
    reservation.add(request(4, 1), held=1, private=1)  # ends with what it has
    # Big enough for the guard not to bind.
    reservation.add(request(400, 1), held=100, private=100)
    assert smallest_available(reservation, request(4, 1)) == 1 + 3


def test_the_guard_keeps_what_the_neediest_lacks_when_all_others_are_preempted():
    reservation = Reservation([], 4, 0)
    # Needs 10 blocks to its end and holds 2, of which it would keep both.
    reservation.add(request(8, 33), held=2, private=2)
    # The candidate takes 3 and would give 3 back: 8 - 3 must be left besides.
    assert smallest_available(reservation, request(12, 1)) == 3 + 5
    # One that hits 2 of its 3 gives only one back.
    assert smallest_available(reservation, request(12, 1), hit=2) == 1 + 7


def test_the_candidate_may_be_the_neediest():
    reservation = Reservation([], 4, 0)
    reservation.add(request(8, 1), held=2, private=1)
    # It takes 1, lacks 9, and gets 1 back from the other.
    assert smallest_available(reservation, request(4, 37)) == 1 + 8


def test_generated_tokens_count_as_tokens_it_has():
    beside = Reservation([], 4, 0)
    beside.add(request(400, 1), held=100, private=100)
    assert smallest_available(beside, request(4, 10, num_outputs=5)) == 3


def test_a_horizon_is_clipped():
    assert HORIZON_CLIP_TOKENS == 4096
    for reserve, blocks in ((4096, 4097), (10_000, 4097), (None, 10_000)):
        beside = Reservation([], 1, reserve)
        beside.add(request(20_000, 1), held=20_000, private=20_000)
        assert smallest_available(beside, request(1, 10_000)) == blocks


def test_running_requests_are_counted_from_their_leases():
    manager = CacheManager(16, 4)
    running = request(10, 30)
    running.lease = manager.admit(manager.match(running.tokens))
    manager.publish(running.lease, running.tokens)
    by_hand = Reservation([], 4, 8)
    by_hand.add(running, held=3, private=1)
    counted = Reservation([running], 4, 8)
    for available in range(16):
        candidate = request(6, 9)
        assert counted.allows(candidate, 1, available) == by_hand.allows(candidate, 1, available)
    manager.check()


# Against the formulas of the module's docstring


class Load(NamedTuple):
    num_prompt: int
    max_new_tokens: int
    num_outputs: int
    num_shared: int


@st.composite
def loads(draw: st.DrawFn) -> Load:
    num_prompt, max_new_tokens = draw(st.integers(1, 40)), draw(st.integers(1, 40))
    return Load(
        num_prompt,
        max_new_tokens,
        draw(st.integers(0, max_new_tokens - 1)),
        draw(st.integers(0, num_prompt)),
    )


block_sizes = st.integers(1, 5)
reserves = st.none() | st.integers(0, 40)


def numbers(load: Load, block_size: int) -> tuple[Request, int, int]:
    """Request, blocks held, blocks shared."""
    made = request(load.num_prompt, load.max_new_tokens, load.num_outputs)
    return made, -(-made.num_tokens // block_size), load.num_shared // block_size


def growth(load: Load, block_size: int, horizon: float) -> int:
    made, held, _ = numbers(load, block_size)
    most = int(min(made.num_tokens + horizon, load.num_prompt + load.max_new_tokens - 1))
    return -(-most // block_size) - held


def oracle(running: list[Load], new: Load, block_size: int, reserve: int | None) -> int:
    """The least number of available blocks that admits, straight from the two formulas."""
    horizon = float("inf") if reserve is None else reserve
    everybody = [*running, new]
    private = [held - shared for _, held, shared in (numbers(r, block_size) for r in everybody)]
    total_growth = sum(growth(load, block_size, horizon) for load in everybody)
    guard = max(
        growth(load, block_size, float("inf")) - (sum(private) - private[index])
        for index, load in enumerate(everybody)
    )
    return max(private[-1] + max(total_growth, guard), 0)


@given(st.lists(loads(), max_size=5), loads(), block_sizes, reserves)
def test_it_is_what_the_formulas_say(running, new, block_size, reserve):
    reservation = Reservation([], block_size, reserve)
    for load in running:
        made, held, shared = numbers(load, block_size)
        reservation.add(made, held, held - shared)
    candidate, _, hit = numbers(new, block_size)
    least = oracle(running, new, block_size, reserve)
    # Monotone: refused with any fewer, allowed with any more.
    for available in range(least + 5):
        assert reservation.allows(candidate, hit, available) == (available >= least)


@given(st.lists(loads(), max_size=5), loads(), block_sizes)
def test_a_longer_horizon_admits_no_more(running, new, block_size):
    least = [
        oracle(running, new, block_size, reserve) for reserve in (0, 1, 5, 20, HORIZON_CLIP_TOKENS)
    ]
    assert least == sorted(least)
    assert oracle(running, new, block_size, None) == least[-1]


@given(st.lists(loads(), min_size=1, max_size=8), block_sizes, st.integers(1, 40))
def test_with_no_horizon_all_that_are_admitted_can_grow_to_their_ends(queue, block_size, pool):
    """The blocks of all admitted requests at their limits fit the pool: none is preempted."""
    reservation = Reservation([], block_size, None)
    available, at_their_ends = pool, 0
    for load in queue:
        made, held, _ = numbers(load, block_size)
        if reservation.allows(made, 0, available):
            reservation.add(made, held, held)
            available -= held
            at_their_ends += -(-made.max_kv_tokens // block_size)
    assert at_their_ends <= pool


@given(st.lists(loads(), min_size=1, max_size=8), block_sizes, st.integers(1, 40))
def test_with_any_horizon_the_neediest_can_finish_alone(queue, block_size, pool):
    reservation = Reservation([], block_size, 0)
    available, ends, private = pool, [0], 0
    for load in queue:
        made, held, _ = numbers(load, block_size)
        if reservation.allows(made, 0, available):
            reservation.add(made, held, held)
            available -= held
            private += held
            ends.append(-(-made.max_kv_tokens // block_size))
    assert available + private == pool
    assert max(ends) <= pool and available >= 0


# The guard of a decode node, block by block


def a_lease(manager: CacheManager, made: Request, num_published: int) -> None:
    made.lease = manager.admit(manager.match(made.tokens))
    manager.publish(made.lease, made.tokens[:num_published])


holders = st.lists(
    st.tuples(
        st.sampled_from(["running", "receiving", "fenced off"]),
        st.integers(0, 4),  # tokens that it has in common with all others
        st.integers(1, 6),  # others
        st.integers(1, 12),  # to be generated
        st.integers(0, 10),  # published of what it has
    ),
    max_size=5,
)


@given(holders, st.integers(0, 4), st.integers(1, 6), st.integers(1, 12), st.integers(1, 2))
def test_the_guard_of_a_decode_node_is_exact(held, num_common, num_own, max_new_tokens, block_size):
    """With as many blocks as it says each can finish; with one less, one of them cannot."""
    manager = CacheManager(100, block_size)
    by_role: dict[str, list[Request]] = {"running": [], "receiving": [], "fenced off": []}
    for number, (role, common, own, new_tokens, published) in enumerate(held, 2):
        made = Request("a", [1] * common + [number] * own, new_tokens)
        a_lease(manager, made, published if role == "running" else 0)
        by_role[role].append(made)
    candidate = Request("q", [1] * num_common + [9] * num_own, max_new_tokens)
    match = manager.match(candidate.prompt)
    others = by_role["running"], by_role["receiving"], by_role["fenced off"]
    needed = needed_to_finish(candidate, match, *others, block_size)
    available = manager.available_after(match)
    a_lease(manager, candidate, 0)
    receiving = [*by_role["receiving"], candidate]
    stuck = blocks_of(*receiving, *by_role["fenced off"])
    shortest = manager.available
    for made in (*by_role["running"], *receiving):
        lack = -(-made.max_kv_tokens // block_size) - lease_of(made).num_blocks
        freed = blocks_of(*by_role["running"]) - stuck - blocks_of(made)
        shortest = min(shortest, manager.available + len(freed) - lack)
    assert available - needed == shortest


def blocks_of(*holders: Request) -> set[int]:
    return {block for each in holders for block in lease_of(each).block_table.tolist()}


def test_requests_that_are_received_take_slots():
    manager = CacheManager(16, 2)
    held = [receiving(2, 2)]
    batch = BatchScheduler(
        manager,
        token_budget=8,
        max_running=2,
        policy=None,
        reserve_tokens=0,
        receiving=lambda: held,
    )
    for name in "ab":
        batch.add(Request(name, [ord(name)], 2))
    plan = batch.schedule()
    assert [request.request_id for request in plan.admitted] == ["a"]
    batch.update(plan, [1])
    held.clear()
    assert [request.request_id for request in batch.schedule().admitted] == ["b"]


@pytest.mark.parametrize(
    ("num_blocks", "names", "walked", "waits_after"),
    [
        (16, ["short", "long", "waiting"], {0: 1, 1: 1}, 0),
        (20, ["brief", "long", "large", "wide"], {0: 1, 1: 1, 3: 1}, 1),
    ],
)
def test_who_is_refused_is_so_without_a_walk_over_those_that_run(
    monkeypatch, num_blocks, names, walked, waits_after
):
    """The running requests are counted once, and again only after one of them has left."""
    counted = []
    whole = BatchScheduler.reservation

    def counting(scheduler: BatchScheduler) -> Reservation:
        counted.append(1)
        return whole(scheduler)

    monkeypatch.setattr(BatchScheduler, "reservation", counting)
    manager = CacheManager(num_blocks, 2)
    scheduler = MixedScheduler(manager, token_budget=32, max_running=4, reserve_tokens=None)
    sizes = {"brief": (4, 4), "short": (4, 6), "long": (4, 12), "large": (4, 12)}
    sizes |= {"waiting": (8, 6), "wide": (10, 6)}
    for place, name in enumerate(names):
        scheduler.add(Request(name, [place] * sizes[name][0], sizes[name][1]))
    num_ended, seen = 0, []
    while not num_ended or scheduler.has_work:
        before = len(counted)
        plan = scheduler.schedule()
        seen.append((num_ended, len(counted) - before))
        num_ended += len(scheduler.update(plan, [1] * plan.num_chunks))
    walks = Counter[int]()
    for ended, number in seen:
        walks[ended] += number
    assert walks == walked and seen.count((waits_after, 0)) > 3, seen
    manager.check()

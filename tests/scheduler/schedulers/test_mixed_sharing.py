"""Shared prefixes in the mixed scheduler: leaders, followers, and hits."""

from radixkv.scheduler.request import Request

from .harness import PREFIX, Harness, chunks, names


def test_followers_wait_for_the_leader_and_the_prefix_is_computed_once():
    harness = Harness(num_blocks=64, token_budget=8, max_running=4)
    for i in range(4):
        harness.submit([*PREFIX, i], 2, name="abcd"[i])
    assert chunks(harness.step()) == [("a", 0, 8)]
    assert names(harness.scheduler.waiting) == ["b", "c", "d"]
    # The third block is computed in this step, and published at its end.
    assert chunks(harness.step()) == [("a", 8, 5)]
    assert chunks(harness.step()) == [("a", 13, 1), ("b", 12, 1), ("c", 12, 1), ("d", 12, 1)]
    harness.drain()
    stats = harness.scheduler.stats()
    assert stats.prefill_tokens == len(PREFIX) + 4
    assert stats.hit_tokens == 3 * len(PREFIX)
    assert stats.waits_for_leader == 3  # in the second step; the first had no budget left
    assert harness.manager.stats().duplicate_blocks == 0


def test_followers_wait_only_for_the_block_they_need_next():
    harness = Harness(num_blocks=64, token_budget=32)
    harness.submit(PREFIX, name="a")
    harness.submit([*PREFIX[:4], 1, 2, 3, 4], name="b")
    harness.submit([5, 6, 7, 8], name="c")
    assert chunks(harness.step()) == [("a", 0, 12), ("c", 0, 4)]
    assert chunks(harness.step()) == [("b", 4, 4)]
    harness.drain()


def test_a_request_shorter_than_a_block_does_not_wait():
    harness = Harness(num_blocks=64, token_budget=32)
    harness.submit(PREFIX, name="a")
    harness.submit(PREFIX[:3], name="b")
    assert chunks(harness.step()) == [("a", 0, 12), ("b", 0, 3)]
    harness.drain()


def test_followers_of_another_namespace_do_not_wait():
    harness = Harness(num_blocks=64, token_budget=32)
    for name in ("a", "b"):
        harness.add(Request(name, PREFIX, 1, namespace=name.encode()))
    assert chunks(harness.step()) == [("a", 0, 12), ("b", 0, 12)]
    harness.drain()
    assert harness.scheduler.stats().hit_tokens == 0


def test_when_the_leader_is_aborted_a_follower_leads():
    harness = Harness(num_blocks=64, token_budget=8)
    a, b, c = (harness.submit([*PREFIX, i], name="abc"[i]) for i in range(3))
    harness.step()
    harness.abort(a)
    # Two blocks were published; b computes the third.
    assert chunks(harness.step()) == [("b", 8, 5)]
    assert chunks(harness.step()) == [("c", 12, 1)]
    assert (b.num_hit_tokens, c.num_hit_tokens) == (8, 12)
    harness.drain()
    assert harness.scheduler.stats().prefill_tokens == 8 + 5 + 1


def test_when_the_leader_is_aborted_in_a_step_what_it_computed_there_is_lost():
    harness = Harness(num_blocks=64, token_budget=8)
    a, b = (harness.submit([*PREFIX, i], name="ab"[i]) for i in range(2))
    harness.step(during=lambda plan: harness.abort(a))
    assert chunks(harness.step()) == [("b", 0, 8)]
    harness.drain()
    assert b.num_hit_tokens == 0


def test_when_the_leader_is_preempted_its_follower_waits_until_it_is_back():
    harness = Harness(num_blocks=6, block_size=4, token_budget=3, max_running=3)
    first = harness.submit([1, 2, 3], 14, name="first")
    leader = harness.submit([*PREFIX, 0], 2, name="leader")
    follower = harness.submit([*PREFIX, 1], 2, name="follower")
    while not leader.num_preemptions:
        harness.step()
    assert harness.seen["preempted in prefill"] == 1
    harness.drain()
    assert first.num_preemptions == 0
    assert follower.num_hit_tokens == 12 and harness.computed[follower] == 1


def test_a_whole_hit_computes_one_token_and_writes_into_no_shared_block():
    harness = Harness(token_budget=32)
    harness.submit(PREFIX)
    harness.run()
    again = harness.submit(PREFIX, 2, name="again")
    assert chunks(harness.step()) == [("again", 11, 1)]  # the ghost checks what is written
    harness.drain()
    assert harness.scheduler.stats().hit_tokens == again.num_hit_tokens == 11


def test_generated_tokens_are_found_by_the_next_turn():
    harness = Harness(token_budget=32)
    first = harness.submit(PREFIX[:6], 7)
    harness.run()
    turn = harness.submit([*PREFIX[:6], *first.output_tokens, 50], name="turn")
    harness.run()
    assert turn.num_hit_tokens == 12  # the KV of the 13th token was never computed
    harness.drain()


def test_without_prefix_cache_requests_neither_share_nor_wait():
    harness = Harness(num_blocks=64, token_budget=64, prefix_cache=False)
    for name in "abc":
        harness.submit([*PREFIX, 1], 5, name=name)
    assert chunks(harness.step()) == [("a", 0, 13), ("b", 0, 13), ("c", 0, 13)]
    harness.drain()
    assert harness.scheduler.stats().hit_tokens == 0
    assert harness.manager.stats().cached_blocks == 0


def test_hits_are_counted_once_however_long_a_request_waits_for_blocks():
    harness = Harness(num_blocks=4, token_budget=16, max_running=2, reserve_tokens=None)
    harness.submit(PREFIX[:5], name="seed")
    harness.run()
    harness.submit([1, 2, 3, 4, 5, 6, 7, 8], 5, name="a")
    harness.submit([*PREFIX[:4], 9, 9], 3, name="b")
    for _ in range(5):
        harness.step()
        assert names(harness.scheduler.waiting) == ["b"]
    harness.drain()
    stats = harness.scheduler.stats()
    assert stats.admitted == 3
    assert stats.hit_tokens == 4
    assert stats.hit_tokens + stats.prefill_tokens == 5 + 8 + 6

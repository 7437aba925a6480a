"""The router: cost, a prefix shared by all requests, and properties."""

from collections import Counter, deque
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from radixkv.kvcache import CacheManager, CountError, Int32Array, RequestTooLargeError, TokenError
from radixkv.scheduler.errors import RequestError, RoutingError
from radixkv.scheduler.gateway.cache_index import CacheReporter
from radixkv.scheduler.gateway.router import CacheSize, Route, Router
from radixkv.scheduler.handoff import AttemptKey
from radixkv.scheduler.replay.trace import bundled_trace_path, read_trace, tokens

NODES = {"p0": 2000, "p1": 2000, "p2": 2000, "p3": 2000}
ROLES = ("prefill", "decode")
BLOCK_SIZE = 512
SECONDS_PER_BLOCK = 0.02


class Outcome:
    """Distribution of a trace over four prefill nodes that compute one request at a time."""

    def __init__(self, choose: Callable[[str, Int32Array], str]) -> None:
        self.requests: Counter[str] = Counter()
        self.hit_blocks = 0
        self.waited_s = 0.0
        caches = {name: CacheManager(size, BLOCK_SIZE) for name, size in NODES.items()}
        free_at = dict.fromkeys(NODES, 0.0)
        self.ends: deque[tuple[float, str]] = deque()
        for index, line in enumerate(read_trace(bundled_trace_path()).requests):
            self.now_s = line.timestamp_ms / 1e3
            prompt = tokens(line)
            name = choose(str(index), prompt)
            manager = caches[name]
            lease = manager.admit(manager.match(prompt))
            hits, lacking = lease.num_hit_blocks, lease.num_blocks - lease.num_hit_blocks
            manager.publish(lease, prompt)
            manager.release(lease)
            end_s = max(free_at[name], self.now_s) + lacking * SECONDS_PER_BLOCK
            free_at[name] = end_s
            self.ends.append((end_s, str(index)))
            self.requests[name] += 1
            self.hit_blocks += hits
            self.waited_s += end_s - self.now_s


class Routed(Outcome):
    def __init__(self) -> None:
        self.router = Router(prefill=sizes(NODES), decode=sizes({"d0": 10_000}))
        super().__init__(self.choose)

    def choose(self, request_id: str, prompt: Int32Array) -> str:
        still = deque[tuple[float, str]]()
        for end_s, other in self.ends:
            if end_s <= self.now_s:
                self.router.finished(AttemptKey(other, 1))
            else:
                still.append((end_s, other))
        self.ends = still
        return self.router.route(AttemptKey(request_id, 1), prompt).prefill


def longest_prefix() -> Outcome:
    shadows = {name: CacheManager(size, BLOCK_SIZE) for name, size in NODES.items()}

    def choose(request_id: str, prompt: Int32Array) -> str:
        name = max(shadows, key=lambda name: shadows[name].match(prompt).num_blocks)
        lease = shadows[name].admit(shadows[name].match(prompt))
        shadows[name].publish(lease, prompt)
        shadows[name].release(lease)
        return name

    return Outcome(choose)


def test_a_prefix_shared_by_all_requests_does_not_overload_one_node():
    # Each request of the trace begins with the same block.
    trap = longest_prefix()
    assert len(trap.requests) == 1, "pure longest prefix spreads this trace: it is no trap"
    turns = Outcome(lambda request_id, prompt: f"p{int(request_id) % len(NODES)}")
    routed = Routed()
    assert max(routed.requests.values()) < 1.3 * min(routed.requests.values())
    assert routed.hit_blocks > 1.5 * turns.hit_blocks
    assert routed.waited_s < 0.9 * turns.waited_s
    assert routed.waited_s < 0.3 * trap.waited_s


def route(prefill: str, decode: str) -> Route:
    return Route(prefill, decode)


def sizes(num_blocks: dict[str, int], block_size: int = BLOCK_SIZE) -> dict[str, CacheSize]:
    return {name: CacheSize(number, block_size) for name, number in num_blocks.items()}


def make(**options: dict[str, int]) -> Router:
    nodes = {"prefill": {"p0": 10, "p1": 10}, "decode": {"d0": 10, "d1": 20}, **options}
    return Router(**{role: sizes(each, 2) for role, each in nodes.items()})


def test_a_cached_block_weighs_as_much_as_a_block_of_load():
    router = make()
    prefix = [1, 2, 3, 4, 5, 6]
    assert router.route(AttemptKey("a", 1), prefix) == route("p0", "d0")
    assert router.loads() == {"p0": 3, "p1": 0, "d0": 3, "d1": 0}
    # On p0 it would wait for 3 blocks and add 1; on p1 it adds 4. Then the load is more than that.
    assert router.route(AttemptKey("b", 1), [*prefix, 7]).prefill == "p1"
    router.computed(AttemptKey("a", 1))
    assert router.route(AttemptKey("c", 1), [*prefix, 8]).prefill == "p0"
    assert router.loads() == {"p0": 1, "p1": 4, "d0": 4, "d1": 4}


def test_ties_go_to_the_node_that_was_sent_less():
    router = make(decode={"d0": 10})
    for name, node in (("a", "p0"), ("b", "p1"), ("c", "p0"), ("d", "p1")):
        assert router.route(AttemptKey(name, 1), np.array([ord(name), 0], np.int32)).prefill == node
        router.finished(AttemptKey(name, 1))


def test_a_decode_node_caches_generated_tokens():
    router = make()
    router.route(AttemptKey("a", 1), [1, 2, 3, 4])
    router.finished(AttemptKey("a", 1), [1, 2, 3, 4, 5, 6, 7, 8])
    router.route(AttemptKey("b", 1), [1, 2, 3, 4, 5, 6, 7, 8])
    assert router.loads() == {"p0": 2, "p1": 0, "d0": 0, "d1": 0}


def test_namespaces_share_nothing():
    router = make()
    router.route(AttemptKey("a", 1), [1, 2, 3, 4], b"x")
    router.finished(AttemptKey("a", 1), [1, 2, 3, 4, 5, 6], b"x")
    assert router.route(AttemptKey("b", 1), [1, 2, 3, 4], b"y") == route("p1", "d1")


def test_a_node_that_refused_is_avoided_if_possible():
    router = make()
    assert router.route(AttemptKey("a", 1), [1], avoid=["d0"]) == route("p0", "d1")
    assert router.route(AttemptKey("a", 2), [1], avoid=["p0", "p1", "d0", "d1"]).decode == "d0"


NAMES = [("p0", "p1", "p2"), ("d0", "d1", "d2")]
PAIRS = [Route(p, d) for p in NAMES[0] for d in NAMES[1]]


@given(
    st.lists(st.tuples(st.integers(1, 6), st.sampled_from(PAIRS)), max_size=6),
    st.sets(st.sampled_from([*NAMES[0], *NAMES[1]])),
    st.sets(st.sampled_from(PAIRS), max_size=9),
)
@example([(3, PAIRS[0])], {"p1", "p2", "d1", "d2"}, {PAIRS[0]})  # one that is avoided, or two
def test_it_avoids_as_few_nodes_as_possible_and_then_takes_the_least_cost(earlier, avoid, broken):
    router = make(
        **{role: dict.fromkeys(names, 99) for role, names in zip(ROLES, NAMES, strict=True)}
    )
    for number, (num_blocks, pair) in enumerate(earlier):
        others = [each for each in PAIRS if each != pair]
        prompt = [100 + number] * (2 * num_blocks)
        assert router.route(AttemptKey(str(number), 1), prompt, broken=others) == pair
    loads = router.loads()

    def cost(pair: Route) -> tuple[int, int]:
        return len(avoid & {*pair}), sum(loads[name] for name in pair)

    chosen = router.route(AttemptKey("new", 1), [1], avoid=avoid, broken=broken)
    allowed = [pair for pair in PAIRS if pair not in broken] or PAIRS
    assert chosen in allowed
    assert cost(chosen) == min(map(cost, allowed))


def test_nodes_come_and_go():
    router = make()
    router.route(AttemptKey("a", 1), [1, 2])
    router.remove("p0")
    router.remove("d0")
    assert router.loads() == {"p1": 0, "d1": 0}
    router.finished(AttemptKey("a", 1))  # of a node that is gone
    router.add_prefill("p0", CacheSize(10, 2))
    assert router.loads() == {"p1": 0, "p0": 0, "d1": 0}
    assert router.route(AttemptKey("b", 1), [1, 2]) == route("p1", "d1")


def test_a_node_that_drains_gets_no_more_attempts():
    router = make(prefill={"p0": 10})
    first = router.route(AttemptKey("a", 1), [1, 2]).decode
    other = {"d0": "d1", "d1": "d0"}[first]
    assert [router.num_attempts(name) for name in ("p0", first, other)] == [1, 1, 0]
    router.drain(first)
    for name in "bcd":
        assert router.route(AttemptKey(name, 1), [1, 2]).decode == other
    assert router.has_pair({Route("p0", first)})
    assert not router.has_pair({Route("p0", other)})
    router.computed(AttemptKey("a", 1))
    assert [router.num_attempts(name) for name in ("p0", first)] == [3, 1]
    router.finished(AttemptKey("a", 1))
    assert router.num_attempts(first) == 0
    router.drain(other)
    with pytest.raises(RoutingError, match=r"^there is no decode node$"):
        router.route(AttemptKey("e", 1), [1])
    router.remove(first)
    router.add_decode(first, CacheSize(4, 2))  # another one, of the same name
    assert router.route(AttemptKey("e", 1), [1]).decode == first
    for call in (router.drain, router.num_attempts):
        with pytest.raises(RoutingError, match=r"^there is no node 'd9'$"):
            call("d9")


def test_small_nodes_get_small_requests():
    router = make(prefill={"p0": 2, "p1": 30})
    assert router.route(AttemptKey("a", 1), range(11)) == route("p1", "d0")
    assert router.route(AttemptKey("b", 1), range(40)) == route("p1", "d1")
    router.finished(AttemptKey("b", 1), range(60))  # more than d1 has: it cannot be there whole


def test_refusals_change_nothing():
    router = make()
    router.route(AttemptKey("a", 1), [1, 2])
    before = router.loads()
    with pytest.raises(RequestError, match=r"^attempt 1 of request 'a' is under way$"):
        router.route(AttemptKey("a", 1), [1])
    with pytest.raises(RequestTooLargeError, match="10"):
        router.route(AttemptKey("b", 1), range(21))
    for name, call in (("b", router.route), ("a", router.finished)):
        with pytest.raises(TokenError, match=r"^token 0 must be an integer, got 0.5$"):
            call(AttemptKey(name, 1), [0.5])  # type: ignore[list-item]
    with pytest.raises(RoutingError, match=r"^there is a node 'd1' already$"):
        router.add_prefill("d1", CacheSize(1, 2))
    with pytest.raises(RoutingError, match=r"^there is no node 'x'$"):
        router.remove("x")
    with pytest.raises(CountError):
        router.add_decode("x", CacheSize(0, 2))
    assert router.loads() == before
    router.remove("d0")
    router.remove("d1")
    with pytest.raises(RoutingError, match=r"^there is no decode node$"):
        router.route(AttemptKey("b", 1), [1])
    assert router.loads() == {"p0": 1, "p1": 0}


@given(
    st.lists(
        st.tuples(st.integers(0, 9), st.lists(st.integers(0, 2), max_size=9), st.booleans()),
        max_size=40,
    )
)
def test_load_is_the_sum_of_attempts_in_progress(steps):
    router = make()
    lacking: dict[AttemptKey, tuple[Route, int, int]] = {}
    for attempt, (name, prompt, ends) in enumerate(steps):
        key = AttemptKey(str(name), attempt)
        before = router.loads()
        chosen = router.route(key, prompt)
        after = router.loads()
        lacking[key] = (
            chosen,
            after[chosen.prefill] - before[chosen.prefill],
            after[chosen.decode] - before[chosen.decode],
        )
        costs = {node: before[node] for node in ("p0", "p1")}
        # Nobody is chosen whose load alone is more than the cost of another.
        needed = -(-len(prompt) // 2)
        assert before[chosen.prefill] + lacking[key][1] <= min(costs.values()) + needed
        if ends:
            router.finished(key)
            del lacking[key]
        loads = Counter({name: 0 for name in ("p0", "p1", "d0", "d1")})
        for each, on_prefill, on_decode in lacking.values():
            loads[each.prefill] += on_prefill
            loads[each.decode] += on_decode
        assert router.loads() == loads


@given(
    broken=st.sets(st.tuples(st.sampled_from(["p0", "p1", "p2"]), st.sampled_from(["d0", "d1"]))),
    avoid=st.sets(st.sampled_from(["p0", "p1", "p2", "d0", "d1"])),
    loads=st.lists(st.integers(1, 8), max_size=6),
)
def test_a_broken_pair_is_the_last_choice(broken, avoid, loads):
    nodes = {"p0": 100, "p1": 100, "p2": 100}
    router = Router(prefill=sizes(nodes, 1), decode=sizes({"d0": 100, "d1": 100}, 1))
    for place, length in enumerate(loads):
        router.route(AttemptKey(str(place), 1), [place + 1] * length)
    before = router.loads()
    pairs = {Route(*pair) for pair in broken}
    whole = {Route(p, d) for p in nodes for d in ("d0", "d1")} - pairs
    route = router.route(AttemptKey("last", 1), [99, 99], avoid=avoid, broken=pairs)
    if whole:
        assert route in whole

        def cost(pair: Route) -> tuple[int, int]:
            return len(avoid & {*pair}), before[pair.prefill] + before[pair.decode]

        assert cost(route) == min(map(cost, whole))
    after = router.loads()
    assert {name for name in after if after[name] != before[name]} == set(route)
    router.finished(AttemptKey("last", 1))
    assert router.loads() == before


def test_a_prompt_that_fills_a_node_may_be_there_whole():
    for num_tokens, num_lacking in ((20, 1), (22, 10)):  # d0 has 20 tokens
        router = make(decode={"d0": 10})
        router.route(AttemptKey("a", 1), [1, 2])
        router.finished(AttemptKey("a", 1), range(num_tokens))
        router.route(AttemptKey("b", 1), [*range(19), 99])
        assert router.loads()["d0"] == num_lacking


def test_nodes_are_compared_in_tokens():
    small, large = CacheSize(20, 2), CacheSize(10, 8)
    router = Router(prefill={"p0": small, "p1": large}, decode={"d0": large})
    with pytest.raises(RequestTooLargeError) as caught:
        router.route(AttemptKey("large", 1), range(81))
    assert (caught.value.needed, caught.value.num_blocks) == (11, 10), "of p1, which has 80 tokens"
    for number, node in enumerate(("p0", "p1", "p0", "p0")):  # sent 8, then 16 tokens, then 16
        key = AttemptKey(str(number), 1)
        prompt = [100 * number + each for each in range(16 if node == "p1" else 8)]
        assert router.route(key, prompt).prefill == node
        router.finished(key)


ROOM_STEPS = st.one_of(
    st.tuples(st.just("says"), st.sampled_from(["d0", "d1", "d2"]), st.integers(0, 12)),
    st.tuples(st.just("gets"), st.just(""), st.integers(1, 20)),
    st.tuples(st.just("drains"), st.sampled_from(["p1", "d0"]), st.just(0)),
)


@given(steps=st.lists(ROOM_STEPS, max_size=12), besides=st.sampled_from(["d0", "d1", "d2"]))
def test_room_is_what_a_node_has_said_less_the_prompts_that_it_got_since(steps, besides):
    """Whatever it has cached of them, as other requests may hold that; for any length."""
    prefill = {"p0": CacheSize(10, 2), "p1": CacheSize(4, 8)}
    decode = {"d0": CacheSize(20, 2), "d1": CacheSize(20, 4), "d2": CacheSize(20, 2)}
    router = Router(prefill=prefill, decode=decode)
    num_free = dict.fromkeys(decode, 0)
    drained: set[str] = set()
    for number, (what, node, size) in enumerate(steps):
        if what == "says":
            router.set_free(node, size)
            num_free[node] = size
        elif what == "gets":
            key = AttemptKey(str(number), 1)
            node = router.route(key, range(size)).decode
            num_free[node] -= -(-size // decode[node].block_size)
            router.finished(key, range(size))
        else:
            router.drain(node)
            drained.add(node)
    for num_tokens in range(1, 50):
        serving = decode.keys() - drained
        roomy = {
            node
            for node in serving - {besides}
            if num_tokens <= num_free[node] * decode[node].block_size
        }
        fits = num_tokens <= max(
            size.num_blocks * size.block_size
            for node, size in prefill.items()
            if node not in drained
        )
        expected = serving - roomy if roomy and fits else None
        assert router.without_room(num_tokens, besides) == expected


@pytest.mark.parametrize("keep", [(), (b"a",), (b"b",), (b"a", b"b")])
def test_after_a_reset_nodes_are_expected_to_have_what_it_keeps(keep):
    router, prompt = make(prefill={"p0": 10}, decode={"d0": 10}), [1, 2, 3, 4, 5, 6]
    for namespace in (b"a", b"b"):
        router.route(AttemptKey("first", 1), prompt, namespace)
        router.finished(AttemptKey("first", 1), prompt, namespace)
    router.forget_cached(keep)
    for namespace in (b"a", b"b"):
        num_lacking = 0 if namespace in keep else 3
        router.route(AttemptKey("again", 1), prompt, namespace)
        assert router.loads() == {"p0": num_lacking, "d0": num_lacking}
        router.finished(AttemptKey("again", 1))


def test_an_attempt_is_under_way_until_it_has_ended_on_both_nodes():
    router = make()
    key = AttemptKey("a", 1)
    for _ in range(2):
        router.route(key, [1, 2])
        for node_is_done in (lambda: None, lambda: router.computed(key)):
            node_is_done()
            before = router.loads()
            with pytest.raises(RequestError, match=r"^attempt 1 of request 'a' is under way$"):
                router.route(key, [1, 2])
            assert router.loads() == before
        router.finished(key)


def test_what_comes_to_a_node_is_counted_in_its_own_blocks():
    """Nodes that send updates, with blocks of two sizes: each has its own hashes of a prompt."""
    sizes = CacheSize(20, 2), CacheSize(20, 3)
    for first, second in (sizes, sizes[::-1]):
        router = Router(prefill={"p0": first}, decode={"d0": second})
        for name in ("p0", "d0"):
            for update in CacheReporter().take_messages():
                assert router.update_cache(name, update)
        prompt = list(range(12))
        for number, namespace in enumerate((b"", b"", b"other")):
            before = router.loads()
            router.route(AttemptKey("a", number), prompt, namespace)
            after = router.loads()
            for name, size in (("p0", first), ("d0", second)):
                num_lacking = 0 if number == 1 else 12 // size.block_size
                assert after[name] - before[name] == num_lacking


@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(["route", "computed", "finished", "update"]),
            st.integers(0, 5),
            st.integers(0, 9),
        ),
        max_size=30,
    )
)
def test_nothing_is_left_of_attempts_that_have_ended(steps):
    """Of none of their blocks, whether or not a node has told what it has."""
    router, keys = make(), [AttemptKey(str(number), 1) for number in range(6)]
    nodes = *router._prefill.values(), *router._decode.values()
    reporters, under_way = dict[str, CacheReporter](), set[AttemptKey]()
    num_sent = [0] * len(nodes)
    for what, number, length in steps:
        key = keys[number]
        if what == "route" and key not in under_way:
            before = [node.load for node in nodes]
            router.route(key, range(length))
            loads = [node.load for node in nodes]
            num_sent = [sent + b - a for sent, a, b in zip(num_sent, before, loads, strict=True)]
            under_way.add(key)
        elif what == "computed":
            router.computed(key)
        elif what == "finished":
            router.finished(key, range(length) if key in under_way else ())
            under_way.discard(key)
        elif what == "update":
            name = ("p0", "p1", "d0", "d1")[number % 4]
            for update in reporters.setdefault(name, CacheReporter()).take_messages():
                assert router.update_cache(name, update)
        assert [node.sent for node in nodes] == num_sent
    for key in keys:
        router.finished(key)
    for node in nodes:
        assert (node.lacks, node.coming, node.num_coming, node.load) == ({}, {}, {}, 0)
        # What a node has told replaces what is predicted of it.
        assert node.index is None or node.shadow.available == node.shadow.num_blocks
        assert node.index is None or node.shadow.stats().cached_blocks == 0

"""Prefill and decode nodes over tiny models: the tokens are those of one engine."""

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import count, product
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.kvcache import HostConfig, TierStats
from radixkv.kvcache.copies.block_copies import exact_pieces
from radixkv.kvcache.storage import StorageWorkers
from radixkv.scheduler.engine import Engine, make_storage_namespace
from radixkv.scheduler.nodes import DecodeEngine, Disaggregated, PrefillEngine, in_process
from radixkv.scheduler.nodes.transport import InProcessExchange, InProcessTransport
from radixkv.scheduler.request import GREEDY, Request, SamplingParams

from ..kvcache.storage.memory import MemoryBackend
from .cluster import STEP_S, TIMING, Cluster, over_jax, over_nixl
from .conftest import complete, fresh, let_copies_end
from .test_engine import PREFIX, PROMPTS, SAMPLED


@pytest.fixture
def expected(llama: Engine) -> list[list[int]]:
    """The output of one engine."""
    return complete(fresh(llama), PROMPTS, 24, SAMPLED)


# The same tokens


ADJUSTED = (
    SamplingParams(repetition_penalty=1.7, min_tokens=3),
    SamplingParams(temperature=1.1, seed=3, presence_penalty=2, frequency_penalty=-1, min_p=0.1),
)


@pytest.mark.parametrize("order", ["early", "prefill_complete"])
@pytest.mark.parametrize(
    "samplings", [(GREEDY,), SAMPLED, ADJUSTED], ids=["greedy", "sampled", "adjusted"]
)
def test_tokens_are_those_of_one_engine(llama, samplings, order):
    expected = complete(fresh(llama), PROMPTS, 24, samplings)
    cluster = Cluster(llama, prefill={"order": order, "token_budget": 16})  # chunks of 16
    assert cluster.complete(PROMPTS, 24, samplings) == expected
    assert cluster.complete(PROMPTS, 24, samplings) == expected  # all in the caches


def test_it_pauses_only_when_no_node_has_done_anything(llama, monkeypatch):
    cluster = Cluster(llama, num_prefill=2, num_decode=2)
    front, pauses = cluster.front, list[float]()
    monkeypatch.setattr(in_process, "time", SimpleNamespace(sleep=pauses.append))
    answers: list[bool] = []  # of the calls of nodes that have yet to come in this step
    nodes: list[Any] = [*front.prefill.values(), *front.decode.values()]

    def answer(call: Callable[..., bool], *args: float) -> bool:
        call(*args)
        return answers.pop(0)

    for node, call in product(nodes, ("poll", "step")):
        monkeypatch.setattr(node, call, partial(answer, getattr(node, call)))
    front.add_request(Request("a", PREFIX, 24))
    for were_busy in product((False, True), repeat=4):
        for number, was_busy in enumerate(were_busy):
            answers += (was_busy, False) if number % 2 else (False, was_busy)
        front.step()
        assert not answers and front.has_work
        assert len(pauses) == (not any(were_busy)), were_busy
        pauses.clear()
    front.abort("a")
    while front.has_work:
        answers += [False] * 8
        front.step()
    pauses.clear()
    answers += [False] * 8
    front.step()
    assert pauses == []  # its caller waits for work


def test_several_nodes_of_each_role(llama, expected):
    cluster = Cluster(llama, num_prefill=2, num_decode=3)
    assert cluster.complete(PROMPTS, 24, SAMPLED) == expected
    stats = cluster.front.stats()
    assert list(stats) == ["prefill-0", "prefill-1", "decode-0", "decode-1", "decode-2"]
    assert all(each.engine.steps > 0 for each in stats.values())


def test_stop_tokens_and_single_tokens(llama):
    (whole,) = complete(fresh(llama), [PREFIX], 16)
    cluster = Cluster(llama)
    stops = [whole[5], whole[0]]
    requests = [Request(str(i), PREFIX, 16, stop_token_ids=[t]) for i, t in enumerate(stops)]
    requests.append(Request("single", PREFIX, 1))
    for request in requests:
        cluster.front.add_request(request)
    cluster.finish()
    assert [each.output_tokens for each in requests] == [
        whole[: whole.index(stops[0]) + 1],
        whole[:1],
        whole[:1],
    ]
    assert [each.finish_reason for each in requests] == ["stop", "stop", "length"]


def test_min_tokens_hold_on_both_nodes(llama):
    """The prefill node chooses the first token, and the decode node the others."""
    (whole,) = complete(fresh(llama), [PREFIX], 16)
    cluster, serving = Cluster(llama), fresh(llama)
    for stop, least in ((whole[0], 1), (whole[0], 3), (whole[5], 5), (whole[5], 6), (whole[5], 9)):
        for sampling in (GREEDY, SAMPLED[1]):
            made = [
                Request("a", PREFIX, 16, sampling=replace(sampling, min_tokens=least),
                        stop_token_ids=[stop])
                for _ in range(2)
            ]  # fmt: skip
            serving.add_request(made[0])
            serving.run()
            cluster.front.add_request(made[1])
            cluster.finish()
            assert made[0].output_tokens == made[1].output_tokens
            assert stop not in made[1].output_tokens[:least]


@pytest.mark.slow
@pytest.mark.parametrize("transport", [over_jax, over_nixl])
def test_over_transports_between_processes(llama, expected, transport):
    cluster = Cluster(llama, transport=transport)
    assert cluster.complete(PROMPTS, 24, SAMPLED) == expected
    sent = cluster.bytes_on_the_wire()
    assert cluster.complete(PROMPTS, 24, SAMPLED) == expected
    assert 0 < cluster.bytes_on_the_wire() - sent < sent
    assert cluster.front.close()


def test_memory_for_the_copies_of_one_hand_off_is_enough(llama, expected):
    cluster = Cluster(llama, prefill={"max_offered_bytes": 1, "token_budget": 16})
    assert cluster.complete(PROMPTS, 24, SAMPLED) == expected
    assert cluster.p._sender.num_bytes == 0


# Hits


@pytest.mark.parametrize(("p_has", "d_has"), list(product([False, True], repeat=2)))
def test_p_sends_what_d_lacks_and_computes_what_p_lacks(llama, p_has, d_has):
    prompt = PROMPTS[0]  # 10 whole blocks and a token
    (expected,) = complete(fresh(llama), [prompt], 8, SAMPLED[1:])
    cluster = Cluster(llama)
    assert cluster.complete([prompt], 8, SAMPLED[1:]) == [expected]
    block_bytes = sum(
        pool.nbytes // len(pool)
        for pool in (*cluster.p._runner.arrays.keys, *cluster.p._runner.arrays.values)
    )
    assert cluster.bytes_on_the_wire() == 11 * block_bytes
    if not p_has:
        cluster.p.manager.evict(100)
    if not d_has:
        cluster.d.manager.evict(100)
    before = cluster.front.stats()
    assert cluster.complete([prompt], 8, SAMPLED[1:]) == [expected]
    after = cluster.front.stats()
    hits, sent = (
        after["prefill-0"].engine.scheduler.hit_tokens
        - before["prefill-0"].engine.scheduler.hit_tokens,
        after["decode-0"].transport.bytes_received - before["decode-0"].transport.bytes_received,
    )
    assert hits == cluster.requests[0].num_hit_tokens == (40 if p_has else 0)
    assert sent == (1 if d_has else 11) * block_bytes


def test_a_prompt_of_whole_blocks_that_d_has_sends_nothing(llama):
    cluster = Cluster(llama)
    first = cluster.complete([PREFIX], 4)
    sent = cluster.bytes_on_the_wire()
    assert cluster.complete([PREFIX], 4) == first
    assert cluster.bytes_on_the_wire() == sent > 0


def test_d_continues_a_conversation_from_what_it_generated(llama):
    prompt = PREFIX[:21]
    cluster = Cluster(llama)
    (outputs,) = cluster.complete([prompt], 24)
    turn = [*prompt, *outputs, 7, 8]
    sent = cluster.front.stats()["decode-0"].transport.parts_received
    assert cluster.complete([turn], 8) == complete(fresh(llama), [turn], 8)
    # P has the first prompt alone, D all but the last token of the answer: one more part.
    assert cluster.front.stats()["decode-0"].transport.parts_received == sent + 1


# Preemption on D


@pytest.mark.parametrize("preempt", ["recompute", "host"])
def test_preemption_on_d_changes_no_token(llama, expected, preempt):
    host = HostConfig(64) if preempt == "host" else None
    options = {"num_blocks": 28, "reserve_tokens": 0, "preempt": preempt, "host": host}
    cluster = Cluster(llama, decode=options)
    assert cluster.complete(PROMPTS, 24, SAMPLED) == expected
    stats = cluster.d.stats().engine.scheduler
    assert stats.preemptions > 0
    assert stats.resumed == stats.preemptions
    assert (stats.parked > 0) == (preempt == "host")
    assert cluster.front.close()


def test_a_host_tier_on_both_nodes(llama, expected):
    options = {"num_blocks": 28, "host": HostConfig(100, "through")}
    cluster = Cluster(llama, prefill=options, decode=options)
    for _ in range(2):
        assert cluster.complete(PROMPTS, 24, SAMPLED) == expected
        for node in (cluster.p, cluster.d):
            let_copies_end(node._runner)
            node.manager.evict(100)
    stats = cluster.front.stats()
    assert stats["prefill-0"].engine.scheduler.host_hit_tokens > 0
    assert cluster.front.close()


def test_an_idle_node_goes_on_copying_to_the_host(llama):
    cluster = Cluster(llama, decode={"host": HostConfig(100, "through")})
    cluster.add([PREFIX], 1)  # D takes no step
    cluster.front.run()
    end = time.monotonic() + 60

    def tiers() -> TierStats:
        found = cluster.d.stats().engine.cache.tiers
        assert found is not None
        return found

    while tiers().host_cached_blocks < 10 and time.monotonic() < end:
        cluster.d.poll(cluster.now)
        cluster.d.step()
    assert (tiers().host_cached_blocks, tiers().open_operations) == (10, 0)
    assert cluster.front.close()


def test_a_pull_may_take_as_long_as_a_transfer(llama, monkeypatch):
    cluster = Cluster(llama, decode={"timing": replace(TIMING, transfer_s=77.0)})
    limits: list[float] = []
    pull = cluster.d._transport.pull

    def note(*args: Any, timeout_s: float) -> None:
        limits.append(timeout_s)
        pull(*args, timeout_s=timeout_s)

    monkeypatch.setattr(cluster.d._transport, "pull", note)
    cluster.complete([PREFIX], 4)
    assert limits and set(limits) == {77.0}


def test_d_loads_from_storage_what_it_lacks(llama):
    backend = MemoryBackend()
    options = {
        "host": HostConfig(64),
        "storage_namespace": make_storage_namespace(llama._runner.model, "", 4),
        "timing": replace(TIMING, silence_s=1e6, transfer_s=1e7),  # its clock counts steps
    }
    stores = [StorageWorkers(backend, max_bytes_in_flight=2**28) for _ in range(2)]
    prefill, decode = [options | {"storage": each} for each in stores]
    cluster = Cluster(llama, prefill=prefill, decode=decode)
    first = cluster.complete([PROMPTS[0]], 8)  # 10 whole blocks and a token
    sent = cluster.bytes_on_the_wire()
    for node in (cluster.p, cluster.d):
        let_copies_end(node._runner)
    cluster.d.reset_cache()
    assert cluster.complete([PROMPTS[0]], 8) == first
    counts = cluster.d.stats().engine.scheduler
    assert (counts.storage_hit_tokens, counts.received_tokens) == (40, 41 + 1)
    assert counts.prompt_tokens == 2 * len(PROMPTS[0])
    assert cluster.bytes_on_the_wire() == sent + sent // 11 > sent, "the last block alone"
    assert cluster.requests[0].num_hit_tokens == 40, "on P's device"
    assert cluster.front.close()
    assert all([each.close(timeout_s=1000.0) for each in stores])


# Programs and copies


def test_a_late_compilation_of_a_copy_would_be_counted(llama):
    cluster = Cluster(llama)
    for node, name in ((cluster.p, "gather"), (cluster.d, "scatter")):
        [copies] = node._kv._copies.values()
        copy = getattr(copies, name)

        def copy_and_compile(*arguments: Any, copy: Any = copy, length: int = len(name)) -> Any:
            jnp.ones(length + 30).at[3].multiply(1.75).block_until_ready()
            return copy(*arguments)

        setattr(copies, name, copy_and_compile)
    cluster.add([PREFIX], 4)
    cluster.front.run()
    stats = cluster.front.stats().values()
    assert all(each.engine.compilations_after_warm_up > 0 for each in stats)


@pytest.mark.slow
def test_nothing_is_compiled_after_warm_up(model):
    """Nodes as a user creates them, without `fresh_runner`, with parts of 1 to 37 blocks."""
    exchange = InProcessExchange()
    sizes: dict[str, Any] = {
        "block_size": 4,
        "num_blocks": 61,  # so that no other test has compiled the same
        "token_budget": 16,
        "max_running": 2,
        "max_model_len": 160,
        "timing": TIMING,
        "epoch": 1,
        "now": 0.0,
    }
    prefill = PrefillEngine(
        model("llama"), InProcessTransport(exchange), order="prefill_complete", **sizes
    )
    decode = DecodeEngine(model("llama"), InProcessTransport(exchange), **sizes)
    ticks = count()
    front = Disaggregated([prefill], [decode], clock=lambda: next(ticks) * STEP_S)
    prompts = [[100 + n, *range(300, 300 + n)] for n in (1, 3, 7, 14, 30, 60, 146)]
    requests = [Request(str(i), prompt, 1 + i) for i, prompt in enumerate(prompts)]
    for request in requests:
        front.add_request(request)
    assert len(front.run()) == len(requests) and front.failures == {}
    warm_up = [node.stats().engine.compilations_at_warm_up for node in (prefill, decode)]
    late = [node.stats().engine.compilations_after_warm_up for node in (prefill, decode)]
    # Copies of 1 to 32 blocks; P extends by 16 tokens, D decodes one row or two besides.
    # Those that draw and that send a request may be another engine's.
    assert 7 <= warm_up[0] <= 7 + 2 and warm_up[1] == 8 and late == [0, 0]
    assert front.close()


@given(st.integers(1, 300), st.sampled_from([1, 2, 8, 32]))
def test_a_part_is_cut_without_padding(num_blocks, max_blocks):
    pieces = list(exact_pieces(num_blocks, max_blocks))
    sizes = [piece.stop - piece.start for piece in pieces]
    assert [i for piece in pieces for i in range(piece.start, piece.stop)] == [*range(num_blocks)]
    assert all(size & (size - 1) == 0 and size <= max_blocks for size in sizes)
    assert sizes == sorted(sizes, reverse=True)
    assert len(sizes) == num_blocks // max_blocks + (num_blocks % max_blocks).bit_count()

"""Prefetch: blocks in storage are loaded to the host before their request is admitted."""

from typing import cast

import numpy as np
import pytest

from radixkv.kvcache import NamespaceError, OpKind, Prefetch, TokenError

from .tier_memory import TierMemory

TOKENS = [1, 2, 3, 4]


def memory_with(stored: list[int], num_blocks: int = 4, host_blocks: int = 4) -> TierMemory:
    """An empty cache over storage that has the KV of some tokens, a token per block."""
    memory = TierMemory(num_blocks, host_blocks, storage=True)
    keys = memory.namespace.block_keys(stored)
    memory.storage = {key: (b"", tuple(stored[: i + 1])) for i, key in enumerate(keys)}
    return memory


def ask(memory: TierMemory, tokens: list[int] = TOKENS) -> Prefetch:
    prefetch = memory.tiers.prefetch(tokens)
    assert prefetch is not None
    memory.manager.check()
    return prefetch


def test_lookup_then_load_then_hit():
    memory, tokens = memory_with([1, 2, 3]), list(TOKENS)
    prefetch = ask(memory, tokens)
    lookup = memory.one(OpKind.LOOKUP)
    assert lookup.keys == tuple(memory.namespace.block_keys(TOKENS))
    assert (lookup.num_blocks, len(lookup.sources), len(lookup.destinations)) == (4, 0, 0)
    memory.finish(lookup)
    load = memory.one(OpKind.STORAGE_TO_HOST)
    assert load.keys == lookup.keys[:3]
    assert (len(load.sources), len(load.destinations)) == (0, 3)
    assert not prefetch.done
    assert memory.residency(TOKENS) == ""
    memory.finish(load)
    assert (prefetch.done, prefetch.first_block, prefetch.num_blocks) == (True, 0, 3)
    assert memory.residency(TOKENS) == "hhh"
    assert memory.stats.fetched_blocks == 3
    memory.serve(TOKENS)  # reads what came
    assert tokens == TOKENS


def test_only_blocks_on_neither_device_nor_host_are_looked_up():
    memory = memory_with(TOKENS)
    memory.serve([1, 2])
    memory.manager.evict(1)
    memory.settle()
    prefetch = ask(memory)
    assert prefetch.first_block == 2
    lookup = memory.one(OpKind.LOOKUP)
    assert lookup.keys == tuple(memory.namespace.block_keys(TOKENS)[2:])
    memory.finish(lookup)
    memory.settle()
    assert memory.residency(TOKENS) == "dhhh"
    memory.serve(TOKENS)


@pytest.mark.parametrize("num_there", range(4))
@pytest.mark.parametrize("num_evicted", range(5))
@pytest.mark.parametrize("num_shared", range(1, 4))
def test_the_keys_are_those_of_the_path_wherever_a_prompt_leaves_others(
    num_shared, num_evicted, num_there
):
    """What is there ends on the device or on the host, with a run or inside it, after others."""
    memory = memory_with([], 8, 8)
    memory.serve([*[1, 2, 3][:num_shared], 7])
    memory.serve([1, 2, 3])
    memory.manager.evict(num_evicted)
    memory.settle()
    tokens = [*[1, 2, 3][:num_there], 8, 9]
    assert ask(memory, tokens).first_block == num_there
    lookup = memory.one(OpKind.LOOKUP)
    assert lookup.keys == tuple(memory.namespace.block_keys(tokens)[num_there:])


def test_the_keys_have_the_namespace_of_the_request():
    memory = memory_with([])
    memory.tiers.prefetch(TOKENS, b"lora")
    lookup = memory.one(OpKind.LOOKUP)
    assert lookup.keys == tuple(memory.namespace.block_keys(TOKENS, b"lora"))


# What can go wrong


@pytest.mark.parametrize(
    ("there", "num_blocks"),
    [([True, False, True, True], 1), ([False, True, True, True], 0), ([False] * 4, 0)],
)
def test_only_the_leading_blocks_are_loaded(there, num_blocks):
    memory = memory_with(TOKENS)
    prefetch = ask(memory)
    memory.finish(memory.one(OpKind.LOOKUP), there)
    assert prefetch.done is (num_blocks == 0)
    memory.settle()
    assert (prefetch.done, prefetch.num_blocks) == (True, num_blocks)
    assert memory.residency(TOKENS) == "h" * num_blocks
    assert memory.stats.host_free_blocks == 4 - num_blocks


@pytest.mark.parametrize(("ok", "num_blocks"), [([True, False, True, True], 1), ([False] * 4, 0)])
@pytest.mark.parametrize("fenced", [True, False])
def test_storage_loses_a_block_after_the_lookup(ok, num_blocks, fenced):
    memory = memory_with(TOKENS)
    prefetch = ask(memory)
    memory.finish(memory.one(OpKind.LOOKUP))
    load = memory.one(OpKind.STORAGE_TO_HOST)
    memory.finish(load, ok, fenced=fenced)
    assert (prefetch.done, prefetch.num_blocks) == (True, num_blocks)
    assert memory.residency(TOKENS) == "h" * num_blocks
    if not fenced:  # the request goes on; what has not come may still be written
        assert memory.stats.host_free_blocks == 0
        memory.manager.check()
        memory.fence(load)
    assert memory.stats.host_free_blocks == 4 - num_blocks
    memory.manager.check()


def test_a_lookup_is_used_before_its_fence():
    memory = memory_with([1, 2, 3])
    prefetch = ask(memory)
    lookup = memory.one(OpKind.LOOKUP)
    memory.finish(lookup, fenced=False)
    memory.manager.check()
    assert memory.one(OpKind.STORAGE_TO_HOST).num_blocks == 3
    memory.fence(lookup)
    memory.settle()
    assert (prefetch.done, prefetch.num_blocks) == (True, 3)


def test_as_many_as_the_host_has_room_for():
    memory = memory_with(TOKENS, host_blocks=3)
    memory.demote([9])
    lease = memory.start([9])
    prefetch = ask(memory)
    memory.finish(memory.one_of(OpKind.LOOKUP))
    [load] = memory.take()  # what is being read stays
    assert load.num_blocks == 2
    memory.settle()
    assert prefetch.num_blocks == 2
    assert memory.residency(TOKENS) == "hh"
    memory.compute(lease, [9])


def test_no_room_at_all_on_the_host():
    memory = memory_with(TOKENS, num_blocks=4, host_blocks=1)
    memory.demote([9])
    memory.start([9])
    prefetch = ask(memory)
    memory.finish(memory.one_of(OpKind.LOOKUP))
    assert memory.take() == []
    assert (prefetch.done, prefetch.num_blocks) == (True, 0)
    memory.settle()


@pytest.mark.parametrize(("evicted", "left"), [(1, "d"), (2, "")])
def test_what_it_follows_is_dropped_meanwhile(evicted, left):
    memory = memory_with(TOKENS, host_blocks=2)
    memory.serve_without_copies([1, 2])
    ask(memory)
    memory.finish(memory.one(OpKind.LOOKUP))
    load = memory.one(OpKind.STORAGE_TO_HOST)
    memory.manager.evict(evicted)  # there is no room for it on the host
    memory.finish(load)
    assert memory.residency(TOKENS) == left
    assert memory.stats.host_free_blocks == 2
    memory.manager.check()


def test_what_it_follows_on_the_host_is_kept():
    memory = memory_with([1, 2, 3], host_blocks=3)
    memory.demote([1, 2])
    prefetch = ask(memory)
    assert memory.drop_order() == []
    memory.settle()
    assert (prefetch.num_blocks, memory.residency(TOKENS)) == (1, "hhh")
    assert len(memory.drop_order()) == 3


def test_others_published_it_meanwhile():
    memory = memory_with(TOKENS, num_blocks=6, host_blocks=4)
    prefetch = ask(memory)
    memory.finish(memory.one(OpKind.LOOKUP))
    load = memory.one(OpKind.STORAGE_TO_HOST)
    memory.serve_without_copies([1, 2, 9])
    memory.finish(load)
    assert prefetch.num_blocks == 4
    assert memory.residency(TOKENS) == "ddhh"
    assert (memory.stats.fetched_blocks, memory.stats.host_free_blocks) == (4, 2)
    memory.manager.check()
    memory.serve(TOKENS)


def test_others_have_all_of_it_meanwhile():
    memory = memory_with([1, 2])
    ask(memory, [1, 2])
    memory.finish(memory.one(OpKind.LOOKUP))
    load = memory.one(OpKind.STORAGE_TO_HOST)
    memory.serve_without_copies([1, 2])
    memory.finish(load)
    assert memory.residency([1, 2]) == "dd"
    assert (memory.stats.fetched_blocks, memory.stats.host_free_blocks) == (2, 4)
    memory.manager.check()


# Cancelled


def test_cancelled_before_it_was_asked():
    memory = memory_with(TOKENS)
    prefetch = ask(memory)
    memory.tiers.cancel(prefetch)
    assert (prefetch.done, prefetch.num_blocks) == (True, 0)
    assert memory.take() == []
    memory.manager.check()


def test_cancelled_while_it_is_asked():
    memory = memory_with(TOKENS)
    prefetch = ask(memory)
    lookup = memory.one(OpKind.LOOKUP)
    memory.tiers.cancel(prefetch)
    assert memory.tiers.take_cancelled() == [lookup.id]
    assert not memory.finish(lookup)
    assert memory.take() == []
    assert prefetch.done
    memory.manager.check()


def test_cancelled_between_the_answer_and_its_fence():
    memory = memory_with(TOKENS)
    prefetch = ask(memory)
    lookup = memory.one(OpKind.LOOKUP)
    memory.finish(lookup, fenced=False)
    memory.tiers.cancel(prefetch)
    memory.fence(lookup)
    assert memory.take() == []
    assert prefetch.done
    memory.manager.check()


def test_cancelled_before_it_is_loaded():
    memory = memory_with(TOKENS)
    prefetch = ask(memory)
    memory.finish(memory.one(OpKind.LOOKUP))
    memory.tiers.cancel(prefetch)
    assert memory.take() == []
    assert prefetch.done
    assert memory.stats.host_free_blocks == 4
    memory.manager.check()


def test_cancelled_while_it_is_loaded():
    memory = memory_with(TOKENS)
    prefetch = ask(memory)
    memory.finish(memory.one(OpKind.LOOKUP))
    load = memory.one(OpKind.STORAGE_TO_HOST)
    memory.tiers.cancel(prefetch)
    assert memory.tiers.take_cancelled() == [load.id]
    assert memory.stats.host_free_blocks == 0  # still written
    memory.manager.check()
    assert not memory.finish(load)
    assert (prefetch.done, prefetch.num_blocks) == (True, 0)
    assert memory.residency(TOKENS) == ""
    assert memory.stats.host_free_blocks == 4
    memory.manager.check()


def test_cancelled_when_it_has_ended():
    memory = memory_with(TOKENS)
    prefetch = ask(memory)
    memory.settle()
    memory.tiers.cancel(prefetch)
    assert (prefetch.done, prefetch.num_blocks) == (True, 4)
    assert memory.residency(TOKENS) == "hhhh"
    assert memory.tiers.take_cancelled() == []


# Nothing to ask, and what is refused


def test_nothing_to_ask_for():
    memory = memory_with(TOKENS)
    assert memory.tiers.prefetch([]) is None
    memory.serve([1, 2])
    assert memory.tiers.prefetch([1, 2]) is None
    memory.manager.evict(1)
    memory.settle()
    assert memory.tiers.prefetch([1, 2]) is None
    assert TierMemory(2, 2).tiers.prefetch([1]) is None  # there is no storage
    assert memory.take() == []


def test_arguments_of_the_wrong_kind():
    memory = memory_with(TOKENS)
    with pytest.raises(TokenError) as caught:
        memory.tiers.prefetch(np.array([1.0]))
    assert str(caught.value) == "tokens must be int32, got float64"
    with pytest.raises(NamespaceError) as refused:
        memory.tiers.prefetch([1], cast(bytes, "lora"))
    assert str(refused.value) == "namespace must be bytes, got 'lora'"
    assert memory.take() == []

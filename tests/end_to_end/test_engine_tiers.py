"""The engine over host and storage tiers: tokens do not depend on where KV was."""

import re
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import jax
import pytest

from radixkv.kvcache import HostConfig, RadixKVError, StorageConfigError
from radixkv.kvcache.storage import BackendOptions, Kind, Status, StorageWorkers, open_backend
from radixkv.kvcache.storage.object_storage import ObjectStorageBackend, memory_store
from radixkv.kvcache.tiers import storage_recency as storage_uses
from radixkv.scheduler.engine import Engine, make_storage_namespace
from radixkv.scheduler.errors import ConfigError, EngineClosedError
from radixkv.scheduler.request import Request, SamplingParams

from ..kvcache.driving import FakeStorage
from .conftest import MAX_MODEL_LEN, assert_nothing_leaked, complete, fresh, let_copies_end
from .test_engine import PROMPTS, SAMPLED

LONG_S = 1000.0
WRITES = ("exclusive", "back", "through")


@contextmanager
def files(directory: Path) -> Iterator[StorageWorkers]:
    """Open a directory as storage, and close it at the end."""
    backend = open_backend(f"file://{directory}", BackendOptions(max_bytes=2**30))
    storage = StorageWorkers(backend, max_bytes_in_flight=2**28)
    yield storage
    assert storage.close(timeout_s=LONG_S)


@pytest.fixture
def compiled(engine) -> Engine:
    return engine("llama", 4)


@pytest.fixture
def expected(compiled) -> list[list[int]]:
    """Return the tokens of an engine without any cache."""
    return complete(fresh(compiled, prefix_cache=False), PROMPTS, 24, SAMPLED)


def finish(engine: Engine) -> None:
    """Close an engine; check that all copies have ended."""
    assert_nothing_leaked(engine)
    assert engine.close(timeout_s=LONG_S)
    engine.manager.check()
    tiers = engine.stats().cache.tiers
    assert tiers is not None and tiers.parked == 0
    assert tiers.open_operations == tiers.quarantined_operations == 0
    assert tiers.host_free_blocks + tiers.host_cached_blocks == tiers.host_blocks
    assert engine.stats().compilations_after_warm_up == 0


@pytest.mark.parametrize("write", WRITES)
def test_a_host_tier_does_not_change_a_token_and_is_hit(compiled, expected, write):
    serving = fresh(compiled, num_blocks=28, host=HostConfig(100, write))
    outputs = [complete(serving, [prompt], 24, [SAMPLED[i % 4]])[0]
               for i, prompt in enumerate(PROMPTS)]  # fmt: skip
    assert outputs == expected
    # Other blocks evict the prompts from the device; then they are loaded from the host.
    complete(serving, [[i + 1, *range(200 + i, 270 + i)] for i in range(2)], 24)
    let_copies_end(serving._runner)
    assert complete(serving, PROMPTS, 24, SAMPLED) == expected
    stats = serving.stats()
    assert stats.scheduler.host_hit_tokens > 0
    assert stats.copies is not None and stats.copies.copied_bytes["host to device"] > 0
    finish(serving)


@pytest.mark.parametrize(("preempt", "write"), list(product(["recompute", "host"], WRITES)))
def test_forced_preemption_does_not_change_a_token(compiled, expected, preempt, write):
    serving = fresh(
        compiled, num_blocks=28, host=HostConfig(64, write), preempt=preempt, reserve_tokens=0
    )
    assert complete(serving, PROMPTS, 24, SAMPLED) == expected
    stats = serving.stats().scheduler
    assert stats.preemptions > 0
    assert stats.parked == stats.resumed_parked == (stats.preemptions if preempt == "host" else 0)
    if preempt == "host":
        assert stats.recomputed_tokens == 0
    finish(serving)


def test_a_conversation_survives_its_engine_in_files(compiled, model, expected, tmp_path):
    namespace = make_storage_namespace(model("llama"), "tiny", 4)
    hits, prefill = [], []
    for _ in range(2):
        with files(tmp_path / "blocks") as storage:
            serving = fresh(
                compiled,
                num_blocks=28,
                host=HostConfig(64, "through"),
                storage=storage,
                storage_namespace=namespace,
                preempt="storage",
                reserve_tokens=0,
            )
            assert complete(serving, PROMPTS, 24, SAMPLED) == expected
            stats = serving.stats().scheduler
            assert stats.parked > 0
            hits.append(stats.storage_hit_tokens)
            prefill.append(stats.prefill_tokens)
            finish(serving)
    assert hits[0] == 0 < hits[1]
    assert prefill[1] < prefill[0]


def test_prompt_tokens_are_counted_by_source_tier(compiled, model, tmp_path, monkeypatch):
    monkeypatch.setattr(storage_uses, "REPORT_INTERVAL", 0)  # of each use, storage is told
    namespace = make_storage_namespace(model("llama"), "tiny", 4)
    prompt = PROMPTS[0]
    parts = []
    for _ in range(2):
        with files(tmp_path / "blocks") as storage:
            serving = fresh(
                compiled,
                host=HostConfig(64, "through"),
                storage=storage,
                storage_namespace=namespace,
            )
            request = Request("a", prompt, 3)
            serving.add_request(request)
            serving.run()
            stats = serving.stats().scheduler
            parts.append((stats.hit_tokens, stats.storage_hit_tokens, stats.prefill_tokens))
            finish(serving)
        with closing(
            open_backend(f"file://{tmp_path}/blocks", BackendOptions(max_bytes=2**30))
        ) as backend:
            order = [value.key for value in backend.list_values(coldest_first=True)]
        assert order == namespace.block_keys(prompt)[::-1], "the beginning is to go last"
    assert parts == [(0, 0, 41), (0, 40, 1)]


@pytest.mark.parametrize("num_steps", [0, 1, 2, 4, 8, 16])
def test_aborts_leave_nothing_and_do_not_disturb_the_others(compiled, expected, num_steps):
    serving = fresh(
        compiled, num_blocks=28, host=HostConfig(64, "back"), preempt="host", reserve_tokens=0
    )
    requests = [
        Request(str(i), prompt, 24, sampling=SAMPLED[i % 4]) for i, prompt in enumerate(PROMPTS)
    ]
    for request in requests:
        serving.add_request(request)
    for _ in range(num_steps):
        serving.step()
    for request in requests[::2]:
        serving.abort(request.request_id)
    serving.run()
    for request, tokens in zip(requests[1::2], expected[1::2], strict=True):
        assert request.output_tokens == tokens
    finish(serving)


def test_prefetches_of_an_aborted_request_are_cancelled(compiled, model):
    storage: Any = FakeStorage()
    namespace = make_storage_namespace(model("llama"), "tiny", 4)
    host = HostConfig(64, "back")  # nothing is stored
    serving = fresh(compiled, host=host, storage=storage, storage_namespace=namespace)
    serving.add_request(Request("stays", [7], 8))  # less than a block: nothing to ask for
    serving.add_request(Request("goes", PROMPTS[0], 8))
    serving.step()
    [lookup] = storage.asked
    storage.end(lookup, [Status.FOUND] * len(lookup.keys), fenced=True)
    serving.step()
    load = storage.asked[-1]
    assert load.kind is Kind.LOAD and not load.ended
    serving.abort("goes")
    serving.step()
    assert load.ended
    stats = serving.stats()
    assert stats.copies is not None and stats.cache.tiers is not None
    assert stats.copies.operations["storage to host: cancelled"] == 1
    assert stats.cache.tiers.host_free_blocks == 64 - len(lookup.keys)  # it may still write
    load.fenced = True
    serving.run()
    finish(serving)


# Other weights


def test_after_a_reset_the_new_weights_decide(compiled, model):
    old = model("llama")
    new = replace(old, params=jax.tree.map(lambda leaf: leaf * 1.01, old.params))
    prompts = PROMPTS[:4]

    def started() -> tuple[Engine, list[Request]]:
        serving = fresh(
            compiled, num_blocks=40, host=HostConfig(64, "through"), preempt="host",
            reserve_tokens=0,
        )  # fmt: skip
        requests = [Request(str(i), prompt, 20) for i, prompt in enumerate(prompts)]
        for request in requests:
            serving.add_request(request)
        for _ in range(10):
            serving.step()
        return serving, requests

    serving, requests = started()
    serving.reset_cache(params=new.params)  # reads the steps in flight, of the old weights
    before = [list(request.output_tokens) for request in requests]
    assert any(before)
    serving.run()
    finish(serving)
    # An engine that always had the new weights continues in the same way from each state.
    other = fresh(compiled)
    other._runner.model = new
    for request, outputs in zip(requests, before, strict=True):
        assert request.output_tokens[: len(outputs)] == outputs
        [rest] = complete(other, [[*request.prompt.tolist(), *outputs]], 20 - len(outputs))
        assert request.output_tokens[len(outputs) :] == rest
    unchanged, others = started()
    unchanged.run()
    finish(unchanged)
    assert [r.output_tokens for r in others] != [r.output_tokens for r in requests]


def refused(error: type[RadixKVError], text: str):
    return pytest.raises(error, match=f"^{re.escape(text)}$")


def test_other_weights_must_fit_and_have_a_name_of_their_own(compiled, model, tmp_path):
    params = model("llama").params
    namespace = make_storage_namespace(model("llama"), "first", 4)
    with files(tmp_path / "blocks") as storage:
        serving = fresh(compiled, host=HostConfig(8), storage=storage, storage_namespace=namespace)
        text = "params must have the same shapes and dtypes as those of the model"
        with refused(ConfigError, text):
            serving.reset_cache(params=model("qwen3").params, weights_revision="second")
        text = "storage has KV of weights_revision 'first': other weights need a name of their own"
        for revision in ("", "first"):
            with refused(ConfigError, text):
                serving.reset_cache(params=params, weights_revision=revision)
        serving.reset_cache(params=params, weights_revision="second")
        assert serving.manager.tiers is not None
        assert serving.manager.tiers.storage == replace(namespace, weights_revision="second")
        finish(serving)


def test_weights_that_come_back_under_their_name_find_what_they_stored(compiled, model, tmp_path):
    first = model("llama").params
    params = {"first": first, "second": jax.tree.map(lambda leaf: leaf * 1.01, first)}
    namespace = make_storage_namespace(model("llama"), "first", 4)
    prompt = PROMPTS[0]  # 10 blocks and a token
    with files(tmp_path / "blocks") as storage:
        serving = fresh(
            compiled,
            host=HostConfig(64, "through"),
            storage=storage,
            storage_namespace=namespace,
        )
        outputs, hits = [complete(serving, [prompt], 8)], []
        for name in ("second", "first", "second"):
            let_copies_end(serving._runner)
            serving.reset_cache(params=params[name], weights_revision=name)
            outputs.append(complete(serving, [prompt], 8))
            hits.append(serving.stats().scheduler.storage_hit_tokens)
        finish(serving)
    assert outputs[0] == outputs[2] != outputs[1] == outputs[3]
    assert hits == [0, 40, 80]


def test_new_weights_store_where_an_engine_that_starts_with_them_looks(compiled, model):
    """In a server or bucket, names begin with the digits of the namespace."""
    first = model("llama").params
    second = jax.tree.map(lambda leaf: leaf * 1.01, first)
    store = memory_store()

    @contextmanager
    def serve(revision):
        namespace = make_storage_namespace(model("llama"), revision, 4)
        backend = ObjectStorageBackend(store, prefix="kv", namespace=namespace.digits)
        with closing(StorageWorkers(backend, max_bytes_in_flight=2**28)) as storage:
            host = HostConfig(64, "through")
            serving = fresh(compiled, host=host, storage=storage, storage_namespace=namespace)
            yield serving
            finish(serving)

    with serve("first") as serving:
        complete(serving, [PROMPTS[0]], 8)  # 10 blocks and a token
        let_copies_end(serving._runner)
        serving.reset_cache(params=second, weights_revision="second")
        expected = complete(serving, [PROMPTS[0]], 8)
    for revision in ("first", "second"):
        with serve(revision) as serving:
            if revision == "second":
                serving.reset_cache(params=second, weights_revision="third")
                serving.reset_cache(params=second, weights_revision="second")
                assert complete(serving, [PROMPTS[0]], 8) == expected
            else:
                assert complete(serving, [PROMPTS[0]], 8) != expected
            assert serving.stats().scheduler.storage_hit_tokens == 40


# Invalid options


def test_a_storage_that_does_not_fit_is_refused(model, tmp_path):
    sizes = {"block_size": 4, "num_blocks": 32, "token_budget": 8, "max_running": 2}
    right = make_storage_namespace(model("llama"), "tiny", 4)
    with files(tmp_path / "blocks") as storage:

        def make(**options) -> None:
            Engine(model("llama"), max_model_len=MAX_MODEL_LEN, **{**sizes, **options})

        text = "storage and storage_namespace go together: one was given alone"
        with refused(ConfigError, text):
            make(host=HostConfig(8), storage=storage)
        with refused(ConfigError, text):
            make(host=HostConfig(8), storage_namespace=right)
        text = "storage_namespace has layers (0, 5), the model (0, 2)"
        with refused(ConfigError, text):
            wrong = replace(right, layers=(0, 5))
            make(host=HostConfig(8), storage=storage, storage_namespace=wrong)
        text = "storage needs a host tier, because its blocks pass through the host"
        with refused(StorageConfigError, text):
            make(storage=storage, storage_namespace=right)


def test_a_namespace_names_the_model_and_how_a_block_looks(model):
    llama = make_storage_namespace(model("llama"), "tiny", 4, salt=b"tenant")
    assert llama.kv_dtype == "float32" and llama.salt == b"tenant"
    assert (llama.layers, llama.heads, llama.block_size) == ((0, 2), (0, 2), 4)
    others = [
        make_storage_namespace(model("qwen3"), "tiny", 4, salt=b"tenant"),
        make_storage_namespace(model("llama"), "other", 4, salt=b"tenant"),
        make_storage_namespace(model("llama"), "tiny", 8, salt=b"tenant"),
        make_storage_namespace(model("llama"), "tiny", 4),
    ]
    assert len({each.digest() for each in (llama, *others)}) == 5


def test_an_engine_with_a_host_tier_serves_nothing_after_close(compiled):
    serving = fresh(compiled, host=HostConfig(8))
    serving.add_request(Request("left", [5, 6], 2))
    assert serving.close(timeout_s=LONG_S)
    with refused(EngineClosedError, "the engine is closed"):
        serving.add_request(Request("late", [5, 6], 2))
    with refused(EngineClosedError, "the engine is closed"):
        serving.run()
    assert serving.abort("left")
    finish(serving)  # close may be called again
    assert serving.stats().steps == 0


def test_a_storage_is_open_until_the_copies_that_use_it_have_ended():
    serving: Any = Engine.__new__(Engine)
    serving._on_events, serving._runner, serving._opened = None, Mock(), Mock()
    serving._runner.close.return_value = False
    assert not serving.close(timeout_s=5.0)
    serving._runner.close.assert_called_once_with(5.0)
    assert not serving._opened.close.called
    serving._runner.close.return_value = True
    for has_closed in (False, True):
        serving._opened.close.return_value = has_closed
        assert serving.close() == has_closed


def test_without_tiers_close_does_nothing(compiled):
    serving = fresh(compiled)
    assert serving.close()
    complete(serving, [[5, 6]], 2, [SamplingParams()])
    assert serving.stats().copies is None

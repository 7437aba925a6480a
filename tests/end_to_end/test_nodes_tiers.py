"""Prefill and decode nodes over storage, and with other weights: the tokens of one engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import pytest

from radixkv.kvcache import HostConfig
from radixkv.kvcache.storage import BackendOptions, StorageWorkers, open_backend
from radixkv.scheduler.engine import Engine, make_storage_namespace
from radixkv.scheduler.errors import ConfigError, EngineClosedError, HandoffsOpenError
from radixkv.scheduler.models import Params
from radixkv.scheduler.nodes import DecodeEngine
from radixkv.scheduler.request import Request

from ..kvcache.storage.memory import MemoryBackend
from .cluster import Cluster
from .conftest import complete, fresh, let_copies_end
from .test_engine import PREFIX, PROMPTS, SAMPLED

LONG_S = 1000.0


@contextmanager
def over_files(llama: Engine, directory: Path, **decode: Any) -> Iterator[Cluster]:
    """A node of each role, each with a directory of blocks, until they are closed."""
    namespace = make_storage_namespace(llama._runner.model, "tiny", 4)
    with ExitStack() as stack:

        def options(role: str) -> dict[str, Any]:
            backend = open_backend(f"file://{directory}/{role}", BackendOptions(max_bytes=2**30))
            storage = StorageWorkers(backend, max_bytes_in_flight=2**28)
            stack.callback(storage.close, timeout_s=LONG_S)
            return {
                "weights_revision": "tiny",
                "host": HostConfig(64, "through"),
                "storage": storage,
                "storage_namespace": namespace,
            }

        cluster = Cluster(llama, prefill=options("p"), decode=options("d") | decode)
        yield cluster
        assert cluster.front.close(timeout_s=LONG_S)


def let_copies_end_at_once(cluster: Cluster, *, decode: bool = True) -> None:
    """Stop the clock while nodes wait for storage, so that a slow disk changes no order."""
    clock = cluster.front._clock

    def pause() -> float:
        for node in cluster.front._nodes() if decode else [cluster.p]:
            let_copies_end(node._runner)
        return clock()

    cluster.front._clock = pause


def test_kv_survives_its_nodes_in_files(llama: Engine, tmp_path: Path) -> None:
    expected = complete(fresh(llama), PROMPTS, 24, SAMPLED)
    tight = {"num_blocks": 28, "reserve_tokens": 0, "preempt": "storage"}
    found, computed = [], []
    for _ in range(2):
        with over_files(llama, tmp_path, **tight) as cluster:
            let_copies_end_at_once(cluster, decode=False)
            assert cluster.complete(PROMPTS, 24, SAMPLED) == expected
            prefill, decode = (each.engine.scheduler for each in cluster.front.stats().values())
            assert decode.parked > 0
            found.append(prefill.storage_hit_tokens)
            computed.append(prefill.prefill_tokens)
    assert found[0] == 0 < found[1]
    assert computed[1] < computed[0]


@pytest.mark.parametrize("stream", [False, True])
def test_preempted_requests_move_to_a_decode_node_with_room(llama: Engine, stream: bool) -> None:
    expected = complete(fresh(llama), PROMPTS, 24, SAMPLED)
    backend = MemoryBackend()
    stores = [StorageWorkers(backend, max_bytes_in_flight=2**28) for _ in range(3)]
    namespace = make_storage_namespace(llama._runner.model, "", 4)
    options: dict[str, Any] = {"host": HostConfig(64), "storage_namespace": namespace}
    sizes: list[dict[str, Any]] = [
        {"num_blocks": 24, "preempt": "storage", "reserve_tokens": 0},
        {"num_blocks": 120, "reserve_tokens": 0},
    ]
    nodes = [options | {"storage": each} for each in stores]
    shares = [own | size for own, size in zip(nodes[1:], sizes, strict=True)]

    class Unequal(Cluster):
        def new_decode(self) -> DecodeEngine:
            self.decode_options = shares.pop(0)
            return super().new_decode()

    cluster = Unequal(llama, num_decode=2, prefill=nodes[0], front={"stream": stream})
    let_copies_end_at_once(cluster)
    assert cluster.complete(PROMPTS, 24, SAMPLED) == expected
    small, roomy = (node.stats().engine.scheduler for node in cluster.front.decode.values())
    assert small.preemptions >= cluster.front.num_moved > 0 == roomy.preemptions
    assert small.admitted + roomy.admitted == len(PROMPTS) + cluster.front.num_moved
    assert roomy.storage_hit_tokens > 0
    assert small.resumed == small.preemptions - cluster.front.num_moved
    assert sum(each.num_preemptions for each in cluster.requests) == small.preemptions
    for each in cluster.requests:
        found = each.num_hit_tokens + each.num_host_hit_tokens + each.num_storage_hit_tokens
        assert found < each.num_prompt_tokens
    assert cluster.front.close(timeout_s=LONG_S)
    assert all([each.close(timeout_s=LONG_S) for each in stores])


def test_storage_must_have_the_weights_of_the_node(llama: Engine) -> None:
    namespace = make_storage_namespace(llama._runner.model, "tiny", 4)
    text = r"^storage_namespace must have weights_revision '' as the node, got 'tiny'$"
    options = {"host": HostConfig(8), "storage_namespace": namespace}
    for prefill, decode in ((options, {}), ({}, options)):
        with pytest.raises(ConfigError, match=text):
            Cluster(llama, prefill=prefill, decode=decode)


def test_nodes_with_a_host_tier_serve_nothing_after_close(llama: Engine) -> None:
    cluster = Cluster(llama, prefill={"host": HostConfig(8)}, decode={"host": HostConfig(8)})
    assert cluster.front.close(timeout_s=LONG_S)
    request = Request("late", PREFIX, 4)
    uses: list[Callable[[], object]] = [
        lambda: cluster.p.begin(request, "decode-0"),
        lambda: cluster.p.poll(0.0),
        lambda: cluster.d.poll(0.0),
        lambda: cluster.front.add_request(request),
        cluster.front.step,
    ]
    for use in uses:
        with pytest.raises(EngineClosedError, match=r"^the engine is closed$"):
            use()
    assert not cluster.front.has_work


# Other weights


@pytest.fixture
def other(llama: Engine) -> Engine:
    """An engine with the other weights from the start."""
    model = llama._runner.model
    engine = fresh(llama)
    params = jax.tree.map(lambda leaf: leaf * 1.01, model.params)
    engine._runner.model = replace(model, params=params)
    return engine


def reset(cluster: Cluster, params: Params, *roles: str) -> None:
    """Give nodes other weights when no hand-off holds blocks."""
    nodes = [cluster.p if role == "prefill" else cluster.d for role in roles]
    for node in nodes:
        node.scheduler.drain("other weights come")
    while nodes:
        try:
            nodes[0].reset_cache(params=params, weights_revision="second")
        except HandoffsOpenError:
            cluster.front.step()
        else:
            del nodes[0]


@pytest.mark.parametrize("num_steps", [0, 3, 6])
def test_after_a_reset_nodes_use_the_new_weights(
    llama: Engine, other: Engine, num_steps: int
) -> None:
    host = {"host": HostConfig(64, "through")}
    cluster = Cluster(llama, prefill={"token_budget": 16, **host}, decode=host)
    before = cluster.complete(PROMPTS, 24, SAMPLED)
    requests = cluster.add(PROMPTS, 24, SAMPLED)
    cluster.step(num_steps)
    reset(cluster, other._runner.model.params, "decode", "prefill")
    cluster.finish()
    assert cluster.front.failures == {}
    assert all(len(request.output_tokens) == 24 for request in requests)
    after = complete(other, PROMPTS, 24, SAMPLED)
    assert after != before
    assert cluster.complete(PROMPTS, 24, SAMPLED) == after
    assert cluster.front.close()


def test_all_nodes_are_reset_by_one_call(llama: Engine, other: Engine) -> None:
    options = {"host": HostConfig(64, "through")}
    cluster = Cluster(
        llama,
        num_prefill=2,
        prefill=options | {"token_budget": 16},
        decode=options,
        front={"max_attempts": 1},
    )
    before = cluster.complete(PROMPTS, 24, SAMPLED)
    requests = cluster.add(PROMPTS, 24, SAMPLED)
    while not (cluster.d.num_open_handoffs and cluster.d.scheduler.running):
        cluster.step(1)
    cluster.front.reset_cache(params=other._runner.model.params, weights_revision="second")
    for node in cluster.front._nodes():
        stats = node.manager.stats()
        assert stats.cached_blocks == stats.private_blocks == 0
    cluster.finish()
    assert cluster.front.failures == {}  # one attempt was enough: the reset counts as none
    assert all(len(request.output_tokens) == 24 for request in requests)
    after = complete(other, PROMPTS, 24, SAMPLED)
    assert after != before
    assert cluster.complete(PROMPTS, 24, SAMPLED) == after
    assert cluster.front.close()


@pytest.mark.parametrize("num_turns", [0, 1])
def test_an_interrupted_reset_changes_nothing(
    llama: Engine, monkeypatch: pytest.MonkeyPatch, num_turns: int
) -> None:
    cluster = Cluster(llama)
    expected = cluster.complete(PROMPTS, 24, SAMPLED)
    requests = cluster.add(PROMPTS, 24, SAMPLED)
    while not (cluster.d.num_open_handoffs and cluster.d.scheduler.running):
        cluster.step(1)
    advance = cluster.front._advance

    def interrupted() -> None:
        for _ in range(num_turns):
            advance()
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(cluster.front, "_advance", interrupted)
        cluster.front.reset_cache()
    cluster.finish()
    assert [request.output_tokens for request in requests] == expected
    cluster.front.reset_cache()
    assert cluster.complete(PROMPTS, 24, SAMPLED) == expected
    assert cluster.front.close()


def test_an_invalid_reset_of_all_nodes_changes_nothing(llama: Engine, model: Any) -> None:
    cluster = Cluster(llama)
    expected = cluster.complete([PREFIX], 4)
    sent = cluster.bytes_on_the_wire()
    text = r"^params must have the same shapes and dtypes as those of the model$"
    with pytest.raises(ConfigError, match=text):
        cluster.front.reset_cache(params=model("qwen3").params, weights_revision="second")
    assert cluster.complete([PREFIX], 4) == expected
    assert cluster.bytes_on_the_wire() == sent  # the caches are as they were
    cluster.front.reset_cache()
    assert cluster.complete([PREFIX], 4) == expected
    assert cluster.bytes_on_the_wire() == 2 * sent


def test_parts_of_other_weights_are_not_taken(llama: Engine, other: Engine) -> None:
    cluster, params = Cluster(llama), other._runner.model.params
    reset(cluster, params, "prefill")
    [failing] = cluster.add([PREFIX], 4)
    cluster.finish()
    assert cluster.front.failures == {
        failing.request_id: "part 0 could not be pulled: of another namespace or model"
    }
    reset(cluster, params, "decode")
    assert cluster.complete([PREFIX], 4) == complete(other, [PREFIX], 4)


def test_an_invalid_reset_changes_nothing(llama: Engine, other: Engine, model: Any) -> None:
    cluster, params = Cluster(llama), other._runner.model.params
    expected = complete(fresh(llama), [PREFIX], 4)
    for node in (cluster.p, cluster.d):
        text = r"^new weights need a weights_revision other than '', got ''$"
        with pytest.raises(ConfigError, match=text):
            node.reset_cache(params=params)
        text = r"^params must have the same shapes and dtypes as those of the model$"
        with pytest.raises(ConfigError, match=text):
            node.reset_cache(params=model("qwen3").params, weights_revision="second")
    cluster.add([PREFIX], 4)
    while not cluster.d.scheduler.num_receiving:
        cluster.front.step()
    for node in (cluster.p, cluster.d):
        with pytest.raises(HandoffsOpenError, match=r"^1 hand-offs hold blocks"):
            node.reset_cache(params=params, weights_revision="second")
    cluster.finish()
    assert cluster.complete([PREFIX], 4) == expected

"""`radixkv generate` over host and storage tiers."""

from __future__ import annotations

import json
import re
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from radixkv.kvcache import HostConfig
from radixkv.kvcache.storage import BackendOptions, Completion, Kind, open_backend
from radixkv.kvcache.storage.workers import StorageWorkers
from radixkv.scheduler.cli import generate
from radixkv.scheduler.cli.shared.model_loading import load_model_of_options
from radixkv.scheduler.engine.model_runner import ModelRunner
from radixkv.scheduler.models import Model
from radixkv.scheduler.models.weights_digest import weights_digest
from radixkv.scheduler.nodes.event_loop import NodeEventLoop
from radixkv.scheduler.nodes.transport.storage_engine import NAMESPACE

from ...kvcache.storage.redis_server import running
from .generating import PROMPTS, run


@pytest.fixture
def expected(radixkv: Any, arguments: list[object]) -> list[list[int]]:
    return run(radixkv, *arguments, "--no-prefix-cache")["outputs"]


class Stopped(Exception):
    """Raised where a test has seen enough."""


@pytest.mark.parametrize("apart", [False, True], ids=["", "apart"])
@pytest.mark.parametrize("has_tiers", [False, True])
def test_engines_in_this_process_get_their_options(
    radixkv: Any,
    arguments: list[object],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    apart: bool,
    has_tiers: bool,
) -> None:
    made: list[tuple[str, dict[str, Any]]] = []

    def recorder(kind: str) -> Callable[..., object]:
        def make(*_: object, **options: Any) -> object:
            made.append((kind, options))
            return object()

        return make

    def stop(*_: object, **__: object) -> None:
        raise Stopped

    for kind in ("PrefillEngine", "DecodeEngine"):
        monkeypatch.setattr(generate, kind, recorder(kind))
    monkeypatch.setattr(generate, "Disaggregated", stop)
    monkeypatch.setattr(generate, "load_model_of_options", lambda *_: None)
    monkeypatch.setattr(generate, "make_storage_namespace", lambda *_: NAMESPACE)

    def make_engine(*_: object, **options: Any) -> None:
        made.append(("Engine", options))
        raise Stopped

    monkeypatch.setattr(generate, "Engine", make_engine)
    given: list[object] = ["--reserve-tokens", "no_evict"]
    if has_tiers:
        given = ["--host-blocks", 7, "--host-write", "back", "--preempt", "storage", "--depth", 3]
        given += ["--storage", (tmp_path / "kv").as_uri(), "--storage-max-bytes", 9000]
        given += ["--reserve-tokens", 5]
    elif not apart:
        given += ["--no-prefix-cache"]
    if apart:
        given += ["--disaggregate", "--transport", "inprocess", "--prefill", 2, "--decode", 3]
    with pytest.raises(Stopped):
        radixkv(*arguments, "--device-blocks", 10, *given)
    kinds = ["PrefillEngine"] * 2 + ["DecodeEngine"] * 3 if apart else ["Engine"]
    assert [kind for kind, _ in made] == kinds
    expected: dict[str, Any] = {
        "block_size": 4,
        "num_blocks": 10,
        "token_budget": 8,
        "max_running": 4,
    }
    expected |= {"max_model_len": 22, "host": HostConfig(7, "back") if has_tiers else None}
    expected |= {"storage_namespace": NAMESPACE if has_tiers else None}
    generation: dict[str, Any] = {"preempt": "storage" if has_tiers else "recompute"}
    generation |= {"reserve_tokens": 5 if has_tiers else None, "depth": 3 if has_tiers else 2}
    for kind, options in made:
        wanted = expected | (generation if kind != "PrefillEngine" else {})
        if kind == "Engine":
            wanted |= {"prefix_cache": has_tiers}
        assert {name: options[name] for name in wanted} == wanted
        assert (options["storage"] is not None) == has_tiers
    if has_tiers:
        assert len({id(options["storage"]) for _, options in made}) == len(made)


@pytest.mark.parametrize("apart", [False, True], ids=["", "apart"])
def test_an_engine_that_fails_is_closed_before_its_storage(
    radixkv: Any,
    arguments: list[object],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    apart: bool,
) -> None:
    """It stores what is still on its way there."""
    events: list[str] = []

    class Failing:
        has_work = True

        def __init__(self, *_: object, **__: object) -> None:
            pass

        def add_request(self, request: object) -> None:
            pass

        def step(self) -> None:
            raise Stopped

        def close(self) -> None:
            events.append("engine")

    @contextmanager
    def opened(*_: object, **__: object) -> Iterator[None]:
        try:
            yield None
        finally:
            events.append("storage")

    monkeypatch.setattr(generate, "load_model_of_options", lambda *_: None)
    monkeypatch.setattr(generate, "make_storage_namespace", lambda *_: NAMESPACE)
    monkeypatch.setattr(generate, "storage_of_options", opened)
    for kind in ("PrefillEngine", "DecodeEngine"):
        monkeypatch.setattr(generate, kind, lambda *_, **__: None)
    for kind in ("Engine", "Disaggregated"):
        monkeypatch.setattr(generate, kind, Failing)
    line = ["--disaggregate", "--transport", "inprocess"] * apart
    with pytest.raises(Stopped):
        radixkv(*arguments, *line)
    assert events == ["engine", *["storage"] * (2 if apart else 1)]


@pytest.mark.slow
@pytest.mark.parametrize("write", ["exclusive", "back", "through"])
def test_parked_requests_have_the_same_outputs(
    radixkv: Any, arguments: list[object], expected: list[list[int]], write: str
) -> None:
    tight = ["--device-blocks", 10, "--reserve-tokens", 0, "--preempt", "host"]
    results = run(radixkv, *arguments, *tight, "--host-blocks", 32, "--host-write", write)
    assert results["outputs"] == expected
    stats = results["stats"]
    assert stats["scheduler"]["parked"] == stats["scheduler"]["resumed_parked"] > 0
    assert stats["copies"]["copied_bytes"]["device to host"] > 0
    assert stats["cache"]["tiers"]["open_operations"] == 0
    assert stats["compilations_after_warm_up"] == 0


def test_the_second_run_finds_what_the_first_has_stored(
    radixkv: Any, arguments: list[object], expected: list[list[int]], tmp_path: Path
) -> None:
    url = f"file://{tmp_path / 'blocks'}"
    found = []
    for _ in range(2):
        results = run(radixkv, *arguments, "--host-blocks", 32, "--storage", url)
        assert results["outputs"] == expected
        stats = results["stats"]
        counts = stats["scheduler"]
        found.append(counts["storage_hit_tokens"])
        hits = counts["hit_tokens"] + counts["host_hit_tokens"] + counts["storage_hit_tokens"]
        assert hits + counts["prefill_tokens"] == sum(map(len, PROMPTS))
    assert found == [0, 12 + 4]
    assert stats["storage"]["blocks"]["loaded"] == 4
    assert stats["storage"]["errors"] == {}
    assert re.fullmatch("[0-9a-f]{16}", stats["storage"]["namespace"])


@pytest.mark.parametrize(
    "nodes", [(), ("--disaggregate", "--transport", "inprocess")], ids=["", "apart"]
)
def test_the_statistics_count_what_is_stored_at_the_end(
    radixkv: Any,
    arguments: list[object],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    nodes: tuple[str, ...],
) -> None:
    """No store is reported before the engines are closed, which wait for it."""
    is_closing, close, poll = Event(), ModelRunner.close, StorageWorkers.poll
    late: dict[StorageWorkers, list[Completion]] = {}

    def close_engine(runner: ModelRunner, timeout_s: float) -> bool:
        is_closing.set()
        return close(runner, timeout_s)

    def poll_others(storage: StorageWorkers) -> list[Completion]:
        found = late.pop(storage, []) + poll(storage)
        if is_closing.is_set():
            return found
        late[storage] = [each for each in found if each.kind is Kind.STORE]
        return [each for each in found if each.kind is not Kind.STORE]

    monkeypatch.setattr(ModelRunner, "close", close_engine)
    monkeypatch.setattr(StorageWorkers, "poll", poll_others)
    directory = tmp_path / "blocks"
    tiers = ["--host-blocks", 32, "--host-write", "through", "--storage", f"file://{directory}"]
    stats = run(radixkv, *arguments, *nodes, *tiers)["stats"]
    options, num_files = BackendOptions(max_bytes=10**9), 0
    for name, each in stats.items() if nodes else [("", stats)]:
        engine = each["engine"] if nodes else each
        with closing(open_backend(f"file://{directory / name}", options)) as backend:
            num_stored = len(list(backend.list_values()))
        assert each["storage"]["blocks"]["stored"] == num_stored
        assert engine["cache"]["tiers"]["stored_blocks"] == num_stored
        assert engine["cache"]["tiers"]["open_operations"] == 0
        stored_bytes = each["storage"]["stored_bytes"]
        assert engine["copies"]["copied_bytes"]["host to storage"] == stored_bytes
        num_files += num_stored
    assert num_files > 0


def test_the_statistics_of_a_node_count_what_is_stored_at_the_end(
    radixkv: Any, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has copied nothing when it is stopped."""

    def serve(loop: NodeEventLoop, is_stopped: object) -> None:
        manager = loop._engine.manager
        lease = manager.admit(manager.match(range(8)))
        manager.publish(lease, range(8))
        manager.release(lease)

    monkeypatch.setattr(NodeEventLoop, "run", serve)
    outcome = radixkv(
        *("prefill-node", model_dir, "--gateway", "127.0.0.1:9", "--device-blocks", 4),
        *("--block-size", 4, "--token-budget", 1, "--max-running", 1, "--max-model-len", 8),
        *("--host-blocks", 8, "--host-write", "through"),
        *("--storage", f"file://{tmp_path / 'blocks'}"),
    )
    assert outcome.status == 0, outcome.stderr
    stats = json.loads(outcome.stdout)
    tiers = stats["engine"]["cache"]["tiers"]
    assert stats["storage"]["blocks"]["stored"] == tiers["stored_blocks"] == 2
    assert tiers["open_operations"] == 0


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.nightly)])
def test_16_bit_kv_passes_through_every_tier_and_node(
    radixkv: Any, arguments: list[object], tmp_path: Path, dtype: str
) -> None:
    """It is half as large, and under keys of its own in storage."""
    url = f"file://{tmp_path / 'blocks'}"
    arguments += ["--host-blocks", 32, "--device-blocks", 10, "--storage", url]
    wide = run(radixkv, *arguments)["stats"]
    arguments += ["--dtype", dtype]
    first = run(radixkv, *arguments)
    again = run(radixkv, *arguments)
    apart = run(radixkv, *arguments, "--disaggregate", "--transport", "inprocess")
    assert apart["outputs"] == again["outputs"] == first["outputs"]
    stats = first["stats"]
    assert (wide["dtype"], stats["dtype"]) == ("float32", dtype)
    assert {node["engine"]["dtype"] for node in apart["stats"].values()} == {dtype}
    assert stats["scheduler"]["storage_hit_tokens"] == 0
    assert again["stats"]["scheduler"]["storage_hit_tokens"] == 12 + 4
    assert 2 * again["stats"]["storage"]["loaded_bytes"] < 4 * 2 * 2 * 2 * 4 * 16 * 4 + 1000
    assert stats["storage"]["namespace"] != wide["storage"]["namespace"]


def test_text_has_the_hits_of_each_tier(
    radixkv: Any, arguments: list[object], tmp_path: Path
) -> None:
    storage = ["--storage", f"file://{tmp_path / 'blocks'}", "--storage-max-bytes", 10**6]
    outcome = radixkv(*arguments, "--host-blocks", 32, *storage)
    assert outcome.status == 0
    names = {line.split("  ")[0] for line in outcome.stdout.splitlines()[len(PROMPTS) + 1 :]}
    assert {
        "scheduler.hit_tokens",
        "scheduler.host_hit_tokens",
        "scheduler.storage_hit_tokens",
        "scheduler.parked",
        "cache.tiers.stored_blocks",
        "copies.copied_bytes.host to storage",
        "storage.stored_bytes",
    } <= names
    assert "None" not in radixkv(*arguments).stdout


def test_a_server_that_goes_away_costs_hits_and_nothing_else(
    radixkv: Any,
    arguments: list[object],
    expected: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with running() as server:

        def load_without_it(options: Namespace, group: object) -> Model:
            server.kill()
            return load_model_of_options(options)

        monkeypatch.setattr(generate, "load_model_of_options", load_without_it)
        url = f"redis://127.0.0.1:{server.port}"
        results = run(radixkv, *arguments, "--host-blocks", 32, "--storage", url)
    assert results["outputs"] == expected
    assert results["stats"]["scheduler"]["storage_hit_tokens"] == 0
    assert sum(results["stats"]["storage"]["errors"].values()) > 0


@pytest.mark.slow
def test_nodes_hand_over_through_a_server(
    radixkv: Any, arguments: list[object], expected: list[list[int]]
) -> None:
    with running() as server:
        url = f"redis://127.0.0.1:{server.port}"
        apart = ["--disaggregate", "--transport", "storage"]
        apart += ["--host-blocks", "32", "--storage", url, "--json", "-"]
        outcome = radixkv(*arguments, *apart)
        assert outcome.status == 0, outcome.stderr
        results = json.loads(outcome.stdout)
        with closing(open_backend(url, BackendOptions(namespace=NAMESPACE))) as parts:
            assert list(parts.list_values()) == []
    assert results["outputs"] == expected
    decode = results["stats"]["decode-0"]["transport"]
    assert decode["parts_received"] > 0 and decode["faults"] == {}


# Nobody listens on the port of tcpmux.
@pytest.mark.parametrize("url", ["redis://:hunter2@127.0.0.1:1", "s3://hunter2"])
@pytest.mark.parametrize("apart", [(), ("--disaggregate",)], ids=["", "apart"])
def test_a_server_that_is_not_there_is_refused(
    radixkv: Any,
    arguments: list[object],
    monkeypatch: pytest.MonkeyPatch,
    url: str,
    apart: tuple[str, ...],
) -> None:
    for name, value in {
        "AWS_ENDPOINT_URL": "http://127.0.0.1:1",
        "AWS_ALLOW_HTTP": "true",
        "AWS_ACCESS_KEY_ID": "hunter2",
        "AWS_SECRET_ACCESS_KEY": "hunter2",
    }.items():
        monkeypatch.setenv(name, value)
    outcome = radixkv(*arguments, *apart, "--host-blocks", 8, "--storage", url)
    why = "GenericError" if url.startswith("s3:") else "no connection, or it was lost"
    text = f"the server of --storage cannot be used: looking up failed: {why}"
    assert outcome == (2, "", f"radixkv: {text}\n")


def test_a_server_that_refuses_the_password_is_refused(
    radixkv: Any, arguments: list[object]
) -> None:
    with running(["requirepass hunter2"]) as server:
        url = f"redis://:sesame@127.0.0.1:{server.port}"
        outcome = radixkv(*arguments, "--host-blocks", 8, "--storage", url)
    text = (
        "the server of --storage cannot be used: looking up was refused by the server: wrong or no "
        "username or password"
    )
    assert outcome == (2, "", f"radixkv: {text}\n")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--host-write", "back"], "--host-write needs --host-blocks"),
        (["--disaggregate", "--transport", "storage"], "--transport storage needs --storage"),
        (["--storage", "memory://"], "--storage needs --host-blocks"),
        (["--preempt", "host"], "--preempt host needs --host-blocks"),
        (["--preempt", "storage"], "--preempt storage needs --host-blocks"),
        (["--host-blocks", 8, "--preempt", "storage"], "--preempt storage needs --storage"),
        (["--host-blocks", 8, "--storage-max-bytes", 8], "--storage-max-bytes needs --storage"),
        (
            ["--host-blocks", 8, "--no-prefix-cache"],
            "--host-blocks cannot be combined with --no-prefix-cache",
        ),
        (
            ["--host-blocks", 8, "--storage", "file://blocks"],
            "a directory's URL is file:///DIRECTORY, with its path from the root",
        ),
        (
            ["--host-blocks", 8, "--storage", "memory://", "--storage-max-bytes", 8],
            "memory:// has no option max_bytes",
        ),
        (
            ["--storage-max-bytes", 0],
            "argument --storage-max-bytes: expected an integer of at least 1, got '0' "
            "(see `radixkv generate --help`)",
        ),
        (
            ["--reserve-tokens", -1],
            "argument --reserve-tokens: expected no_evict or an integer from 0 to "
            "2147483647, got '-1' (see `radixkv generate --help`)",
        ),
        (
            ["--preempt", "swap"],
            "argument --preempt: invalid choice: 'swap' (choose from 'recompute', 'host', "
            "'storage') (see `radixkv generate --help`)",
        ),
    ],
)
def test_options_that_do_not_go_together_are_refused(
    radixkv: Any, arguments: list[object], options: list[object], text: str
) -> None:
    outcome = radixkv(*arguments, *options)
    assert (outcome.status, outcome.stdout) == (2, "")
    assert outcome.stderr == f"radixkv: {text}\n"


def test_a_digest_is_of_every_byte_of_the_weights(model_dir: Path, tmp_path: Path) -> None:
    for file in model_dir.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    assert weights_digest(tmp_path) == weights_digest(model_dir)
    (tmp_path / "config.json").write_text("{}")  # it is a part of the namespace by itself
    assert weights_digest(tmp_path) == weights_digest(model_dir)
    weights = tmp_path / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert weights_digest(tmp_path) != weights_digest(model_dir)

"""`radixkv generate --disaggregate` on nodes in this process, and what it refuses."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from contextlib import ExitStack, closing
from itertools import count
from pathlib import Path
from typing import Any, NoReturn

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from radixkv.kvcache import HostConfig
from radixkv.kvcache.tiers import state
from radixkv.scheduler.cli import generate, generate_on_nodes, nodes, serve_on_nodes
from radixkv.scheduler.cli.errors import BadInputError
from radixkv.scheduler.cli.main import build_parser
from radixkv.scheduler.cli.nodes import make_timing
from radixkv.scheduler.cli.shared.completions import Completions
from radixkv.scheduler.cli.shared.prompts import prompts_failed
from radixkv.scheduler.errors import HandoffFailedError, NodesMissingError
from radixkv.scheduler.gateway.node_reporter import NodeReporter
from radixkv.scheduler.handoff.gateway_messages import GATEWAY, NodeStatus
from radixkv.scheduler.handoff.part_cut import PartCut
from radixkv.scheduler.models import Model, load_config
from radixkv.scheduler.models.weights_digest import weights_digest
from radixkv.scheduler.nodes.channel import Secret, codec
from radixkv.scheduler.nodes.channel.zmq_channel import ZmqChannel
from radixkv.scheduler.nodes.node import NodeEngine
from radixkv.scheduler.nodes.processes import NodeProcesses
from radixkv.scheduler.nodes.remote_nodes import RemoteNodes
from radixkv.scheduler.request import Request, RequestStatus

from ...ports import reserved_port
from .generating import PROMPTS, run, without_compiling

EPOCHS = count(1)
SIZE = ["--device-blocks", 10]
"""The same wherever something is generated, so that each program is compiled once."""


@pytest.mark.slow
def test_nodes_in_one_process_give_the_same_outputs(radixkv: Any, arguments: list[object]) -> None:
    arguments += SIZE
    expected = run(radixkv, *arguments)["outputs"]
    apart = ["--disaggregate", "--transport", "inprocess", "--decode", 2]
    results = run(radixkv, *arguments, *apart)
    assert results["outputs"] == expected
    stats = results["stats"]
    assert list(stats) == ["prefill-0", "decode-0", "decode-1"]
    prefill, *decode = stats.values()
    assert prefill["engine"]["scheduler"]["decode_tokens"] == 0
    assert sum(each["engine"]["scheduler"]["admitted"] for each in decode) == len(PROMPTS)
    for node in stats.values():
        assert node["engine"]["compilations_after_warm_up"] == 0
        assert node["engine"]["cache"]["live_leases"] == 0
        assert node["transport"]["faults"] == {}


def test_decode_nodes_have_as_many_steps_in_flight_as_the_depth(
    radixkv: Any, arguments: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    most = dict.fromkeys(("PrefillEngine", "DecodeEngine"), 0)
    read = NodeEngine._read

    def spy(node: Any) -> None:
        kind = type(node).__name__
        most[kind] = max(most[kind], len(node._in_flight))
        read(node)

    monkeypatch.setattr(NodeEngine, "_read", spy)
    apart = ["--disaggregate", "--transport", "inprocess", "--depth", 3]
    run(radixkv, *arguments, *SIZE, *apart)
    assert most == {"PrefillEngine": 1, "DecodeEngine": 3}


class Stopped(Exception):
    """Raised where a test has seen enough."""


def stop(*_: object, **options: Any) -> None:
    raise Stopped(options["depth"])


@pytest.mark.parametrize("depth", [None, 1, 3])
def test_a_decode_node_gets_its_depth(
    radixkv: Any, model_dir: Path, monkeypatch: pytest.MonkeyPatch, depth: int | None
) -> None:
    monkeypatch.setattr(nodes, "DecodeEngine", stop)
    sizes = ["--gateway", "127.0.0.1:9", "--device-blocks", 10]
    given = [] if depth is None else ["--depth", depth]
    with pytest.raises(Stopped, match=f"^{depth or 2}$"):
        radixkv("decode-node", model_dir, *sizes, *given)


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("has_tiers", [False, True])
def test_the_engine_of_a_node_gets_its_options(
    radixkv: Any,
    model_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    role: str,
    has_tiers: bool,
) -> None:
    """What no step can hold is not asked for, and what is not given suits the model."""
    made: list[dict[str, Any]] = []

    def make(*_: object, **options: Any) -> None:
        made.append(options)
        raise Stopped

    for engine in ("PrefillEngine", "DecodeEngine"):
        monkeypatch.setattr(nodes, engine, make)
    node = (f"{role}-node", model_dir, "--gateway", "127.0.0.1:9", "--layer-groups", 2)
    tiers = ("--host-blocks", 8, "--host-write", "back", "--storage", f"file://{tmp_path / 'kv'}")
    of_role = ("--allocate", "prefill_complete")
    if role == "decode":
        of_role = ("--preempt", "host") if has_tiers else ("--reserve-tokens", "no_evict")
    sizes: list[tuple[tuple[object, ...], dict[str, int]]] = [
        (
            ("--block-size", 4, "--device-blocks", 10, "--token-budget", 7, "--max-running", 9),
            {"num_blocks": 10, "token_budget": 7, "max_running": 7, "max_model_len": 40},
        ),
        (
            ("--block-size", 4, "--device-blocks", 9000, "--max-running", 9),
            {"num_blocks": 9000, "token_budget": 512, "max_running": 9, "max_model_len": 8192},
        ),
        (
            ("--block-size", 4, "--device-blocks", 10, "--max-model-len", 12),
            {"num_blocks": 10, "token_budget": 512, "max_running": 64, "max_model_len": 12},
        ),
    ]
    for options, expected in sizes:
        with pytest.raises(Stopped):
            radixkv(*node, *options, *of_role, *(tiers if has_tiers else ()))
        got = made.pop()
        assert {name: got[name] for name in expected} == expected
        assert (got["block_size"], got["num_groups"]) == (4, 2)
        assert got["host"] == (HostConfig(8, "back") if has_tiers else None)
        assert (got["storage"] is not None) == has_tiers
        assert (got["storage_namespace"] is not None) == has_tiers
        if role == "prefill":
            assert got["order"] == "prefill_complete"
        else:
            assert got["preempt"] == ("host" if has_tiers else "recompute")
            assert got["reserve_tokens"] == (512 if has_tiers else None)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_node_takes_a_name_on_the_hub(
    radixkv: Any, model_dir: Path, monkeypatch: pytest.MonkeyPatch, role: str
) -> None:
    located: list[tuple[str, str | None]] = []

    def locate(model: str, revision: str | None) -> Path:
        located.append((model, revision))
        return model_dir

    def make(model: Model, *_: object, weights_revision: str, **options: object) -> None:
        assert model.config == load_config(model_dir)
        assert weights_revision == weights_digest(model_dir)
        raise Stopped

    monkeypatch.setattr(nodes, "locate_model", locate)
    for engine in ("PrefillEngine", "DecodeEngine"):
        monkeypatch.setattr(nodes, engine, make)
    name = ["owner/name", "--revision", "v1"]
    with pytest.raises(Stopped):
        radixkv(f"{role}-node", *name, "--gateway", "127.0.0.1:9", "--device-blocks", 10)
    assert located == [("owner/name", "v1")]


def test_started_nodes_get_the_directory_of_a_name(
    radixkv: Any, model_dir: Path, arguments: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(_: object, name: str, command: str, options: list[object], environment: Any) -> None:
        assert options[0] == model_dir
        raise Stopped

    monkeypatch.setattr(generate, "locate_model", lambda model, revision: model_dir)
    monkeypatch.setattr(NodeProcesses, "start", start)
    with pytest.raises(Stopped):
        radixkv("generate", "owner/name", *arguments[2:], *SIZE, "--disaggregate")


@pytest.mark.parametrize("command", ["prefill-node", "decode-node"])
@pytest.mark.parametrize(
    ("block_size", "staged"),
    [(16, 256 << 20), (8192, 256 << 20), (12288, 384 << 20), (32768, 1 << 30)],
)
def test_a_node_has_staging_memory_for_its_parts(
    radixkv: Any,
    model_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    block_size: int,
    staged: int,
) -> None:
    def open_transport(name: str, *, staging_bytes: int, **_: object) -> None:
        raise Stopped(name, staging_bytes)

    monkeypatch.setattr(nodes, "open_transport", open_transport)
    sizes = ["--gateway", "127.0.0.1:9", "--device-blocks", 10, "--block-size", block_size]
    with pytest.raises(Stopped) as stopped:
        radixkv(command, model_dir, *sizes, "--transport", "nixl", "--dtype", "float32")
    assert stopped.value.args == ("nixl", staged)


@given(st.integers(1, 2048), st.integers(1, 32), st.integers(1, 32))
def test_no_part_exceeds_the_staging_memory_of_its_nodes(
    model_dir: Path, common: int, ours: int, theirs: int
) -> None:
    sent_size, size = common * theirs, common * ours
    assume(PartCut(sent_size, size, 0, 0).is_possible)
    most = max(n for n in range(1, 33) if PartCut(sent_size, size, n * sent_size, 0).is_part(0, n))
    config = load_config(model_dir)
    elements = 2 * config.num_layers * config.num_kv_heads * config.head_dim
    for block_size in (sent_size, size):
        arguments = argparse.Namespace(model_dir=model_dir, dtype="float32", block_size=block_size)
        assert most * sent_size * elements * 4 <= nodes.staging_bytes(arguments)


@pytest.mark.parametrize("depth", [None, 1, 3])
def test_started_decode_nodes_get_the_depth(
    radixkv: Any, arguments: list[object], monkeypatch: pytest.MonkeyPatch, depth: int | None
) -> None:
    started: dict[str, list[str]] = {}

    def start(_: object, name: str, command: str, options: list[object], environment: Any) -> None:
        started[command] = [str(each) for each in options]
        if command == "decode-node":
            raise Stopped

    monkeypatch.setattr(NodeProcesses, "start", start)
    given = [] if depth is None else ["--depth", depth]
    with pytest.raises(Stopped):
        radixkv(*arguments, *SIZE, "--disaggregate", *given)
    assert "--depth" not in started["prefill-node"]
    parsed = build_parser().parse_args(["decode-node", "--name", "d", *started["decode-node"]])
    assert parsed.depth == (depth or 2)


@pytest.mark.parametrize("has_more", [False, True])
def test_started_nodes_get_the_sizes_and_the_tiers(
    radixkv: Any,
    arguments: list[object],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    has_more: bool,
) -> None:
    started: dict[str, tuple[list[str], dict[str, str]]] = {}

    def start(
        _: object, name: str, command: str, options: list[object], environment: dict[str, str]
    ) -> None:
        started[name] = [command, "--name", name, *map(str, options)], environment

    def serve(*_: object) -> None:
        raise Stopped

    monkeypatch.setattr(NodeProcesses, "start", start)
    monkeypatch.setattr(generate_on_nodes, "_serve", serve)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    url = (tmp_path / "blocks").as_uri()
    given: dict[str, Any] = {}
    expected: dict[str, Any] = {"host_blocks": None, "host_write": None, "storage_max_bytes": None}
    if has_more:
        given = {"host_blocks": 7, "host_write": "through", "storage": url}
        given |= {"storage_max_bytes": 9000, "preempt": "storage", "reserve_tokens": 33}
        expected = {name: given[name] for name in expected}
    line = [*arguments, *SIZE, "--disaggregate", "--prefill", 2, "--decode", 3]
    for name, value in given.items():
        line += [f"--{name.replace('_', '-')}", value]
    with pytest.raises(Stopped):
        radixkv(*line, *["--no-compilation-cache"] * has_more)
    names = {"prefill": ["prefill-0", "prefill-1"], "decode": ["decode-0", "decode-1", "decode-2"]}
    assert list(started) == [*names["prefill"], *names["decode"]]
    expected |= {"block_size": 4, "device_blocks": 10, "token_budget": 8, "max_running": 4}
    expected |= {"max_model_len": 22, "no_compilation_cache": has_more, "transport": "jax"}
    generation = {"preempt": "recompute", "reserve_tokens": 512}
    generation |= {name: given[name] for name in generation if has_more}
    for role, of_role in names.items():
        for name in of_role:
            options, environment = started[name]
            for variable, value in environment.items():
                monkeypatch.setenv(variable, value)
            parsed = vars(build_parser().parse_args(options))
            wanted = expected | (generation if role == "decode" else {})
            assert {each: parsed[each] for each in wanted} == wanted
            assert options[0] == f"{role}-node"
            assert environment == ({"RADIXKV_STORAGE": f"{url}/{name}"} if has_more else {})


class FakeNodes:
    """Nodes of which one comes in each step, and that complete a request in each further one."""

    has_refused_secrets, drop_summary = False, ""
    gone, other_versions = (), ()

    def __init__(self, events: list[object], failures: dict[str, str]) -> None:
        self.events, self.failures = events, failures
        self.nodes: dict[str, Any] = {}
        self.open: list[Request] = []
        self.num_steps = 0

    @property
    def num_open(self) -> int:
        return len(self.open)

    has_work = num_open

    def count(self, role: str) -> int:
        return self.num_steps - 1 if role == "decode" else self.num_steps

    def add_request(self, request: Request) -> None:
        self.open.append(request)
        self.events.append(request.request_id)

    def step(self) -> list[Request]:
        self.num_steps += 1
        self.events.append("step")
        return [self.open.pop()] if self.open else []

    def check(self, timeout_s: float) -> None:
        self.events.append(timeout_s)


@pytest.mark.parametrize("timeout_s", [None, 7.0])
@pytest.mark.parametrize("failures", [{}, {"1": "it was cold"}])
def test_a_gateway_looks_after_each_step_whether_all_nodes_live(
    model_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    timeout_s: float | None,
    failures: dict[str, str],
) -> None:
    """Those that it has started, and then also those that have come."""
    events: list[object] = []
    fake = FakeNodes(events, failures)
    monkeypatch.setattr(generate_on_nodes, "start_nodes", lambda *_: events.append("start"))
    monkeypatch.setattr(generate_on_nodes, "RemoteNodes", lambda *_, **__: fake)
    monkeypatch.setattr(NodeProcesses, "check", lambda _: events.append("processes"))
    monkeypatch.setattr(NodeProcesses, "stop", lambda _: {"p": {"stopped": 1}})
    given = {"gateway": None, "prefill": None, "decode": None, "silence_s": None}
    arguments = argparse.Namespace(**given, timeout_s=timeout_s, model_dir=model_dir)
    requests = Completions([Request(name, [1], 1) for name in "01"], None, [])
    sizes: Any = None
    if failures:
        with pytest.raises(HandoffFailedError, match=r"^prompt 1: it was cold$"):
            generate_on_nodes.complete_on_nodes(arguments, requests, sizes)
    else:
        stats = generate_on_nodes.complete_on_nodes(arguments, requests, sizes)
        assert stats == {"p": {"stopped": 1}}
    comes, completes = ["step", "processes"], ["step", "processes", timeout_s or 120.0]
    assert events == ["start", *comes, *comes, "0", "1", *completes, *completes]


@pytest.mark.parametrize("stop", [(), ("!",)])
def test_a_gateway_takes_the_secret_of_its_file_and_tokens_step_by_step_if_a_text_may_stop(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: tuple[str, ...]
) -> None:
    file = tmp_path / "secret"
    file.write_text("a secret of the test, long enough")
    file.chmod(0o600)
    opened: list[tuple[str, Secret | None]] = []

    def open_gateway(address: str, secret: Secret | None) -> ZmqChannel:
        opened.append((address, secret))
        return ZmqChannel(GATEWAY, epoch=1)

    def make(_: object, **options: Any) -> None:
        assert options["stream"] is bool(stop)
        assert options["model"] == load_config(model_dir).name
        raise Stopped

    monkeypatch.delenv("RADIXKV_SECRET", raising=False)
    monkeypatch.setattr(generate_on_nodes, "open_gateway", open_gateway)
    monkeypatch.setattr(generate_on_nodes, "RemoteNodes", make)
    given = {"gateway": "127.0.0.1:0", "secret_file": str(file), "model_dir": model_dir}
    arguments = argparse.Namespace(**given, timeout_s=None, silence_s=None)
    sizes: Any = None
    with pytest.raises(Stopped):
        generate_on_nodes.complete_on_nodes(arguments, Completions([], None, stop), sizes)
    [(address, secret)] = opened
    assert address == "127.0.0.1:0" and secret is not None
    assert secret.key(b"a label") == Secret(file.read_bytes()).key(b"a label")


@pytest.mark.parametrize("command", ["generate", "serve"])
@pytest.mark.parametrize("silence_s", [None, 9.0])
def test_the_gateway_and_the_nodes_it_starts_get_the_silence(
    radixkv: Any,
    arguments: list[object],
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    silence_s: float | None,
) -> None:
    started: list[list[str]] = []

    def start(_: object, name: str, command: str, options: list[object], environment: Any) -> None:
        started.append([command, "--name", name, *map(str, options)])

    def make(*_: object, **options: Any) -> None:
        assert options["silence_s"] == (silence_s or 5.0)
        raise Stopped

    monkeypatch.setattr(NodeProcesses, "start", start)
    for module in (generate_on_nodes, serve_on_nodes):
        monkeypatch.setattr(module, "RemoteNodes", make)
    given = [] if silence_s is None else ["--silence-s", silence_s]
    given += ["--device-blocks", 20, "--disaggregate"]
    with pytest.raises(Stopped):
        radixkv(*(arguments if command == "generate" else ("serve", arguments[1])), *given)
    assert {each[0] for each in started} == {"prefill-node", "decode-node"}
    for options in started:
        assert build_parser().parse_args(options).silence_s == (silence_s or 5.0)


@pytest.mark.parametrize("command", ["generate", "serve"])
@pytest.mark.parametrize("number", [None, 2])
def test_started_nodes_get_the_groups_of_layers(
    radixkv: Any,
    arguments: list[object],
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    number: int | None,
) -> None:
    started: list[list[str]] = []

    def start(_: object, name: str, command: str, options: list[object], environment: Any) -> None:
        started.append([command, "--name", name, *map(str, options)])
        if command == "decode-node":
            raise Stopped

    monkeypatch.setattr(NodeProcesses, "start", start)
    given = [] if number is None else ["--layer-groups", number]
    given += ["--device-blocks", 20, "--disaggregate"]
    with pytest.raises(Stopped):
        radixkv(*(arguments if command == "generate" else ("serve", arguments[1])), *given)
    assert [each[0] for each in started] == ["prefill-node", "decode-node"]
    for options in started:
        assert build_parser().parse_args(options).layer_groups == (number or 1)


def test_nodes_in_one_process_get_the_groups_of_layers(
    radixkv: Any, arguments: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    def take(*_: object, **options: Any) -> None:
        raise Stopped(options["num_groups"])

    monkeypatch.setattr(generate, "PrefillEngine", take)
    apart = [*SIZE, "--disaggregate", "--transport", "inprocess"]
    for options, number in (((), 1), (("--layer-groups", 2), 2)):
        with pytest.raises(Stopped, match=f"^{number}$"):
            radixkv(*arguments, *apart, *options)


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        ("0,1,2,3,4,5", ["0,1", "2,3", "4,5"]),
        ("7,GPU-a, 3,2,1,0,5", ["7,GPU-a", "3,2", "1,0"]),
        ("0,1,2,3,4", None),  # too few: as without this
        ("", None),
        (None, ["0,1", "2,3", "4,5"]),
    ],
)
def test_each_node_has_gpus_of_its_own(
    radixkv: Any,
    arguments: list[object],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    visible: str | None,
    expected: list[str] | None,
) -> None:
    started: list[dict[str, str]] = []

    def start(_: object, name: str, command: str, options: list[object], environment: Any) -> None:
        started.append(environment)

    for number in range(7):
        (tmp_path / f"0000:0{number}:00.0").mkdir()
    monkeypatch.setattr(generate_on_nodes, "_GPUS", tmp_path)
    monkeypatch.setattr(NodeProcesses, "start", start)
    monkeypatch.setattr(generate_on_nodes, "_serve", stop_serving)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(Stopped):
        radixkv(*arguments, *SIZE, "--disaggregate", "--decode", 2, "--tp", 2)
    if expected is None:
        assert started == [{}, {}, {}]
    else:
        assert started == [{"CUDA_VISIBLE_DEVICES": each} for each in expected]


def stop_serving(*_: object) -> None:
    raise Stopped


@pytest.mark.parametrize("command", ["generate", "decode-node"])
def test_a_depth_below_1_is_refused(radixkv: Any, model_dir: Path, command: str) -> None:
    outcome = radixkv(command, model_dir, "--depth", 0)
    assert outcome.status == 2
    assert "argument --depth: expected an integer from 1 to 2147483647, got '0'" in outcome.stderr


def test_a_prefill_node_has_no_depth(radixkv: Any, model_dir: Path) -> None:
    sizes = ["--gateway", "127.0.0.1:9", "--device-blocks", 10]
    outcome = radixkv("prefill-node", model_dir, *sizes, "--depth", 2)
    assert outcome.status == 2 and "unrecognized arguments: --depth 2" in outcome.stderr


def test_a_gateway_prints_the_outputs_alone(
    radixkv: Any, without_sizes: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What nodes have done that others started, they print themselves."""
    monkeypatch.setattr(generate_on_nodes, "complete_on_nodes", lambda *_: {})
    outcome = radixkv(*without_sizes, "--disaggregate", "--gateway", "127.0.0.1:0")
    assert outcome == (0, "[]\n" * len(PROMPTS), "")


def test_a_decode_node_that_reserves_all_preempts_none(
    radixkv: Any, arguments: list[object]
) -> None:
    apart = ["--disaggregate", "--transport", "inprocess"]
    results = run(radixkv, *arguments, *SIZE, *apart, "--reserve-tokens", "no_evict")
    assert results["stats"]["decode-0"]["engine"]["scheduler"]["preemptions"] == 0


def test_nodes_may_have_storage_and_park_there(
    radixkv: Any, arguments: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state, "STORAGE_TIMEOUT_S", 600.0)  # the disk may be slow
    arguments += SIZE
    expected = run(radixkv, *arguments)["outputs"]
    tight = ["--reserve-tokens", 0, "--host-blocks", 32]
    apart = ["--disaggregate", "--transport", "inprocess", "--preempt", "storage"]
    storage = ["--storage", f"file://{tmp_path / 'blocks'}"]
    found = []
    for _ in range(2):
        results = run(radixkv, *arguments, *apart, *tight, *storage)
        assert results["outputs"] == expected
        prefill, decode = results["stats"].values()
        counts = decode["engine"]["scheduler"]  # who is preempted is a matter of timing
        assert counts["parked"] == counts["resumed_parked"]
        assert decode["engine"]["cache"]["tiers"]["host_blocks"] == 32
        assert prefill["storage"]["errors"] == decode["storage"]["errors"] == {}
        found.append(prefill["engine"]["scheduler"]["storage_hit_tokens"])
    assert found == [0, 12 + 4]
    assert {path.name for path in (tmp_path / "blocks").iterdir()} == {"prefill-0", "decode-0"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--transport", "jax"), "--transport needs --disaggregate"),
        (("--prefill", 1), "--prefill needs --disaggregate"),
        (("--decode", 1), "--decode needs --disaggregate"),
        (("--gateway", "127.0.0.1:0"), "--gateway needs --disaggregate"),
        (("--secret-file", "x"), "--secret-file needs --disaggregate"),
        (("--layer-groups", 2), "--layer-groups needs --disaggregate"),
        (("--timeout-s", 1), "--timeout-s needs --disaggregate"),
        (("--silence-s", 1), "--silence-s needs --disaggregate"),
        (("--disaggregate", "--silence-s", 0), "--silence-s must be more than 0, got 0"),
        (
            ("--disaggregate", "--transport", "inprocess", "--silence-s", 1),
            "--silence-s cannot be combined with --transport inprocess",
        ),
        (
            ("--disaggregate", "--transport", "inprocess", "--timeout-s", 1),
            "--timeout-s cannot be combined with --transport inprocess",
        ),
        (
            ("--disaggregate", "--no-prefix-cache"),
            "--disaggregate cannot be combined with --no-prefix-cache",
        ),
        *(
            (
                ("--disaggregate", "--gateway", "127.0.0.1:0", option, value),
                f"{option} cannot be combined with --gateway: give it to the nodes",
            )
            for option, value in (
                ("--transport", "jax"),
                ("--dtype", "auto"),
                ("--tp", 2),
                ("--device-blocks", 9),
                ("--depth", 2),
                ("--layer-groups", 2),
                ("--token-budget", 8),
                ("--block-size", 16),
                ("--preempt", "recompute"),
                ("--reserve-tokens", 512),
            )
        ),
        (
            (*("--disaggregate", "--gateway", "127.0.0.1:0"), *("--storage", "file:///x")),
            "--storage needs --host-blocks",
        ),
        (
            ("--reserve-tokens", "all"),
            "argument --reserve-tokens: expected no_evict or an integer from 0 to 2147483647, got "
            "'all' (see `radixkv generate --help`)",
        ),
        (("--disaggregate", "--secret-file", "x"), "--secret-file needs --gateway"),
        (
            ("--disaggregate", "--gateway", "nowhere"),
            "an address is like 127.0.0.1:5557 or [::1]:5557, got 'nowhere'",
        ),
        (
            ("--disaggregate", "--gateway", "0.0.0.0:0"),
            "0.0.0.0:0 can be reached from other machines, so it needs a secret: set "
            "RADIXKV_SECRET, or give a file with --secret-file, or bind to 127.0.0.1",
        ),
    ],
)
def test_options_that_do_not_go_together_are_refused(
    radixkv: Any,
    without_sizes: list[object],
    monkeypatch: pytest.MonkeyPatch,
    options: tuple[object, ...],
    message: str,
) -> None:
    monkeypatch.delenv("RADIXKV_SECRET", raising=False)
    outcome = radixkv(*without_sizes, *options)
    assert (outcome.status, outcome.stderr) == (2, f"radixkv: {message}\n")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--silence-s", 0), "--silence-s must be more than 0, got 0"),
        (("--preempt", "host"), "--preempt host needs --host-blocks"),
        (("--preempt", "storage", "--host-blocks", 8), "--preempt storage needs --storage"),
        (("--storage", "memory://"), "--storage needs --host-blocks"),
        (("--listen", "localhost:1"), "an address is like 127.0.0.1:5557"),
        (("--gateway", "x"), "an address is like 127.0.0.1:5557"),
        (
            ("--gateway", "127.0.0.1:0"),
            "nobody can connect to 127.0.0.1:0: it must be one address of a machine, with a port",
        ),
        (("--listen", "0.0.0.0:0"), "nobody can connect to 0.0.0.0:"),
        (
            ("--name", GATEWAY),
            f"--name must have 1 to 256 characters and not be {GATEWAY!r}, got {GATEWAY!r}",
        ),
        (("--name", ""), f"--name must have 1 to 256 characters and not be {GATEWAY!r}, got ''"),
        (("--secret-file", "/no/such/file"), "the secret file /no/such/file cannot be read"),
        (("--transport", "carrier pigeon"), "argument --transport: invalid choice"),
    ],
)
def test_a_node_refuses_what_cannot_work(
    radixkv: Any,
    model_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: tuple[object, ...],
    message: str,
) -> None:
    monkeypatch.setenv("RADIXKV_SECRET", "a secret of the test, long enough")
    sizes = ("--device-blocks", 8, "--block-size", 4, "--token-budget", 4, "--max-model-len", 16)
    nodes = ("decode-node", model_dir, "--gateway", "127.0.0.1:1", *sizes)
    outcome = radixkv(*nodes, *options)
    assert outcome.status == 2
    assert outcome.stderr.startswith(f"radixkv: {message}"), outcome.stderr


@pytest.mark.parametrize("silence_s", [0.1, 5.0, 600.0])
def test_a_node_remembers_for_longer_than_any_silence(silence_s: float) -> None:
    timing = make_timing(silence_s)
    assert timing.remember_s == silence_s + 60.0
    NodeReporter(1, timing)  # which refuses others


def test_nodes_are_told_their_storage_where_other_users_do_not_see_it(
    radixkv: Any, arguments: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[tuple[list[str], dict[str, str]]] = []
    popen = subprocess.Popen

    def start(line: list[str], *, env: dict[str, str], **options: Any) -> Any:
        started.append((line, env))
        return popen([sys.executable, "-c", "raise SystemExit('no node')"], env=env, **options)

    monkeypatch.setattr(subprocess, "Popen", start)
    url = (tmp_path / "blocks").as_uri()
    storage = ("--host-blocks", 8, "--storage", url)
    given = ("--dtype", "bfloat16", "--tp", 2)
    outcome = radixkv(*arguments, *SIZE, "--disaggregate", *storage, *given)
    assert outcome.status == 1
    assert outcome.stderr.endswith("-0 has ended with status 1: no node\n")
    assert [env["RADIXKV_STORAGE"] for _, env in started] == [f"{url}/prefill-0", f"{url}/decode-0"]
    for line, _ in started:
        assert line[line.index("--storage") + 1] == "env:RADIXKV_STORAGE"
        assert line[line.index("--dtype") + 1] == "bfloat16"
        assert line[line.index("--tp") + 1] == "2"
        assert not any(url in word for word in line)


def test_the_extra_that_is_missing_is_named(arguments: list[object]) -> None:
    done = run_without_nodes_extra(*arguments, *SIZE, "--disaggregate")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "radixkv: zmq is not installed: pip install 'radixkv[nodes]'\n"


def test_nodes_in_one_process_need_no_extra(arguments: list[object]) -> None:
    done = run_without_nodes_extra(*arguments, *SIZE, "--disaggregate", "--transport", "inprocess")
    assert (done.returncode, without_compiling(done.stderr)) == (0, "")


def run_without_nodes_extra(*arguments: object) -> subprocess.CompletedProcess[str]:
    # In a process of its own: here the modules are loaded already.
    program = "import sys; sys.modules['zmq'] = sys.modules['msgspec'] = None; "
    program += "from radixkv.scheduler.cli.main import main; sys.exit(main(sys.argv[1:]))"
    line = [sys.executable, "-c", program, *map(str, arguments)]
    return subprocess.run(line, capture_output=True, text=True, check=False)


def wait_for(gateway: ZmqChannel, *statuses: NodeStatus, timeout_s: float = 0.0) -> str:
    """What the command says when one node of each role is wanted, and these come."""
    arguments = argparse.Namespace(prefill=None, decode=None)
    nodes = RemoteNodes(gateway, silence_s=60.0)
    with ExitStack() as stack:
        for place, status in enumerate(statuses):
            node = stack.enter_context(closing(ZmqChannel(f"node-{place}", epoch=next(EPOCHS))))
            node.connect(GATEWAY, gateway.address)
            node.send(GATEWAY, status)
            while len(nodes.nodes) <= place:
                nodes.step()
        with pytest.raises((BadInputError, NodesMissingError)) as error:
            generate_on_nodes.wait_for(nodes, arguments, timeout_s)
    return str(error.value)


SECRET = Secret(b"a secret of the test, long enough")
PREFILL = NodeStatus("prefill", "127.0.0.1:1", "jax", 4, 64, "m")


@pytest.mark.parametrize(
    ("ours", "theirs", "reason"),
    [
        (SECRET, Secret(b"another secret, long enough"), "with another secret than that of this"),
        (SECRET, None, "without a secret, which this"),
        (None, SECRET, "with a secret, which this"),
    ],
    ids=["other", "none", "unwanted"],
)
def test_a_gateway_says_that_nodes_have_another_secret(
    capsys: pytest.CaptureFixture[str], ours: Secret | None, theirs: Secret | None, reason: str
) -> None:
    """At once, and again when it has waited for long enough."""
    with (
        closing(ZmqChannel(GATEWAY, epoch=1, secret=ours)) as gateway,
        closing(ZmqChannel("node-0", epoch=1, secret=theirs)) as node,
    ):
        node.connect(GATEWAY, gateway.address)
        nodes = RemoteNodes(gateway)
        while not nodes.has_refused_secrets:  # where one has none, only some connections say so
            node.send(GATEWAY, PREFILL)
            nodes.step()
        said = wait_for(gateway, timeout_s=0.1)  # looks more than once
    lacks = "after 0.1 s there are 0 of 1 prefill nodes and 0 of 1 decode nodes"
    assert re.fullmatch(rf"{lacks}; refused connections: .*\d+ {reason} node\b.*", said), said
    warned = capsys.readouterr().err
    assert re.match(rf"radixkv: waiting for nodes; refused connections: .*{reason} node", warned)
    assert warned.count("\n") == 1


def test_a_gateway_refuses_a_node_of_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, by both versions."""
    with closing(ZmqChannel(GATEWAY, epoch=1, secret=SECRET)) as gateway:
        with monkeypatch.context() as patch:
            patch.setattr(codec, "_PREFIX", b"RXKV\x08")
            with closing(ZmqChannel("node-0", epoch=1, secret=SECRET)) as node:
                node.connect(GATEWAY, gateway.address)
                node.send(GATEWAY, PREFILL)
                assert gateway.wait(60.0)
        said = "a node speaks version 8 of the control channel, and this process 2"
        assert wait_for(gateway) == said


def test_a_gateway_says_which_nodes_it_lacks_or_refuses() -> None:
    prefill = NodeStatus("prefill", "127.0.0.1:1", "jax", 4, 64, "m")
    decode = NodeStatus("decode", "127.0.0.1:2", "jax", 129, 64, "m")
    with closing(ZmqChannel(GATEWAY, epoch=1)) as gateway:
        lacks = "after 0 s there are {} of 1 prefill nodes and 0 of 1 decode nodes"
        assert wait_for(gateway) == lacks.format(0)
        assert wait_for(gateway, prefill) == lacks.format(1)
        said = (
            "node-1 is refused: its blocks of 129 tokens, and those of node-0 of 4, have no common "
            "end within 32 blocks"
        )
        assert wait_for(gateway, prefill, decode) == said


def test_a_gateway_ends_when_the_only_nodes_are_gone(
    radixkv: Any, without_sizes: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[RemoteNodes] = []
    now = 0.0

    def clock() -> float:
        """Time passes as soon as both nodes have come."""
        nonlocal now
        if now > 0 or (made and len(made[0].nodes) == 2):
            now += 10.0
        return now

    def make(*positional: Any, **options: Any) -> RemoteNodes:
        made.append(RemoteNodes(*positional, clock=clock, **options))
        return made[0]

    monkeypatch.setattr(generate_on_nodes, "RemoteNodes", make)
    name = load_config(str(without_sizes[1])).name
    with ExitStack() as stack:
        address = f"127.0.0.1:{stack.enter_context(reserved_port())}"
        for role in ("prefill", "decode"):
            node = stack.enter_context(closing(ZmqChannel(f"{role}-0", epoch=1)))
            node.connect(GATEWAY, address)  # what is sent waits for the gateway
            node.send(GATEWAY, NodeStatus(role, node.address, "jax", 4, 64, name))
        outcome = radixkv(*without_sizes, "--disaggregate", "--gateway", address, "--timeout-s", 60)
    assert outcome == (
        1,
        "",
        "radixkv: prefill-0 has not been heard of for 60 s, and no other prefill node serves\n",
    )


def test_a_gateway_refuses_nodes_of_another_model(
    radixkv: Any, without_sizes: list[object]
) -> None:
    """They would complete its prompts, with the tokens of another model."""
    name = load_config(str(without_sizes[1])).name
    with ExitStack() as stack:
        address = f"127.0.0.1:{stack.enter_context(reserved_port())}"
        node = stack.enter_context(closing(ZmqChannel("prefill-0", epoch=1)))
        node.connect(GATEWAY, address)
        node.send(GATEWAY, NodeStatus("prefill", node.address, "jax", 4, 64, "llama " + 64 * "f"))
        outcome = radixkv(*without_sizes, "--disaggregate", "--gateway", address)
    said = f"its model is llama ffffffffffff, not {name[:18]}"
    assert outcome == (2, "", f"radixkv: prefill-0 is refused: {said}\n")


def test_a_gateway_ends_when_no_node_comes(radixkv: Any, without_sizes: list[object]) -> None:
    outcome = radixkv(
        *without_sizes, "--disaggregate", "--gateway", "127.0.0.1:0", "--timeout-s", 0
    )
    lacks = "radixkv: after 0 s there are 0 of 1 prefill nodes and 0 of 1 decode nodes\n"
    assert outcome == (1, "", lacks)


def test_what_is_complete_is_written_when_nodes_fail(
    radixkv: Any, arguments: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = [[place, 7] for place in range(len(PROMPTS))]
    reasons = {"1": "the decode node was lost", "2": "nobody knows"}

    def complete(
        arguments: object, requests: Completions, sizes: object, *, group: object
    ) -> NoReturn:
        for request, tokens in zip(requests, whole, strict=True):
            if request.request_id not in reasons:
                request.status = RequestStatus.FINISHED
                for token in tokens:
                    request.append(token)
        raise errors[-1]

    errors: list[Exception] = []
    monkeypatch.setattr(generate, "complete_with_engine", complete)
    expected = [None if str(place) in reasons else each for place, each in enumerate(whole)]
    for error, said, why in (
        (
            prompts_failed(reasons),
            "prompt 1: the decode node was lost (and 1 more)",
            reasons,
        ),
        (NodesMissingError("all are gone"), "all are gone", dict.fromkeys(reasons, "all are gone")),
    ):
        errors.append(error)
        file = tmp_path / "results.json"
        outcome = radixkv(*arguments, "--json", file)
        lines = [f"radixkv: prompt {name}: {reason}\n" for name, reason in why.items()]
        printed = "".join(f"{json.dumps(each)}\n" for each in expected)
        assert outcome == (1, printed, "".join(lines) + f"radixkv: {said}\n")
        results = json.loads(file.read_text())
        assert results == {"outputs": expected, "failures": why, "stats": {}}


def test_nothing_is_written_when_nothing_is_complete(
    radixkv: Any, arguments: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    def complete(*_: object, group: object) -> NoReturn:
        raise prompts_failed({"0": "it was cold"})

    monkeypatch.setattr(generate, "complete_with_engine", complete)
    assert radixkv(*arguments) == (1, "", "radixkv: prompt 0: it was cold\n")

"""`Fleet` and `NodeActor`, with a cluster that is not there."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from radixkv.scheduler.cli.errors import BadInputError
from radixkv.scheduler.cli.fleet import library
from radixkv.scheduler.cli.fleet.registry import REGISTRY, Deployment, FleetRegistry
from radixkv.scheduler.cli.main import build_parser
from radixkv.scheduler.cli.options.fleet import FleetSize
from radixkv.scheduler.cli.options.serve import check
from radixkv.scheduler.cli.shared import startup
from radixkv.scheduler.cli.shared.prompts import Sizes
from radixkv.scheduler.errors import NodeProcessError

from .fake_ray import HERE, Actor, Cluster, RayActorError

PACKAGE = "radixkv.scheduler.cli.fleet"
SIZES = Sizes(num_blocks=64, token_budget=32, max_running=4, max_model_len=48)
GATEWAY = "10.0.0.1:5557"
URL = "redis://:open-sesame@host"


class Nodes:
    """The gateway: which nodes were drained, and how many attempts are in progress."""

    def __init__(self) -> None:
        self.drained: list[str] = []
        self.attempts: dict[str, int] = {}

    def drain(self, peer: str) -> None:
        self.drained.append(peer)

    def num_attempts(self, peer: str) -> int:
        return self.attempts.get(peer, 0)


class World:
    """A fleet, its cluster, its gateway, and its clock."""

    def __init__(self, cluster: Cluster, modules: dict[str, ModuleType], size: str) -> None:
        self.cluster = cluster
        self.modules = modules
        self.nodes = Nodes()
        self.lines: list[str] = []
        self.now = 1000.0
        self.arguments = self.parse(size)
        vars(modules["fleet"])["time"] = SimpleNamespace(monotonic=lambda: self.now)
        self.fleet = modules["fleet"].Fleet(self.arguments, self.lines.append)

    @staticmethod
    def parse(size: str) -> argparse.Namespace:
        arguments = build_parser().parse_args(
            ["serve", "a/model", "--device-blocks=64", "--ray", size, "--storage", URL,
             "--host-blocks=8", "--silence-s=3"]
        )  # fmt: skip
        check(arguments)
        return arguments

    def start(self) -> None:
        self.fleet.start(GATEWAY, SIZES)

    def actor(self, name: str) -> Actor:
        return self.cluster.get_actor(name)

    def run_of(self, name: str) -> Any:
        return self.actor(name).calls["run"][-1]

    def wanted(self) -> Any:
        return self.actor(REGISTRY).calls["lead"][-1]

    def tick(self, seconds: float = 0.25) -> list[str]:
        """Let time pass, and return the new lines of the log."""
        self.now += seconds
        before = len(self.lines)
        self.fleet.tick(self.nodes)
        assert not self.wanted().is_done, "nobody leads the registry"
        return self.lines[before:]


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


@pytest.fixture
def modules(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, ModuleType]]:
    """The modules that import Ray, of which no other test has these."""
    for name, module in cluster.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    names = [f"{PACKAGE}.{each}" for each in ("actors", "fleet")]
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    __import__(names[-1])
    yield {name.rpartition(".")[-1]: sys.modules[name] for name in names}
    for name in names:
        del sys.modules[name]


@pytest.fixture
def world(cluster: Cluster, modules: dict[str, ModuleType]) -> World:
    return World(cluster, modules, "prefill=1,decode=2,tp=2")


def test_the_registry_lives_with_the_server_and_nobody_else_may_have_its_name(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = world.actor(REGISTRY)
    assert registry.options["scheduling_strategy"] == ("at", HERE, False)
    assert (registry.options["max_restarts"], registry.options["num_cpus"]) == (-1, 0)
    assert world.cluster.namespace == "radixkv"
    assert world.fleet.listen == "10.0.0.1:0"
    message = (
        "there is a fleet in this namespace of the Ray cluster already; name another with "
        "--ray-namespace: the name fleet is taken"
    )
    with pytest.raises(BadInputError, match=f"^{re.escape(message)}$"):
        world.modules["fleet"].Fleet(world.arguments, print)
    assert world.cluster.namespace is None, "the connection is given back"


def test_a_cluster_that_is_not_there_is_the_callers_mistake(
    cluster: Cluster, modules: dict[str, ModuleType]
) -> None:
    cluster.is_there = False
    with pytest.raises(BadInputError, match=r"^there is no Ray cluster to connect to: nobody list"):
        World(cluster, modules, "prefill=1")


def test_a_fleet_may_have_a_namespace_of_its_own(
    cluster: Cluster, modules: dict[str, ModuleType]
) -> None:
    arguments = World.parse("tp=2")
    arguments.ray_namespace = "mine"
    modules["fleet"].Fleet(arguments, print)
    assert cluster.namespace == "mine"


def test_nodes_start_with_what_each_needs_on_one_machine(world: World) -> None:
    world.start()
    assert world.wanted().arguments == (
        Deployment(GATEWAY, world.fleet._secret_text, URL),
        FleetSize(1, 2, 2),
    )
    assert set(world.cluster.actors) == {REGISTRY, "prefill-0", "decode-0", "decode-1"}
    for name in ("prefill-0", "decode-1"):
        actor = world.actor(name)
        given_name, role, model, revision, options = actor.arguments
        assert (given_name, role, model, revision) == (
            name, name.partition("-")[0], "a/model", None
        )  # fmt: skip
        command = [f"{role}-node", "d", "--name", name, "--gateway", "g:1", *options]
        arguments = build_parser().parse_args(command)
        assert (arguments.device_blocks, arguments.tp, arguments.silence_s) == (64, 2, 3)
        assert not any(URL in each or world.fleet._secret_text in each for each in options)
        assert world.cluster.groups[name]["strategy"] == "STRICT_PACK"
        assert world.cluster.groups[name]["bundles"] == [{"CPU": 2}]
        assert actor.options["scheduling_strategy"] == ("in", name, 0)
        assert (actor.options["num_cpus"], actor.options["num_gpus"]) == (2, 0)
        assert (actor.options["max_restarts"], actor.options["max_task_retries"]) == (-1, -1)
        assert actor.options["max_concurrency"] == 2
        assert len(actor.calls["run"]) == 1
    assert world.tick() == []
    assert not world.nodes.drained


def test_nodes_get_gpus_where_there_are_any(
    cluster: Cluster, modules: dict[str, ModuleType]
) -> None:
    cluster.gpus = 16
    world = World(cluster, modules, "tp=4")
    world.start()
    assert cluster.groups["decode-0"]["bundles"] == [{"CPU": 4, "GPU": 4}]
    assert world.actor("decode-0").options["num_gpus"] == 4


def test_missing_room_and_errors_before_the_start_are_told(world: World) -> None:
    world.start()
    world.fleet.check()
    assert world.fleet.describe_missing() == ""
    for name in ("prefill-0", "decode-1"):
        world.cluster.groups[name]["state"] = "PENDING"
    assert world.fleet.describe_missing() == (
        "; Ray has no room for prefill-0 and decode-1: each needs {'CPU': 2}"
    )
    world.run_of("decode-0").end(NodeProcessError("no such file"))
    with pytest.raises(NodeProcessError, match=r"^decode-0: no such file$"):
        world.fleet.check()


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (NodeProcessError("ConfigError: too large"), "ConfigError: too large"),
        (RayActorError("it is dead\nfor good"), "RayActorError: it is dead"),
    ],
)
def test_a_node_that_fails_gets_no_more_requests_and_is_replaced_after_a_pause(
    world: World, error: Exception, reason: str
) -> None:
    world.start()
    world.nodes.attempts["decode-0"] = 1
    actor = world.actor("decode-0")
    world.run_of("decode-0").end(error)
    assert world.tick(0.1) == [f"decode-0 has failed, and another node replaces it: {reason}"]
    assert world.nodes.drained == ["decode-0"]
    assert world.tick(0.1) == [], "a tick a few times a second at most"
    assert world.tick(4.7) == []
    assert "decode-2" not in world.cluster.actors
    world.nodes.attempts.clear()
    assert world.tick(0.3) == ["decode-0 has left the fleet"]
    assert "decode-2" in world.cluster.actors
    assert "decode-0" not in world.cluster.actors | world.cluster.groups
    assert not actor.calls["stop"]
    assert world.tick() == []
    assert world.nodes.drained == ["decode-0"]


def test_a_fleet_follows_the_size_that_users_ask_for(world: World) -> None:
    world.start()
    world.wanted().end(FleetSize(2, 1, 2))
    world.nodes.attempts["decode-1"] = 2
    assert world.tick() == ["decode-1 is drained"]
    assert world.nodes.drained == ["decode-1"]
    assert "prefill-1" in world.cluster.actors
    assert world.wanted().arguments[1] == FleetSize(2, 1, 2)
    assert not world.wanted().is_done
    stops = world.actor("decode-1").calls["stop"]
    assert not stops, "its requests go on"
    world.nodes.attempts.clear()
    assert (world.tick(), len(stops)) == ([], 1)
    assert (world.tick(29.0), len(stops)) == ([], 1)
    world.run_of("decode-1").end({})
    assert world.tick() == ["decode-1 has left the fleet"]
    assert len(world.actor(REGISTRY).calls["lead"]) == 2


def test_a_node_that_does_not_stop_is_killed(world: World) -> None:
    world.start()
    world.wanted().end(FleetSize(1, 1, 2))
    world.tick()
    world.tick(29.5)
    assert "decode-1" in world.cluster.actors
    world.tick(0.5)
    assert "decode-1" not in world.cluster.actors
    assert world.tick() == ["decode-1 has left the fleet"]
    assert "decode-1" not in world.cluster.groups


def test_a_registry_that_starts_again_is_told_what_the_one_before_knew(world: World) -> None:
    world.start()
    world.wanted().end(FleetSize(1, 3, 2))
    world.tick()
    world.wanted().end(RayActorError("its process has died"))
    assert world.tick() == []
    assert world.wanted().arguments[1] == FleetSize(1, 3, 2)
    assert world.fleet._roster.size == FleetSize(1, 3, 2)


@pytest.mark.parametrize("error", [None, ValueError("later")])
def test_at_its_end_a_fleet_stops_its_nodes(world: World, error: Exception | None) -> None:
    with ExitStack() as stack:
        if error is not None:
            stack.enter_context(pytest.raises(ValueError, match=r"^later$"))
        with world.fleet:
            world.start()
            actors = [world.actor(each) for each in ("prefill-0", "decode-0", "decode-1")]
            if error is not None:
                raise error
    assert [len(each.calls["stop"]) for each in actors] == [1, 1, 1]
    assert world.cluster.waited == ([(3, 30.0)] if error is None else [])
    assert world.cluster.namespace is None


@pytest.mark.parametrize("gpu_ids", [[], [0, 1]])
def test_a_node_joins_where_the_registry_says(
    cluster: Cluster,
    modules: dict[str, ModuleType],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    gpu_ids: list[int],
) -> None:
    from radixkv.scheduler.cli import nodes

    cluster.gpu_ids, cluster.address = gpu_ids, "fd00::1"
    world = World(cluster, modules, "tp=2")
    registry = world.actor(REGISTRY)
    deployment = Deployment(GATEWAY, "a secret of some length", f"file://{tmp_path / 'kv'}")
    remote = registry.join.remote

    class Answering(Actor):
        def __getattr__(self, method: str) -> Any:
            call = remote()
            call.end(deployment)
            return SimpleNamespace(remote=lambda: call)

    cluster.actors[REGISTRY] = Answering(registry.kind, (), registry.options)
    served: list[tuple[argparse.Namespace, Any, Callable[[], Callable[[], bool]]]] = []

    def serve_node(*given: Any) -> dict[str, Any]:
        served.append(given)
        return {"steps": 3}

    monkeypatch.setattr(nodes, "serve_node", serve_node)
    monkeypatch.setattr(startup, "set_compilation_cache", lambda *_, enabled: None)
    devices: list[int] = []
    actors = modules["actors"]
    monkeypatch.setattr(actors, "_use_cpus", devices.append)
    options = ["--device-blocks=64", "--tp=2", "--host-blocks=8"]
    actor = actors.NodeActor("decode-7", "decode", str(tmp_path), None, options)
    assert (actor.run(), repr(actor)) == ({"steps": 3}, "decode-7")
    [(arguments, secret, serve_until_stopped)] = served
    assert devices == ([] if gpu_ids else [2])
    assert (arguments.gateway, arguments.listen) == (GATEWAY, "[fd00::1]:0")
    assert (arguments.name, arguments.role) == ("decode-7", "decode")
    assert arguments.storage == f"file://{tmp_path / 'kv'}/decode-7"
    assert secret.key(b"x") == type(secret)(b"a secret of some length").key(b"x")
    is_stopped = serve_until_stopped()
    assert not is_stopped()
    actor.stop()
    assert is_stopped()
    late = actors.NodeActor("decode-8", "decode", str(tmp_path), None, options)
    late.stop()  # as of a node that is still waiting for the registry, or loading
    late.run()
    assert served[-1][2]()(), "a stop before the node serves is lost"


@pytest.mark.parametrize(
    ("error", "has_traceback"),
    [(BadInputError("--name is taken"), False), (ZeroDivisionError("a bug"), True)],
)
def test_errors_of_a_node_pass_through_ray_as_text(
    modules: dict[str, ModuleType],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: Exception,
    has_traceback: bool,
) -> None:
    def serve(self: object) -> None:
        raise error

    node_actor = modules["actors"].NodeActor
    monkeypatch.setattr(node_actor, "_serve", serve)
    text = f"{type(error).__name__}: {error}"
    with pytest.raises(NodeProcessError, match=f"^{re.escape(text)}$"):
        node_actor("decode-0", "decode", "m", None, []).run()
    assert ("Traceback" in capsys.readouterr().err) is has_traceback


def test_directories_are_named_as_other_processes_need_them(
    modules: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    absolute = modules["actors"].absolute
    assert absolute("model") == str(tmp_path / "model")
    assert absolute("org/model") == "org/model"


class Scaled(Actor):
    """A registry that answers at once."""

    answer: object = FleetSize(3, 5, 1)

    def __getattr__(self, method: str) -> Any:
        remote = super().__getattr__(method).remote

        def answered(*arguments: Any) -> Any:
            call = remote(*arguments)
            call.end(self.answer)
            return call

        return SimpleNamespace(remote=answered)


@pytest.mark.parametrize(
    ("options", "asked"),
    [
        (["--prefill=3", "--decode=5"], (3, 5)),
        (["--prefill=3"], (3, None)),
        (["--decode=5", "--ray-namespace=radixkv"], (None, 5)),
    ],
)
@pytest.mark.parametrize("fails", [False, True])
def test_a_scale_asks_the_registry_and_gives_its_connection_back(
    radixkv: Callable[..., Any],
    cluster: Cluster,
    modules: dict[str, ModuleType],
    monkeypatch: pytest.MonkeyPatch,
    options: list[str],
    asked: tuple[int | None, int | None],
    fails: bool,
) -> None:
    monkeypatch.setattr(library, "find_spec", lambda name: name)
    registry = cluster.actors[REGISTRY] = Scaled(FleetRegistry, (), {"name": REGISTRY})
    if fails:
        registry.answer = ValueError("each role needs 1 node or more")
        with pytest.raises(ValueError, match=r"^each role needs 1 node or more$"):
            radixkv("fleet", "scale", *options)
    else:
        told = "the fleet shall have 3 prefill and 5 decode nodes\n"
        assert radixkv("fleet", "scale", *options) == (0, told, "")
    [call] = registry.calls["scale"]
    assert call.arguments == asked
    assert cluster.namespace is None, "the connection is given back"


def test_a_scale_without_a_fleet_is_the_callers_mistake(
    radixkv: Callable[..., Any],
    cluster: Cluster,
    modules: dict[str, ModuleType],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(library, "find_spec", lambda name: name)
    outcome = radixkv("fleet", "scale", "--decode=5", "--ray-namespace=mine")
    message = "there is no fleet in the namespace 'mine' of the Ray cluster"
    assert outcome == (2, "", f"radixkv: {message}\n")
    assert cluster.namespace is None

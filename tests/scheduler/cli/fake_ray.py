"""The parts of Ray that a fleet uses, without processes: a test ends the calls of its actors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

HERE = "the first machine"


class RayError(Exception):
    """The base of Ray's errors."""


class RayActorError(RayError):
    """An actor has died."""


class Call:
    """A call of an actor's method.

    Attributes:
        arguments: those of the call.
    """

    def __init__(self, arguments: tuple[Any, ...]) -> None:
        self.arguments = arguments
        self.is_done = False
        self._result: Any = None

    def end(self, result: object) -> None:
        """Let it return a value, or raise an error."""
        self.is_done, self._result = True, result

    def result(self) -> Any:
        """Return or raise it; nobody may wait for a call that has not ended."""
        assert self.is_done, "a call that has not ended is waited for"
        if isinstance(self._result, BaseException):
            raise self._result
        return self._result


class Actor:
    """An actor, which does nothing.

    Attributes:
        kind, arguments, options: its class, and with what it was made.
        calls: calls of each method so far.
    """

    def __init__(self, kind: type, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        self.kind = kind
        self.arguments = arguments
        self.options = options
        self.calls: defaultdict[str, list[Call]] = defaultdict(list)

    def __getattr__(self, method: str) -> Any:
        assert hasattr(self.kind, method), f"{self.kind} has no {method}"

        def remote(*arguments: Any) -> Call:
            self.calls[method].append(Call(arguments))
            return self.calls[method][-1]

        return _Remote(remote)


class _Remote:
    def __init__(self, remote: Callable[..., Any]) -> None:
        self.remote = remote


class _Maker:
    def __init__(self, make: Callable[..., Any]) -> None:
        self.options = lambda **options: _Remote(lambda *given: make(given, options))


class Cluster:
    """A cluster, and the module ``ray`` that is connected to it.

    Attributes:
        actors: the actors that live, by name.
        groups: the placement groups, by name: strategy, bundles and state.
        gpus: GPUs of all machines.
        address: address of the machine of this process.
        is_there: whether a process can connect.
        namespace: that of this process; None while it is not connected.
        gpu_ids: GPUs that this process may use.
        waited: numbers of calls that were waited for, with the limit.
    """

    def __init__(self) -> None:
        self.actors: dict[str, Actor] = {}
        self.groups: dict[str, dict[str, Any]] = {}
        self.gpus = 0
        self.address = "10.0.0.1"
        self.is_there = True
        self.namespace: str | None = None
        self.gpu_ids: list[int] = []
        self.waited: list[tuple[int, float]] = []

    def modules(self) -> dict[str, Any]:
        """Return the modules, by name."""
        ray, exceptions, util = (ModuleType(each) for each in ("ray", "exceptions", "util"))
        groups, strategies = ModuleType("placement_group"), ModuleType("scheduling_strategies")
        vars(exceptions).update(RayError=RayError, RayActorError=RayActorError)
        vars(groups).update(
            PlacementGroup=str,
            placement_group=self._make_group,
            placement_group_table=self.groups.__getitem__,
            remove_placement_group=self.groups.pop,
        )
        vars(strategies).update(
            NodeAffinitySchedulingStrategy=lambda node, soft: ("at", node, soft),
            PlacementGroupSchedulingStrategy=lambda group, index: ("in", group, index),
        )
        vars(util).update(
            get_node_ip_address=lambda: self.address,
            placement_group=groups,
            scheduling_strategies=strategies,
        )
        context = type("Context", (), {"get_node_id": staticmethod(lambda: HERE)})
        vars(ray).update(
            init=self._init,
            shutdown=self._shutdown,
            get=Call.result,
            wait=self._wait,
            kill=self._kill,
            remote=lambda kind: _Maker(lambda *given: self._make(kind, *given)),
            get_actor=self.get_actor,
            get_gpu_ids=lambda: self.gpu_ids,
            cluster_resources=lambda: {"CPU": 8.0, **({"GPU": self.gpus} if self.gpus else {})},
            get_runtime_context=context,
            exceptions=exceptions,
            util=util,
        )
        return {
            "ray": ray,
            "ray.exceptions": exceptions,
            "ray.util": util,
            "ray.util.placement_group": groups,
            "ray.util.scheduling_strategies": strategies,
        }

    def get_actor(self, name: str) -> Actor:
        """Return an actor by its name."""
        if name not in self.actors:
            raise ValueError(f"no actor {name!r}")
        return self.actors[name]

    def _init(self, *, namespace: str, **options: Any) -> None:
        if not self.is_there:
            raise ConnectionError("nobody listens")
        self.namespace = namespace

    def _shutdown(self) -> None:
        self.namespace = None

    def _make(self, kind: type, given: tuple[Any, ...], options: dict[str, Any]) -> Actor:
        name = options["name"]
        if name in self.actors:
            raise ValueError(f"the name {name} is taken")
        actor = self.actors[name] = Actor(kind, given, options)
        return actor

    def _make_group(self, bundles: list[dict[str, int]], *, strategy: str, name: str) -> str:
        self.groups[name] = {"strategy": strategy, "bundles": bundles, "state": "CREATED"}
        return name

    def _kill(self, actor: Actor) -> None:
        for calls in actor.calls.values():
            for call in calls:
                if not call.is_done:
                    call.end(RayActorError("it was killed"))
        self.actors.pop(actor.options["name"], None)

    def _wait(
        self, calls: Sequence[Call], *, timeout: float, num_returns: int = 1
    ) -> tuple[list[Call], list[Call]]:
        if timeout:
            self.waited.append((num_returns, timeout))
        done = [each for each in calls if each.is_done][:num_returns]
        return done, [each for each in calls if each not in done]

"""`Fleet`: starts, watches and ends the nodes of a server on Ray."""

from __future__ import annotations

import argparse
import os
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from math import inf
from types import TracebackType
from typing import Any, Final

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from ...errors import NodeProcessError
from ...nodes.channel import Secret
from ...nodes.remote_nodes import RemoteNodes
from ..errors import BadInputError
from ..generate_on_nodes import node_options
from ..options.fleet import NAMESPACE, FleetSize
from ..prompts import Sizes
from .actors import NodeActor, absolute, listen_address
from .registry import REGISTRY, Deployment, FleetRegistry

_CHECK_S: Final = 0.25
_END_S: Final = 30.0
_PAUSE_S: Final = 5.0
"""How long after the error of a node another one replaces it, so that errors do not spin."""
_USAGE_STATS: Final = "RAY_USAGE_STATS_ENABLED"


@dataclass(slots=True)
class _Node:
    """A node.

    Attributes:
        group: the placement group, which has what the node needs on one machine.
        run: the call that lasts as long as the node.
        is_leaving: whether it gets no more requests.
        is_stopped: whether it was told to end.
    """

    role: str
    group: PlacementGroup
    actor: Any
    run: Any
    is_leaving: bool = False
    is_stopped: bool = False

    def stop(self) -> None:
        """Tell the node to end, once."""
        if not self.is_stopped:
            self.is_stopped = True
            self.actor.stop.remote()


class Fleet:
    """The nodes of a server, as actors of Ray. As a context manager, it ends them on exit.

    Ray starts a node again whose process or machine has died. A node that has ended with an error,
    or that somebody has killed for good, is replaced by one of another name. Names are not used
    again, so that a message of a node that was drained is nobody else's.

    Attributes:
        secret: the secret, which the gateway's channel needs, too.
        listen: where the gateway has to listen.
    """

    def __init__(self, arguments: argparse.Namespace, say: Callable[[str], object]) -> None:
        """Connect to the cluster, or start one on this machine.

        Args:
            arguments: the options of `radixkv serve`, after `expand_ray`.
            say: takes a line for the log.

        Raises:
            BadInputError: if there is no such cluster, or it has a fleet of this name.
        """
        self._arguments = arguments
        self._say = say
        self._size: FleetSize = arguments.ray
        self._numbers = {"prefill": count(), "decode": count()}
        self._nodes: dict[str, _Node] = {}
        self._next_check_at = -inf
        self._restart_at = -inf
        text = secrets.token_hex(32)
        self.secret = Secret(text.encode())
        self._secret_text = text
        connect_to_ray(arguments.ray_namespace or NAMESPACE)
        try:
            self.listen = listen_address()
            self._has_gpus = ray.cluster_resources().get("GPU", 0) > 0
            here = ray.get_runtime_context().get_node_id()
            options: dict[str, Any] = {
                "name": REGISTRY,
                "num_cpus": 0,
                "max_restarts": -1,
                "max_task_retries": -1,
                "scheduling_strategy": NodeAffinitySchedulingStrategy(here, soft=False),
            }
            try:
                self._registry = ray.remote(FleetRegistry).options(**options).remote()
            except ValueError as error:
                raise BadInputError(
                    f"there is a fleet in this namespace of the Ray cluster already; name another "
                    f"with --ray-namespace: {error}"
                ) from None
        except BaseException:
            ray.shutdown()
            raise

    def __enter__(self) -> Fleet:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for node in self._nodes.values():
            node.stop()
        runs = [node.run for node in self._nodes.values()]
        if runs and error is None:  # else some may not have started
            ray.wait(runs, num_returns=len(runs), timeout=_END_S)
        ray.shutdown()

    def start(self, gateway: str, sizes: Sizes) -> None:
        """Start the nodes.

        Args:
            gateway: address of the gateway.
            sizes: of each node.
        """
        self._sizes = sizes
        self._deployment = Deployment(gateway, self._secret_text, self._arguments.storage)
        self._wanted = self._registry.lead.remote(self._deployment, self._size)
        self._start_missing()

    def check(self) -> None:
        """Raise an error if a node cannot start.

        Raises:
            NodeProcessError: with its reason.
        """
        for name, reason in self._failed().items():
            raise NodeProcessError(f"{name}: {reason}")

    def describe_missing(self) -> str:
        """Say for which nodes Ray has no room; empty if there are none."""
        names = [name for name, node in self._nodes.items() if not node.group.wait(0)]
        if not names:
            return ""
        return f"; Ray has no room for {' and '.join(names)}: each needs {self._bundle()}"

    def tick(self, nodes: RemoteNodes) -> None:
        """Look after the nodes, a few times a second at most.

        Args:
            nodes: the gateway, which gives nodes that leave no more requests.
        """
        now = time.monotonic()
        if now < self._next_check_at:
            return
        self._next_check_at = now + _CHECK_S
        if _is_done(self._wanted):
            with suppress(ray.exceptions.RayActorError):  # Ray starts it again
                self._size = ray.get(self._wanted)
                self._restart_at = now
            self._wanted = self._registry.lead.remote(self._deployment, self._size)
        for name, reason in self._failed().items():
            if not self._nodes[name].is_leaving:
                self._say(f"{name} has failed, and another node replaces it: {reason}")
                self._restart_at = now + _PAUSE_S
                self._let_go(name, nodes)
        if now >= self._restart_at:
            self._start_missing()
        for role in ("prefill", "decode"):
            for name in self._staying(role)[getattr(self._size, role) :]:
                self._say(f"{name} is drained")
                self._let_go(name, nodes)
        for name, node in list(self._nodes.items()):
            if node.is_leaving and _is_done(node.run):
                self._remove(name)
            elif node.is_leaving and not nodes.num_attempts(name):
                node.stop()

    def _let_go(self, name: str, nodes: RemoteNodes) -> None:
        """Let a node end when its requests have ended."""
        self._nodes[name].is_leaving = True
        nodes.drain(name)

    def _staying(self, role: str) -> list[str]:
        return [
            name for name, node in self._nodes.items() if node.role == role and not node.is_leaving
        ]

    def _start_missing(self) -> None:
        for role in ("prefill", "decode"):
            for _ in range(len(self._staying(role)), getattr(self._size, role)):
                self._start(f"{role}-{next(self._numbers[role])}", role)

    def _start(self, name: str, role: str) -> None:
        bundle = self._bundle()
        group = placement_group([bundle], strategy="STRICT_PACK", name=name)
        options: dict[str, Any] = {
            "name": name,
            "num_cpus": bundle["CPU"],
            "num_gpus": bundle.get("GPU", 0),
            "max_restarts": -1,
            "max_task_retries": -1,
            "max_concurrency": 2,  # `run`, and `stop` meanwhile
            "scheduling_strategy": PlacementGroupSchedulingStrategy(group, 0),
        }
        given = self._arguments
        actor = (
            ray.remote(NodeActor)
            .options(**options)
            .remote(
                name,
                role,
                absolute(given.model),
                given.revision,
                [str(each) for each in node_options(given, self._sizes, role)],
            )
        )
        self._nodes[name] = _Node(role, group, actor, actor.run.remote())

    def _bundle(self) -> dict[str, int]:
        """Return what a node needs: a core for each device, and GPUs where there are any."""
        return {"CPU": self._size.tp, **({"GPU": self._size.tp} if self._has_gpus else {})}

    def _failed(self) -> dict[str, str]:
        """Return the reasons of nodes that have ended with an error, by name."""
        failed = {}
        for name, node in self._nodes.items():
            if _is_done(node.run):
                try:
                    ray.get(node.run)
                except ray.exceptions.RayError as error:
                    cause = getattr(error, "cause", None) or error
                    failed[name] = f"{type(cause).__name__}: {cause}"
        return failed

    def _remove(self, name: str) -> None:
        node = self._nodes.pop(name)
        ray.kill(node.actor)
        remove_placement_group(node.group)
        self._say(f"{name} has left the fleet")


def connect_to_ray(namespace: str, **options: Any) -> None:
    """Connect this process to a Ray cluster.

    Args:
        namespace: the namespace of the fleet.
        options: see `ray.init`, which starts a cluster on this machine if there is none.

    Raises:
        BadInputError: if the cluster that the environment or the options name is not there.
    """
    os.environ.setdefault(_USAGE_STATS, "0")  # a cluster that is started here sends no statistics
    try:
        ray.init(namespace=namespace, **options)
    except ConnectionError as error:
        raise BadInputError(f"there is no Ray cluster to connect to: {error}") from None


def _is_done(call: Any) -> bool:
    return bool(ray.wait([call], timeout=0)[0])

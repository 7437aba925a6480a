"""`Fleet`: starts, watches and ends the nodes of a server on Ray."""

from __future__ import annotations

import argparse
import os
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from types import TracebackType
from typing import Any, Final

import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from ...errors import NodeProcessError
from ...nodes.channel import Secret
from ...nodes.remote_nodes import RemoteNodes
from ..errors import BadInputError
from ..generate_on_nodes import node_options
from ..options.fleet import NAMESPACE
from ..shared.prompts import Sizes
from .actors import NodeActor, absolute, listen_address
from .registry import REGISTRY, Deployment, FleetRegistry
from .roster import Roster

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
        stopped_at: when it was told to end.
    """

    group: PlacementGroup
    actor: Any
    run: Any
    stopped_at: float = inf

    def stop(self, now: float) -> None:
        """Tell the node to end; if it does not, kill it later, as it perhaps waits for room."""
        if self.stopped_at == inf:
            self.stopped_at = now
            self.actor.stop.remote()
        elif now - self.stopped_at >= _END_S:
            ray.kill(self.actor)


class Fleet:
    """The nodes of a server, as actors of Ray. As a context manager, it ends them on exit.

    Ray starts a node again whose process or machine has died. A node that has ended with an error,
    or that somebody has killed for good, is replaced by one of another name.

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
        self._roster = Roster(arguments.ray)
        self._nodes: dict[str, _Node] = {}
        self._next_check_at = -inf
        self._start_at = -inf
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
            node.stop(time.monotonic())
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
        self._wanted = self._registry.lead.remote(self._deployment, self._roster.size)
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
        names = [
            name
            for name, node in self._nodes.items()
            if placement_group_table(node.group)["state"] == "PENDING"
        ]
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
                self._roster.size = ray.get(self._wanted)
            self._wanted = self._registry.lead.remote(self._deployment, self._roster.size)
        for name, reason in self._failed().items():
            if not self._roster.is_leaving(name):
                self._say(f"{name} has failed, and another node replaces it: {reason}")
                self._roster.let_go(name)
                nodes.drain(name)
                self._start_at = now + _PAUSE_S
        if now >= self._start_at:
            self._start_missing()
        for name in self._roster.take_surplus():
            self._say(f"{name} is drained")
            nodes.drain(name)
        for name in self._roster.idle(nodes.num_attempts):
            if _is_done(self._nodes[name].run):
                self._remove(name)
            else:
                self._nodes[name].stop(now)

    def _start_missing(self) -> None:
        for name, role in self._roster.take_missing():
            self._start(name, role)

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
        self._nodes[name] = _Node(group, actor, actor.run.remote())

    def _bundle(self) -> dict[str, int]:
        """Return what a node needs: a core for each device, and GPUs where there are any."""
        tp = self._roster.size.tp
        return {"CPU": tp, **({"GPU": tp} if self._has_gpus else {})}

    def _failed(self) -> dict[str, str]:
        """Return the reasons of nodes that have ended with an error, by name."""
        failed = {}
        for name, node in self._nodes.items():
            if _is_done(node.run):
                try:
                    ray.get(node.run)
                except NodeProcessError as error:  # Ray's error is one, too
                    failed[name] = str(getattr(error, "cause", error))
                except ray.exceptions.RayError as error:  # nobody starts it again
                    failed[name] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        return failed

    def _remove(self, name: str) -> None:
        self._roster.remove(name)
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

"""A node in a process of Ray."""

from __future__ import annotations

import os
import traceback
from collections.abc import Sequence
from pathlib import Path
from threading import Event
from typing import Any

import ray

from ....kvcache.errors import RadixKVError
from ...errors import NodeProcessError
from ..errors import BadInputError
from .registry import REGISTRY, Deployment


class NodeActor:
    """A node; its actor has the node's name.

    `run` is one call that lasts as long as the node. When the process has died, Ray starts another
    one and repeats the call there.
    """

    def __init__(
        self, name: str, role: str, model: str, revision: str | None, options: Sequence[str]
    ) -> None:
        """Describe a node; nothing is loaded yet.

        Args:
            name: name of the node.
            role: prefill or decode.
            model, revision: directory or name of the model; see `locate_model`.
            options: options of the command ``ROLE-node``, without the network and storage.
        """
        self._name = name
        self._role = role
        self._model = model
        self._revision = revision
        self._options = options
        self._stopped = Event()

    def __repr__(self) -> str:
        return self._name

    def run(self) -> dict[str, Any]:
        """Serve until `stop`, and return the statistics.

        Raises:
            NodeProcessError: with the error that has ended the node. Ray cannot pass on errors
                whose constructors take more than a message.
        """
        try:
            return self._serve()
        except Exception as error:
            if not isinstance(error, RadixKVError | BadInputError | OSError):
                traceback.print_exc()  # a bug in radixkv: its traceback is the report
            raise NodeProcessError(f"{type(error).__name__}: {error}") from None

    def _serve(self) -> dict[str, Any]:
        from ...nodes.channel.secret import Secret
        from ...text import locate_model
        from ..main import build_parser
        from ..shared.startup import set_compilation_cache

        deployment: Deployment = ray.get(ray.get_actor(REGISTRY).join.remote())
        directory = locate_model(self._model, self._revision)
        network = ["--gateway", deployment.gateway, "--listen", listen_address()]
        command = [f"{self._role}-node", str(directory), "--name", self._name]
        arguments = build_parser().parse_args([*command, *network, *self._options])
        set_compilation_cache(os.environ, enabled=not arguments.no_compilation_cache)
        if not ray.get_gpu_ids():
            _use_cpus(arguments.tp or 1)
        from ..nodes import check, serve_node  # here, because they load JAX
        from ..shared.tiers import storage_of_node

        arguments.storage = deployment.storage
        arguments.storage = storage_of_node(arguments, self._name)
        check(arguments)
        secret = Secret(deployment.secret.encode())
        return serve_node(arguments, secret, lambda: self._stopped.is_set)

    def stop(self) -> None:
        """End the node."""
        self._stopped.set()


def listen_address() -> str:
    """Return the address of this machine in the cluster, with any free port."""
    host: str = ray.util.get_node_ip_address()
    return f"[{host}]:0" if ":" in host else f"{host}:0"


def _use_cpus(num_devices: int) -> None:
    """Let JAX have devices of the CPU, as Ray has given this process no GPU."""
    import jax

    settings: Any = jax.config  # its method has no types
    settings.update("jax_platforms", "cpu")
    if num_devices > 1:
        settings.update("jax_num_cpu_devices", num_devices)


def absolute(model: str) -> str:
    """Return the path of a directory as other processes need it, or a name as it is."""
    return str(Path(model).resolve()) if Path(model).is_dir() else model

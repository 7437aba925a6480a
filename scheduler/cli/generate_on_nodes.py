"""`radixkv generate --disaggregate` with prefill and decode nodes in other processes."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Final

from ..errors import NodesMissingError
from ..handoff.gateway_messages import GATEWAY
from ..models import load_config
from ..nodes.channel import Secret, ZmqChannel, load_secret
from ..nodes.channel.codec import VERSION
from ..nodes.open_files import reserve_files
from ..nodes.processes import NodeProcesses
from ..nodes.remote_nodes import RemoteNodes
from .errors import BadInputError
from .exit_status import say
from .shared.completions import Completions
from .shared.output import ProgressBar
from .shared.prompts import Sizes, prompts_failed
from .shared.tiers import storage_of_node

SILENCE_S: Final = 5.0
TIMEOUT_S: Final = 120.0
_STORAGE: Final = "RADIXKV_STORAGE"
"""Environment variable that gives a started node its storage URL, which may contain a password."""
_VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
_GPUS: Final = Path("/proc/driver/nvidia/gpus")
"""Has a directory for each GPU; not there without the driver."""


def complete_on_nodes(
    arguments: argparse.Namespace, requests: Completions, sizes: Sizes
) -> dict[str, Any]:
    """Complete all requests, and return the statistics of each node that was started here.

    Raises:
        HandoffFailedError: Requests failed, and the others are complete.
        NodeProcessError: A node that was started here ended.
        NodesMissingError: Nodes did not connect in time, or were lost and did not come back.
        BadInputError: A node connected that cannot serve.
    """
    if arguments.gateway is not None:
        secret = load_secret(arguments.secret_file)
        with closing(open_gateway(arguments.gateway, secret)) as channel:
            _serve(arguments, requests, channel)
        return {}
    with NodeProcesses() as processes:
        with closing(open_gateway("127.0.0.1:0", processes.secret)) as channel:
            start_nodes(arguments, sizes, processes, channel)
            _serve(arguments, requests, channel, processes.check)
        return processes.stop()


def start_nodes(
    arguments: argparse.Namespace, sizes: Sizes, processes: NodeProcesses, channel: ZmqChannel
) -> None:
    """Start the nodes that the options ask for; each connects to the gateway's channel."""
    numbers = {role: getattr(arguments, role) or 1 for role in ("prefill", "decode")}
    gpus = iter(split_gpus(gpus_of_machine(), sum(numbers.values()), arguments.tp or 1))
    for role, number in numbers.items():
        options = [arguments.model_dir, *node_options(arguments, sizes, role)]
        options += ["--gateway", channel.address]
        for index in range(number):
            name = f"{role}-{index}"
            url = storage_of_node(arguments, name)
            storage = [] if url is None else ["--storage", f"env:{_STORAGE}"]
            environment = next(gpus) | ({} if url is None else {_STORAGE: url})
            processes.start(name, f"{role}-node", [*options, *storage], environment)


def gpus_of_machine() -> list[str]:
    """Return the ids of the NVIDIA GPUs that processes started here may use."""
    visible = os.environ.get(_VISIBLE)
    if visible is not None:
        return [each.strip() for each in visible.split(",") if each.strip()]
    return [str(number) for number, _ in enumerate(_GPUS.glob("*"))]


def split_gpus(gpus: Sequence[str], num_nodes: int, num_devices: int) -> list[dict[str, str]]:
    """Return an environment for each node, with GPUs of its own; empty ones if there are too few.

    JAX reserves most of the memory of each GPU that a process sees.
    """
    if len(gpus) < num_nodes * num_devices:
        return [{} for _ in range(num_nodes)]
    return [
        {_VISIBLE: ",".join(gpus[node * num_devices : (node + 1) * num_devices])}
        for node in range(num_nodes)
    ]


def node_options(arguments: argparse.Namespace, sizes: Sizes, role: str) -> list[object]:
    """Return the options of a node of a role, without model, name, network and storage URL."""
    options: list[object] = [
        *("--transport", arguments.transport or "jax"),
        *("--block-size", arguments.block_size, "--device-blocks", sizes.num_blocks),
        *("--token-budget", sizes.token_budget, "--max-running", sizes.max_running),
        *("--max-model-len", sizes.max_model_len),
    ]
    for option in (
        *("dtype", "tp", "layer_groups", "host_blocks", "host_write", "storage_max_bytes"),
        "silence_s",
    ):
        if getattr(arguments, option) is not None:
            options += [f"--{option.replace('_', '-')}", getattr(arguments, option)]
    if arguments.no_compilation_cache:
        options += ["--no-compilation-cache"]
    if role == "decode":
        options += ["--preempt", arguments.preempt, "--reserve-tokens", arguments.reserve_tokens]
        if arguments.depth is not None:
            options += ["--depth", arguments.depth]
    return options


def open_gateway(address: str, secret: Secret | None) -> ZmqChannel:
    """Return the gateway's channel, to which nodes connect."""
    max_peers = reserve_files(transport=False)
    return ZmqChannel(
        GATEWAY, epoch=time.time_ns(), bind=address, secret=secret, max_peers=max_peers
    )


def _serve(
    arguments: argparse.Namespace,
    requests: Completions,
    channel: ZmqChannel,
    check_processes: Callable[[], None] = lambda: None,
) -> None:
    """Be the gateway: wait for the nodes, and complete all requests on them."""
    timeout_s = TIMEOUT_S if arguments.timeout_s is None else arguments.timeout_s
    nodes = RemoteNodes(
        channel,
        model=load_config(arguments.model_dir).name,
        silence_s=SILENCE_S if arguments.silence_s is None else arguments.silence_s,
        stream=requests.has_stop,
    )
    with ProgressBar(quiet=False) as progress:
        wait_for(nodes, arguments, timeout_s, check_processes)
        for request in requests:
            nodes.add_request(request)
        while nodes.has_work:
            requests.step(nodes)
            check_processes()
            nodes.check(timeout_s)
            without = f" without {' and '.join(nodes.gone)}" if nodes.gone else ""
            progress(f"completing prompts{without}", len(requests) - nodes.num_open, len(requests))
    if failures := requests.failures(nodes.failures):
        raise prompts_failed(failures)


def wait_for(
    nodes: RemoteNodes,
    arguments: argparse.Namespace,
    timeout_s: float,
    check_processes: Callable[[], None] = lambda: None,
) -> None:
    """Wait until the wanted number of nodes of each role serves.

    Raises:
        BadInputError: A node connected that cannot serve.
        NodesMissingError: Too few nodes connected within `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    has_warned = False
    wanted = {"prefill": arguments.prefill or 1, "decode": arguments.decode or 1}
    while any(nodes.count(role) < number for role, number in wanted.items()):
        nodes.step()
        check_processes()
        if nodes.has_refused_secrets and not has_warned:
            say(f"waiting for nodes{nodes.drop_summary}")
            has_warned = True
        refused = [
            f"{peer} is refused: {node.refusal}"
            for peer, node in nodes.nodes.items()
            if node.refusal
        ]
        refused += [
            f"a node speaks version {version} of the control channel, and this process {VERSION}"
            for version in sorted(nodes.other_versions)
        ]
        if refused:
            raise BadInputError("; ".join(refused))
        if time.monotonic() >= deadline:
            counts = " and ".join(
                f"{nodes.count(role)} of {number} {role} nodes" for role, number in wanted.items()
            )
            raise NodesMissingError(f"after {timeout_s:g} s there are {counts}{nodes.drop_summary}")

"""`radixkv generate --disaggregate`: prefill and decode on nodes in processes of their own."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any

from ..errors import NodesMissingError
from ..handoff.gateway_messages import GATEWAY
from ..models import load_config
from ..nodes.channel import (
    Secret,
    ZmqChannel,
    load_secret,
)
from ..nodes.channel.codec import VERSION
from ..nodes.processes import NodeProcesses
from ..nodes.remote_nodes import RemoteNodes
from ..request import Request
from .disaggregate_options import Sizes
from .disaggregate_run import run_requests
from .errors import BadInputError
from .progress import ProgressLine
from .tier_setup import storage_of_node

_SILENCE_S = 5.0
_TIMEOUT_S = 120.0
_STORAGE = "RADIXKV_STORAGE"
"""In the environment of a node that is started: its storage's URL, which may hold a password."""


def complete_apart(
    arguments: argparse.Namespace, requests: Sequence[Request], sizes: Sizes
) -> dict[str, Any]:
    """Run all requests to their ends; return what each node says that it has done.

    Raises:
        HandoffFailedError: if one comes to nothing.
        NodeProcessError: if a node ends that was started here.
        NodesMissingError: if nodes do not come, or go and do not come back.
        BadInputError: if a node comes that does not fit.
    """
    if arguments.gateway is not None:
        return _by_hand(arguments, requests)
    return _in_processes(arguments, requests, sizes)


def _in_processes(
    arguments: argparse.Namespace, requests: Sequence[Request], sizes: Sizes
) -> dict[str, Any]:
    common = [
        *(arguments.model_dir, "--transport", arguments.transport or "jax"),
        *("--block-size", arguments.block_size, "--device-blocks", sizes.num_blocks),
        *("--token-budget", sizes.token_budget, "--max-running", sizes.max_running),
        *("--max-model-len", sizes.max_model_len),
    ]
    if arguments.host_blocks is not None:
        common += ["--host-blocks", arguments.host_blocks]
    if arguments.host_write is not None:
        common += ["--host-write", arguments.host_write]
    if arguments.storage_max_bytes is not None:
        common += ["--storage-max-bytes", arguments.storage_max_bytes]
    reserve = "no_evict" if arguments.reserve_tokens is None else arguments.reserve_tokens
    generates = ["--preempt", arguments.preempt, "--reserve-tokens", reserve]
    with NodeProcesses() as processes:
        with closing(_open_gateway("127.0.0.1:0", processes.secret)) as channel:
            common += ["--gateway", channel.address]
            for role, options in (("prefill", common), ("decode", [*common, *generates])):
                for place in range(getattr(arguments, role) or 1):
                    name = f"{role}-{place}"
                    url = storage_of_node(arguments, name)
                    storage = [] if url is None else ["--storage", f"env:{_STORAGE}"]
                    environment = {} if url is None else {_STORAGE: url}
                    processes.start(name, f"{role}-node", [*options, *storage], environment)
            _serve(arguments, requests, channel, processes.check)
        return processes.stop()


def _by_hand(arguments: argparse.Namespace, requests: Sequence[Request]) -> dict[str, Any]:
    with closing(_open_gateway(arguments.gateway, load_secret(arguments.secret_file))) as channel:
        _serve(arguments, requests, channel)
    return {}


def _open_gateway(address: str, secret: Secret | None) -> ZmqChannel:
    return ZmqChannel(GATEWAY, epoch=time.time_ns(), bind=address, secret=secret)


def _serve(
    arguments: argparse.Namespace,
    requests: Sequence[Request],
    channel: ZmqChannel,
    check_processes: Callable[[], None] = lambda: None,
) -> None:
    """Be the gateway of nodes in other processes."""
    timeout_s = _TIMEOUT_S if arguments.timeout_s is None else arguments.timeout_s
    nodes = RemoteNodes(
        channel,
        block_size=arguments.block_size,
        model=load_config(arguments.model_dir).name,
        silence_s=_SILENCE_S,
    )
    with ProgressLine(quiet=False) as progress:

        def check() -> None:
            check_processes()
            nodes.check(timeout_s)
            without = f" without {' and '.join(nodes.gone)}" if nodes.gone else ""
            progress(f"completing prompts{without}", len(requests) - nodes.num_open, len(requests))

        _wait_for(nodes, arguments, timeout_s, check_processes)
        run_requests(nodes, requests, check)


def _wait_for(
    nodes: RemoteNodes,
    arguments: argparse.Namespace,
    timeout_s: float,
    check: Callable[[], None] = lambda: None,
) -> None:
    """Wait until as many nodes of each role serve as were asked for.

    Raises:
        BadInputError: if one comes that cannot serve.
        NodesMissingError: if they do not come.
    """
    deadline = time.monotonic() + timeout_s
    has_warned = False
    wanted = {"prefill": arguments.prefill or 1, "decode": arguments.decode or 1}
    while any(nodes.count(role) < number for role, number in wanted.items()):
        nodes.step()
        check()
        if nodes.strangers and not has_warned:
            print(f"radixkv: waiting for nodes{nodes.unheard}", file=sys.stderr, flush=True)
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
            missing = [
                f"{nodes.count(role)} of {number} {role} nodes" for role, number in wanted.items()
            ]
            there_are = " and ".join(missing)
            raise NodesMissingError(f"after {timeout_s:g} s there are {there_are}{nodes.unheard}")

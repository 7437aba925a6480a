"""`radixkv generate --disaggregate`: prefill and decode on nodes of their own."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from contextlib import closing
from typing import Any, Protocol

from ..channel import Secret, ZmqChannel, load_secret
from ..disaggregated import DecodeEngine, Disaggregated, PrefillEngine
from ..disaggregated.node_loop import DESK
from ..disaggregated.processes import NodeProcesses
from ..disaggregated.remote import RemoteNodes
from ..errors import SchedulerError
from ..handoff import Timing
from ..models import load_model
from ..request import Request
from ..transport import InProcessExchange, InProcessTransport
from .apart_options import Sizes
from .errors import BadInputError
from .node import describe
from .options import host_tier

_JOIN_S = 120.0


class HandoffFailedError(SchedulerError):
    """A request came to nothing on all nodes that it was tried on."""


class _Nodes(Protocol):
    """What completes requests."""

    @property
    def failures(self) -> dict[str, str]: ...
    def add_request(self, request: Request) -> None: ...
    def step(self) -> list[Request]: ...
    @property
    def has_work(self) -> bool: ...


def complete_apart(
    arguments: argparse.Namespace, requests: Sequence[Request], sizes: Sizes
) -> dict[str, Any]:
    """Run all requests to their ends; return what each node says that it has done.

    Raises:
        HandoffFailedError: if one comes to nothing.
        NodeProcessError: if a node ends by itself.
        BadInputError: if the nodes that are started by hand do not come, or do not fit.
    """
    if arguments.transport == "inprocess":
        return _in_process(arguments, requests, sizes)
    if arguments.desk is not None:
        return _by_hand(arguments, requests)
    return _in_processes(arguments, requests, sizes)


def _in_process(
    arguments: argparse.Namespace, requests: Sequence[Request], sizes: Sizes
) -> dict[str, Any]:
    model, exchange, now = load_model(arguments.model_dir), InProcessExchange(), time.monotonic()
    options: dict[str, Any] = {
        "epoch": 1,
        "now": now,
        "timing": Timing(),
        "block_size": arguments.block_size,
        "num_blocks": sizes.num_blocks,
        "token_budget": sizes.token_budget,
        "max_running": sizes.max_running,
        "max_model_len": sizes.max_model_len,
        "host": host_tier(arguments),
    }
    nodes = Disaggregated(
        [
            PrefillEngine(model, InProcessTransport(exchange), **options)
            for _ in range(arguments.prefill or 1)
        ],
        [
            DecodeEngine(
                model,
                InProcessTransport(exchange),
                preempt=arguments.preempt,
                reserve_tokens=arguments.reserve_tokens,
                **options,
            )
            for _ in range(arguments.decode or 1)
        ],
    )
    try:
        _run(nodes, requests)
        return {peer: describe(stats) for peer, stats in nodes.stats().items()}
    finally:
        nodes.close()


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
        common += ["--host-blocks", arguments.host_blocks, "--host-write", arguments.host_write]
    reserve = "no_evict" if arguments.reserve_tokens is None else arguments.reserve_tokens
    generates = ["--preempt", arguments.preempt, "--reserve-tokens", reserve]
    with NodeProcesses() as processes:
        with closing(_open_desk("127.0.0.1:0", processes.secret)) as channel:
            common += ["--desk", channel.address]
            for place in range(arguments.prefill or 1):
                processes.start(f"prefill-{place}", "prefill-node", common)
            for place in range(arguments.decode or 1):
                processes.start(f"decode-{place}", "decode-node", [*common, *generates])
            nodes = RemoteNodes(channel, block_size=arguments.block_size)
            _wait_for(nodes, arguments, processes)
            _run(nodes, requests, processes)
        return processes.stop()


def _by_hand(arguments: argparse.Namespace, requests: Sequence[Request]) -> dict[str, Any]:
    with closing(_open_desk(arguments.desk, load_secret(arguments.secret_file))) as channel:
        nodes = RemoteNodes(channel, block_size=arguments.block_size)
        _wait_for(nodes, arguments)
        _run(nodes, requests)
    return {}


def _open_desk(address: str, secret: Secret | None) -> ZmqChannel:
    return ZmqChannel(DESK, epoch=time.time_ns(), bind=address, secret=secret)


def _wait_for(
    nodes: RemoteNodes, arguments: argparse.Namespace, processes: NodeProcesses | None = None
) -> None:
    """Wait until as many nodes of each role serve as were asked for.

    Raises:
        BadInputError: if one comes that cannot serve, or they do not come.
    """
    deadline = time.monotonic() + _JOIN_S
    wanted = {"prefill": arguments.prefill or 1, "decode": arguments.decode or 1}
    while any(nodes.count(role) < number for role, number in wanted.items()):
        nodes.step()
        if processes is not None:
            processes.check()
        refused = [
            f"{peer} is refused: {node.refusal}"
            for peer, node in nodes.nodes.items()
            if node.refusal
        ]
        if refused:
            raise BadInputError("; ".join(refused))
        if time.monotonic() >= deadline:
            missing = [
                f"{nodes.count(role)} of {number} {role} nodes" for role, number in wanted.items()
            ]
            came = f"after {_JOIN_S:g} s there are {' and '.join(missing)}"
            dropped = [f"{count} {reason.value}" for reason, count in nodes.dropped.items()]
            if dropped:
                came += f"; dropped messages: {', '.join(dropped)}"
            raise BadInputError(came)


def _run(
    nodes: _Nodes, requests: Sequence[Request], processes: NodeProcesses | None = None
) -> None:
    for request in requests:
        nodes.add_request(request)
    while nodes.has_work:
        nodes.step()
        if processes is not None:
            processes.check()
    for request_id, reason in nodes.failures.items():
        raise HandoffFailedError(f"prompt {request_id}: {reason}")

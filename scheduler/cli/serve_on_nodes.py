"""`radixkv serve --disaggregate`: in front of prefill and decode nodes in other processes."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

from ..errors import NodesMissingError
from ..models import load_config
from ..nodes.channel import ZmqChannel, load_secret
from ..nodes.processes import NodeProcesses
from ..nodes.remote_nodes import RemoteNodes
from ..nodes.supervisor import NodeSupervisor
from ..serving.nodes_front import serve_nodes
from ..text import TextTokenizer, locate_model
from .generate_on_nodes import SILENCE_S, TIMEOUT_S, open_gateway, start_nodes, wait_for
from .shared.backend import Backend
from .shared.prompts import Sizes

_MAX_RUNNING = 64
_TOKEN_BUDGET = 512


@dataclass(frozen=True)
class _Started:
    """The gateway's channel, and what has started the nodes that connect to it.

    Attributes:
        start: starts them.
        check: raises an error if one cannot start.
        supervise: looks after them, on the thread of the server; None leaves it to their owner.
        describe_missing: says why nodes are missing, as the end of an error.
    """

    channel: ZmqChannel
    start: Callable[[Sizes], object] = lambda _: None
    check: Callable[[], None] = lambda: None
    supervise: Callable[[RemoteNodes], object] | None = None
    describe_missing: Callable[[], str] = lambda: ""


@contextmanager
def connect(arguments: argparse.Namespace, say: Callable[[str], object]) -> Iterator[Backend]:
    """Wait for the nodes.

    Nodes that are started here are started again if they end, and end on leaving.

    Raises:
        ModelNotFoundError, CheckpointError: for the model, of which only the tokenizer is loaded.
        NodeProcessError, NodesMissingError, BadInputError: if the nodes do not come.
    """
    directory = locate_model(arguments.model, arguments.revision)
    config = load_config(directory)
    has_tokenizer = (directory / "tokenizer.json").exists()
    tokenizer = TextTokenizer(directory) if has_tokenizer else None
    max_model_len = arguments.max_model_len or config.max_positions
    with ExitStack() as stack:
        if arguments.gateway is not None:
            started = _Started(open_gateway(arguments.gateway, load_secret(arguments.secret_file)))
        elif arguments.ray is not None:
            started = _on_ray(arguments, stack, say)
        else:
            arguments.model_dir = directory
            started = _in_processes(arguments, stack, say)
        channel, supervise = started.channel, started.supervise
        try:
            if arguments.gateway is None:
                max_model_len = min(max_model_len, arguments.device_blocks * arguments.block_size)
                sizes = Sizes(
                    num_blocks=arguments.device_blocks,
                    token_budget=arguments.token_budget or _TOKEN_BUDGET,
                    max_running=arguments.max_running or _MAX_RUNNING,
                    max_model_len=max_model_len,
                )
                started.start(sizes)
            nodes = RemoteNodes(
                channel,
                model=config.name,
                silence_s=SILENCE_S if arguments.silence_s is None else arguments.silence_s,
                stream=True,
            )
            timeout_s = TIMEOUT_S if arguments.timeout_s is None else arguments.timeout_s
            try:
                wait_for(nodes, arguments, timeout_s, started.check)
            except NodesMissingError as error:
                raise NodesMissingError(f"{error}{started.describe_missing()}") from None
            longest = (node.status.max_model_len for node in nodes.nodes.values())
            max_model_len = min(max_model_len, *longest)
        except BaseException:
            channel.close()
            raise
        yield Backend(
            lambda: serve_nodes(
                nodes,
                channel.close,
                tokenizer,
                eos_token_ids=config.eos_token_ids,
                supervise=None if supervise is None else partial(supervise, nodes),
            ),
            max_model_len,
            nodes,
        )


def _in_processes(
    arguments: argparse.Namespace, stack: ExitStack, say: Callable[[str], object]
) -> _Started:
    """Return nodes that are processes of this machine."""
    processes = stack.enter_context(NodeProcesses())
    channel = open_gateway("127.0.0.1:0", processes.secret)
    supervisor = NodeSupervisor(processes, say)
    return _Started(
        channel,
        lambda sizes: start_nodes(arguments, sizes, processes, channel),
        processes.check,
        lambda _: supervisor.tick(),
    )


def _on_ray(
    arguments: argparse.Namespace, stack: ExitStack, say: Callable[[str], object]
) -> _Started:
    """Return nodes that are actors of Ray."""
    from .fleet.fleet import Fleet  # here, because it needs the extra

    fleet = stack.enter_context(Fleet(arguments, say))
    channel = open_gateway(fleet.listen, fleet.secret)
    return _Started(
        channel,
        lambda sizes: fleet.start(channel.address, sizes),
        fleet.check,
        fleet.tick,
        fleet.describe_missing,
    )

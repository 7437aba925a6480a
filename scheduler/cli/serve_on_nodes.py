"""`radixkv serve --disaggregate`: in front of prefill and decode nodes in other processes."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from ..models import load_config
from ..nodes.channel import load_secret
from ..nodes.processes import NodeProcesses
from ..nodes.remote_nodes import RemoteNodes
from ..nodes.supervisor import NodeSupervisor
from ..serving.nodes_front import serve_nodes
from ..text import TextTokenizer, locate_model
from .backend import Backend
from .generate_on_nodes import SILENCE_S, TIMEOUT_S, open_gateway, start_nodes, wait_for
from .prompts import Sizes

_MAX_RUNNING = 64
_TOKEN_BUDGET = 512


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
            channel = open_gateway(arguments.gateway, load_secret(arguments.secret_file))
            checks: list[Callable[[], None]] = []
            supervise: Callable[[], None] | None = None
        else:
            max_model_len = min(max_model_len, arguments.device_blocks * arguments.block_size)
            processes = stack.enter_context(NodeProcesses())
            channel = open_gateway("127.0.0.1:0", processes.secret)
            checks = [processes.check]
            supervise = NodeSupervisor(processes, say).tick
        try:
            if arguments.gateway is None:
                arguments.model_dir = directory
                sizes = Sizes(
                    num_blocks=arguments.device_blocks,
                    token_budget=arguments.token_budget or _TOKEN_BUDGET,
                    max_running=arguments.max_running or _MAX_RUNNING,
                    max_model_len=max_model_len,
                )
                start_nodes(arguments, sizes, processes, channel)
            nodes = RemoteNodes(
                channel,
                block_size=arguments.block_size,
                model=config.name,
                silence_s=SILENCE_S,
                stream=True,
            )
            timeout_s = TIMEOUT_S if arguments.timeout_s is None else arguments.timeout_s
            wait_for(nodes, arguments, timeout_s, *checks)
        except BaseException:
            channel.close()
            raise
        yield Backend(
            lambda: serve_nodes(
                nodes,
                channel.close,
                tokenizer,
                eos_token_ids=config.eos_token_ids,
                supervise=supervise,
            ),
            max_model_len,
            nodes,
        )

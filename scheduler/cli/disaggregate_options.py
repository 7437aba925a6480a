"""The options of `radixkv generate --disaggregate`, and what they go with."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from .errors import BadInputError
from .options import add_size, seconds


def add_apart(parser: argparse.ArgumentParser) -> None:
    """Add the options of prefill and decode nodes."""
    parser.add_argument(
        "--disaggregate",
        action="store_true",
        help="prefill and decode on nodes of their own, processes of this machine",
    )
    parser.add_argument(
        "--transport",
        choices=("inprocess", "jax", "nixl"),
        help="how KV gets from one to the other; inprocess: both are in this process (default: "
        "jax)",
    )
    add_size(parser, "--prefill", "prefill nodes (default: 1)", required=False)
    add_size(parser, "--decode", "decode nodes (default: 1)", required=False)
    parser.add_argument(
        "--gateway",
        metavar="ADDRESS:PORT",
        help="start no node, but listen here for those that are started by hand (see `radixkv "
        "prefill-node --help`)",
    )
    parser.add_argument(
        "--secret-file",
        metavar="FILE",
        help="a secret shared with those nodes; without it, the environment's RADIXKV_SECRET",
    )
    parser.add_argument(
        "--timeout-s",
        type=seconds,
        metavar="S",
        help="how long to wait for nodes: for those that are wanted to come, and for one to come "
        "back when none is left of its kind (default: 120)",
    )


@dataclass(frozen=True, slots=True)
class Sizes:
    """What the prompts need of each node."""

    num_blocks: int
    token_budget: int
    max_running: int
    max_model_len: int


def check_apart(arguments: argparse.Namespace) -> None:
    """Refuse options that do not go together.

    Raises:
        BadInputError: which needs, or excludes, which.
    """
    if not arguments.disaggregate:
        for option in ("transport", "prefill", "decode", "gateway", "secret_file", "timeout_s"):
            if getattr(arguments, option) is not None:
                raise BadInputError(f"--{option.replace('_', '-')} needs --disaggregate")
        return
    if arguments.no_prefix_cache:
        raise BadInputError("--no-prefix-cache does not go with --disaggregate")
    if arguments.gateway is not None:
        for option in ("transport", "device_blocks", "host_blocks", "storage"):
            if getattr(arguments, option) is not None:
                name = option.replace("_", "-")
                raise BadInputError(f"--gateway takes nodes as they are: give them --{name}")
    if arguments.transport == "inprocess" and arguments.timeout_s is not None:
        raise BadInputError("--timeout-s is for nodes that are processes of their own")
    if arguments.gateway is None and arguments.secret_file is not None:
        raise BadInputError("--secret-file needs --gateway")

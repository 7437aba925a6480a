"""The options of `radixkv prefill-node` and `decode-node`: `--help` loads nothing else."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from .options import (
    add_host_tier,
    add_size,
    add_storage,
    seconds,
    tokens_to_reserve,
)


def add_parsers(commands: Any, run: Callable[[argparse.Namespace], int]) -> None:
    """Add both commands to those that there are."""
    prefill = commands.add_parser(
        "prefill-node",
        help="serve as a prefill node: compute prompts",
        description="Compute the prompts that a gateway (`radixkv generate --gateway`) sends, and "
        "hand each over to a decode node. Says on stderr when it serves; ends with SIGTERM or "
        "ctrl-C, and prints what it has done as JSON.",
    )
    _add_options(prefill, "prefill-0")
    prefill.add_argument(
        "--allocate",
        choices=("early", "prefill_complete"),
        default="early",
        help="when a decode node is asked for blocks: before the prompt is computed, or when it is "
        "(default: %(default)s)",
    )
    prefill.set_defaults(run=run, role="prefill")

    decode = commands.add_parser(
        "decode-node",
        help="serve as a decode node: generate from computed prompts",
        description="Take computed prompts over from prefill nodes, and generate from them. Says "
        "on stderr when it serves; ends with SIGTERM or ctrl-C, and prints what it has done as "
        "JSON.",
    )
    _add_options(decode, "decode-0")
    decode.add_argument(
        "--preempt",
        choices=("recompute", "host", "storage"),
        default="recompute",
        help="what becomes of the KV of a request that has to give up its blocks: it is computed "
        "again, or parked on the host, or in storage (default: %(default)s)",
    )
    decode.add_argument(
        "--reserve-tokens",
        type=tokens_to_reserve,
        metavar="N",
        default=512,
        help="keep blocks for so many more tokens of every request before another is taken over; "
        "no_evict: for all of them, so that none is preempted (default: %(default)s)",
    )
    decode.set_defaults(run=run, role="decode")


def _add_options(parser: argparse.ArgumentParser, name: str) -> None:
    parser.add_argument("model_dir", metavar="MODEL_DIR", help="a checkpoint's directory")
    parser.add_argument(
        "--gateway",
        required=True,
        metavar="ADDRESS:PORT",
        help="where the gateway listens; it may start later",
    )
    parser.add_argument(
        "--name",
        default=name,
        help="of this node; each node of a deployment needs another (default: %(default)s)",
    )
    parser.add_argument(
        "--listen",
        metavar="ADDRESS:PORT",
        default="127.0.0.1:0",
        help="where others reach this node; an address other than loopback needs a secret "
        "(default: %(default)s, any port)",
    )
    parser.add_argument(
        "--secret-file",
        metavar="FILE",
        help="file with the secret of all nodes and the gateway, readable only by its owner; "
        "without it, the environment's RADIXKV_SECRET",
    )
    parser.add_argument(
        "--transport",
        choices=("jax", "nixl"),
        default="jax",
        help="how KV gets from prefill to decode nodes, the same for all (default: %(default)s)",
    )
    parser.add_argument(
        "--silence-s",
        type=seconds,
        metavar="S",
        default=5.0,
        help="a peer not heard of for so long has gone; what has no answer is said again after a "
        "fifth of it, and a transfer may take six times as long; the same for all (default: "
        "%(default)s)",
    )
    add_size(
        parser,
        "--parent-pid",
        "end, too, when the process that started this one is not that any more",
        required=False,
    )
    add_size(parser, "--block-size", "tokens per block (default: %(default)s)", default=16)
    add_size(parser, "--device-blocks", "blocks of KV cache")
    add_size(parser, "--token-budget", "tokens per step (default: %(default)s)", default=512)
    add_size(parser, "--max-running", "requests at a time (default: %(default)s)", default=64)
    add_size(
        parser,
        "--max-model-len",
        "longest prompt and output together (default: the model's positions, or all blocks)",
        required=False,
    )
    add_host_tier(parser, "blocks of --block-size tokens")
    add_storage(parser)

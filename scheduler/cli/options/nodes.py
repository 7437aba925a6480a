"""Options of `radixkv prefill-node` and `radixkv decode-node`."""

from __future__ import annotations

import argparse

from .common import (
    BLOCK_SIZE,
    Commands,
    Options,
    add_compilation_cache,
    add_count,
    add_depth,
    add_dtype,
    add_host_tier,
    add_kv_events,
    add_layer_groups,
    add_model,
    add_preempt,
    add_reserve_tokens,
    add_storage,
    add_tp,
    seconds,
)

_LIFE = (
    "Prints its address to stderr when it is ready. Stops on SIGTERM or ctrl-C, and then prints "
    "its statistics as JSON."
)


def add_parser(commands: Commands) -> None:
    """Add both commands."""
    prefill = commands.add_parser(
        "prefill-node",
        help="serve as a prefill node: compute prompts",
        description="Compute the prompts that a gateway (`radixkv generate --gateway`) assigns, "
        f"and hand each over to a decode node. {_LIFE}",
    )
    _add_options(prefill, "prefill-0")
    prefill.add_argument(
        "--allocate",
        choices=("early", "prefill_complete"),
        default="early",
        help="when to ask the decode node for blocks: before the prompt is computed, or after it "
        "(default: %(default)s)",
    )
    prefill.set_defaults(module="nodes", role="prefill")

    decode = commands.add_parser(
        "decode-node",
        help="serve as a decode node: generate from computed prompts",
        description=f"Take over computed prompts from prefill nodes and generate. {_LIFE}",
    )
    tiers = _add_options(decode, "decode-0")
    add_preempt(tiers)
    add_reserve_tokens(tiers)
    add_depth(decode, 2, "default: %(default)s")
    decode.set_defaults(module="nodes", role="decode")


def _add_options(parser: argparse.ArgumentParser, name: str) -> Options:
    """Add the options that both commands have; return the group of tiers."""
    add_model(parser)
    parser.add_argument(
        "--name",
        default=name,
        help="name of this node, unique in the deployment (default: %(default)s)",
    )
    add_dtype(parser)
    add_tp(parser)
    add_compilation_cache(parser)
    add_count(parser, "--block-size", "tokens per block (default: %(default)s)", default=BLOCK_SIZE)
    add_count(parser, "--device-blocks", "size of the KV cache in blocks")
    add_count(
        parser,
        "--token-budget",
        "maximum number of tokens per step (default: %(default)s)",
        default=512,
    )
    add_count(
        parser,
        "--max-running",
        "maximum number of running requests (default: %(default)s)",
        default=64,
    )
    add_count(
        parser,
        "--max-model-len",
        "maximum length of prompt and output together (default: the positions of the model, or "
        "the size of the cache if smaller)",
        required=False,
    )
    add_layer_groups(parser, 1, "default: %(default)s; the same on all nodes")
    add_count(
        parser, "--parent-pid", "stop when this process is no longer the parent", required=False
    )

    add_kv_events(parser)
    network = parser.add_argument_group("network")
    network.add_argument(
        "--gateway",
        required=True,
        metavar="ADDRESS:PORT",
        help="address of the gateway, which may start later",
    )
    network.add_argument(
        "--listen",
        metavar="ADDRESS:PORT",
        default="127.0.0.1:0",
        help="address at which other processes reach this node; any but a loopback address needs "
        "a secret (default: %(default)s, any free port)",
    )
    network.add_argument(
        "--secret-file",
        metavar="FILE",
        help="file with the secret that all nodes and the gateway share, readable only by its "
        "owner (default: the environment variable RADIXKV_SECRET)",
    )
    network.add_argument(
        "--transport",
        choices=("jax", "nixl", "storage"),
        default="jax",
        help="how KV is sent from prefill to decode nodes; the same on all nodes. storage: through "
        "the server of --storage, which needs --host-blocks (default: %(default)s)",
    )
    network.add_argument(
        "--silence-s",
        type=seconds,
        metavar="S",
        default=5.0,
        help="consider a peer lost after S seconds without a message. Unanswered messages are "
        "sent again after S/5, and a transfer may take 6*S; the same on all nodes (default: "
        "%(default)s)",
    )

    tiers = parser.add_argument_group("tiers and preemption")
    add_host_tier(tiers, "blocks of --block-size tokens")
    add_storage(tiers)
    return tiers

"""Options of `radixkv serve`."""

from __future__ import annotations

import argparse
from urllib.parse import urlsplit

from ..errors import BadInputError
from .common import (
    BLOCK_SIZE,
    Commands,
    add_compilation_cache,
    add_count,
    add_depth,
    add_dtype,
    add_host_tier,
    add_kv_events,
    add_model,
    add_preempt,
    add_processes,
    add_reserve_tokens,
    add_storage,
    add_tp,
    check_excludes,
    check_processes,
    check_tiers,
    integer,
    seconds,
)
from .fleet import add_ray, expand_ray
from .generate import add_nodes, check_nodes


def add_parser(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "serve",
        help="serve a model over HTTP, with the interface of OpenAI's",
        description="Serve a model over HTTP with the interface of OpenAI's, until stopped "
        "(SIGTERM or ctrl-C): /v1/completions, /v1/chat/completions, /v1/models, /tokenize, "
        "/detokenize, /health and /metrics. Clients must send the API key that is in the "
        "environment variable RADIXKV_API_KEY, if it is set.",
    )
    add_model(parser)
    parser.add_argument(
        "--served-model-name", metavar="NAME", help="name for clients (default: MODEL)"
    )
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        metavar="ADDRESS",
        help="address to listen on; others than 127.0.0.1 and ::1 are reached from the network "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--port",
        type=integer(0, 65535),
        default=8000,
        metavar="N",
        help="port to listen on; 0 takes a free one (default: %(default)s)",
    )
    parser.add_argument(
        "--otlp-traces-endpoint",
        type=_http_url,
        metavar="URL",
        help="send spans of requests to an OpenTelemetry collector, such as "
        "http://127.0.0.1:4318/v1/traces (default: no spans)",
    )
    add_dtype(parser)
    add_tp(parser)
    add_compilation_cache(parser)
    add_kv_events(parser)
    _add_sizes(parser.add_argument_group("sizes of the engine"))
    tiers = parser.add_argument_group("tiers and preemption")
    add_host_tier(tiers, "blocks of --block-size tokens")
    add_storage(tiers)
    add_preempt(tiers, None)
    add_reserve_tokens(tiers, None)
    _add_limits(parser.add_argument_group("limits of clients"))
    nodes = parser.add_argument_group("prefill and decode nodes")
    add_nodes(nodes, in_process=False)
    add_ray(nodes)
    add_processes(parser)
    parser.set_defaults(module="serve")


def check(arguments: argparse.Namespace) -> None:
    """Reject options that exclude or need each other, and expand --ray.

    Raises:
        BadInputError: With both names.
    """
    check_processes(arguments)
    check_tiers(arguments)
    expand_ray(arguments)
    check_nodes(arguments)
    for option in ("--memory-fraction", "--otlp-traces-endpoint", "--kv-events"):
        check_excludes(arguments, "--disaggregate", option)
    if arguments.disaggregate and arguments.gateway is None and arguments.device_blocks is None:
        raise BadInputError("--disaggregate needs --device-blocks, or --gateway")


def _add_sizes(group: argparse._ArgumentGroup) -> None:
    add_count(group, "--block-size", f"tokens per block (default: {BLOCK_SIZE})", required=False)
    add_count(
        group,
        "--device-blocks",
        "size of the KV cache in blocks (default: as many as --memory-fraction allows)",
        required=False,
    )
    group.add_argument(
        "--memory-fraction",
        type=_fraction,
        metavar="F",
        help="part of the device's memory that weights and blocks may take together (default: 0.9, "
        "or 0.3 on a CPU)",
    )
    add_count(
        group,
        "--max-model-len",
        "limit of prompt and output together, in tokens (default: that of the model, or what fits "
        "into all blocks)",
        required=False,
    )
    add_count(
        group,
        "--max-running",
        "most requests in a step (default: 128, or 16 on a CPU; nodes: 64)",
        required=False,
    )
    add_count(
        group,
        "--token-budget",
        "maximum number of tokens per step (default: 1,024, or 256 on a CPU; nodes: 512)",
        required=False,
    )
    add_depth(group, None, "default: 2; prefill nodes have 1")


def _add_limits(group: argparse._ArgumentGroup) -> None:
    add_count(
        group,
        "--max-requests",
        "most choices, n for each prompt, that are served or wait at a time; more get status 429 "
        "(default: %(default)s)",
        default=256,
    )
    add_count(
        group,
        "--max-connections",
        "most connections at a time; a new one takes the place of the one that waits longest for a "
        "request (default: 1,024, or fewer if the limit of file descriptors is lower)",
        required=False,
    )
    add_count(
        group,
        "--max-body-bytes",
        "size limit of the body of a request; larger ones get status 413 (default: %(default)s)",
        default=4 * 2**20,
    )
    group.add_argument(
        "--drain-timeout-s",
        type=seconds,
        default=30.0,
        metavar="S",
        help="how long requests may run on after SIGTERM or ctrl-C; a second ctrl-C ends them "
        "(default: %(default)s)",
    )


def _http_url(text: str) -> str:
    url = urlsplit(text)
    if url.scheme not in ("http", "https") or not url.hostname:
        raise argparse.ArgumentTypeError(f"expected an address with http or https, got {text!r}")
    return text


def _fraction(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"expected a number above 0, at most 1, got {text!r}")
    return value

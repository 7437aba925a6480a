"""The options of `radixkv replay` and `hits`, apart from their work: `--help` loads none of it."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from .options import (
    add_host_tier,
    add_json,
    add_requests,
    add_size,
    positive_int,
)


def add_replay(commands: Any, run: Callable[[argparse.Namespace], int]) -> None:
    """Add `radixkv replay` to the commands that there are."""
    parser = commands.add_parser(
        "replay",
        help="replay a request trace and check what the cache did",
        description="Replay a request trace (Mooncake JSONL: timestamp, input_length, "
        "output_length, hash_ids) and check the results. Exits with 1 if a check fails.",
    )
    parser.add_argument(
        "trace", nargs="?", metavar="TRACE", help="a .jsonl trace (default: the packaged slice)"
    )
    add_requests(parser)
    _add_skip_malformed(parser)
    parser.add_argument("--model", metavar="NAME", help="the model whose costs are simulated")
    parser.add_argument("--gpu", metavar="NAME", help="the GPU whose costs are simulated")
    parser.add_argument(
        "--costs", metavar="FILE.json", help="figures that replace those of model and GPU"
    )
    add_size(
        parser,
        "--device-blocks",
        "simulated KV blocks of 16 tokens (default: what fits beside the weights)",
        required=False,
    )
    add_host_tier(parser, "simulated blocks of 16 tokens")
    add_size(
        parser,
        "--storage-blocks",
        "storage for so many simulated blocks below the host tier; needs --host-blocks",
        required=False,
    )
    parser.add_argument(
        "--preempt",
        choices=("recompute", "host", "storage"),
        default="recompute",
        help="what becomes of the KV of a request that is preempted in the simulation: computed "
        "again, or parked on the host or in storage (default: %(default)s)",
    )
    _add_cluster(parser)
    parser.add_argument("--quiet", action="store_true", help="show no progress on stderr")
    add_json(parser)
    parser.set_defaults(run=run)


def _add_skip_malformed(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--skip-malformed", action="store_true", help="count and leave out lines that do not parse"
    )


def _add_cluster(parser: argparse.ArgumentParser) -> None:
    add_size(parser, "--prefill", "simulate N prefill nodes too, and --decode", required=False)
    add_size(parser, "--decode", "simulate N decode nodes too", required=False)
    parser.add_argument(
        "--reserve",
        type=_reserve,
        metavar="MODE",
        help="what a decode node keeps free for requests that it has: none; N: the next N tokens "
        "of each; no_evict: all of their tokens, so that none is preempted (default: none, 512 "
        "and no_evict, beside each other)",
    )
    parser.add_argument(
        "--allocate",
        choices=("early", "prefill_complete"),
        help="when a decode node grants blocks: before the prompt is computed, or when it is "
        "(default: early)",
    )


def _reserve(text: str) -> str:
    if text in ("none", "no_evict"):
        return text
    try:
        return str(positive_int(text))
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(
            f"expected none, a positive number of tokens, or no_evict, got {text!r}"
        ) from None


def add_hits(commands: Any, run: Callable[[argparse.Namespace], int]) -> None:
    """Add `radixkv hits` to the commands that there are."""
    parser = commands.add_parser(
        "hits",
        help="count the prefix hits a cache of a given size has on a trace",
        description="Count the prefix hits that a cache of N blocks (one block = one id of the "
        "trace, 512 tokens) has on a trace, one request after the other. With a host tier, those "
        "of both tiers; by default it is exclusive, whose counts follow from those of one tier: "
        "device hits are those of N blocks alone, and with the host's hits those of both sizes "
        "together.",
    )
    parser.add_argument("trace", metavar="TRACE", help="a .jsonl trace")
    add_size(parser, "--device-blocks", "size of the cache, in blocks of 512 tokens")
    add_host_tier(parser, "blocks of 512 tokens", write="exclusive")
    add_requests(parser)
    _add_skip_malformed(parser)
    add_json(parser)
    parser.set_defaults(run=run)

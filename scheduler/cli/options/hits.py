"""Options of `radixkv hits`."""

from __future__ import annotations

from .common import (
    Commands,
    add_count,
    add_host_tier,
    add_json,
    add_skip_malformed,
    add_trace_lines,
)


def add_parser(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "hits",
        help="count the prefix hits of a trace in a cache of a given size",
        description="Count the prefix hits of a trace in a cache of N blocks, one request after "
        "the other. One block is one hash id of the trace, or 512 tokens. With a host tier, count "
        "the hits of both tiers. The tier is exclusive by default: device hits are then those of "
        "a cache of the device's size, and all hits those of a cache of both sizes together.",
    )
    parser.add_argument("trace", metavar="TRACE", help="a .jsonl trace")
    add_count(parser, "--device-blocks", "size of the cache in blocks of 512 tokens")
    add_host_tier(parser, "blocks of 512 tokens", write="exclusive")
    add_trace_lines(parser)
    add_skip_malformed(parser)
    add_json(parser)
    parser.set_defaults(module="hits")

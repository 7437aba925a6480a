"""Options of `radixkv replay`."""

from __future__ import annotations

from typing import Final

from .common import (
    NO_EVICT,
    Commands,
    add_compilation_cache,
    add_count,
    add_host_tier,
    add_json,
    add_preempt,
    add_skip_malformed,
    add_trace_lines,
    integer,
)

# Those of the cost model, which --help does not load.
MODELS: Final = ("llama3-8b", "llama3-70b", "qwen3-8b", "qwen3-32b")
GPUS: Final = ("a100", "h100", "h200")
DEFAULT_GPU: Final = "h200x2"


def add_parser(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "replay",
        help="replay a request trace and check what the cache did",
        description="Replay a request trace (Mooncake JSONL: timestamp, input_length, "
        "output_length, hash_ids) and check the results. Exits with 1 if a check fails.",
    )
    parser.add_argument(
        "trace", nargs="?", metavar="TRACE", help="a .jsonl trace (default: the packaged slice)"
    )
    add_trace_lines(parser)
    add_skip_malformed(parser)
    parser.add_argument("--quiet", action="store_true", help="show no progress on stderr")
    add_compilation_cache(parser)
    add_json(parser)
    parser.add_argument(
        "--html", metavar="FILE", help="write the report with charts to FILE, as one HTML page"
    )

    simulation = parser.add_argument_group("simulation")
    simulation.add_argument(
        "--model",
        metavar="NAME",
        help=f"simulate the costs of this model: {' or '.join(MODELS)} (default: {MODELS[0]})",
    )
    simulation.add_argument(
        "--gpu",
        metavar="NAME",
        help=f"simulate the costs of this GPU: {' or '.join(GPUS)}, or several, as h100x4 "
        f"(default: {DEFAULT_GPU})",
    )
    simulation.add_argument(
        "--costs", metavar="FILE.json", help="costs that replace those of model and GPU"
    )
    add_count(
        simulation,
        "--device-blocks",
        "size of the simulated cache in blocks of 16 tokens (default: what fits beside the "
        "weights)",
        required=False,
    )
    add_host_tier(simulation, "simulated blocks of 16 tokens")
    add_count(
        simulation,
        "--storage-blocks",
        "size of the storage tier in simulated blocks; needs --host-blocks (default: none)",
        required=False,
    )
    add_preempt(simulation)

    nodes = parser.add_argument_group("simulation of prefill and decode nodes")
    add_count(nodes, "--prefill", "number of prefill nodes; needs --decode", required=False)
    add_count(nodes, "--decode", "number of decode nodes; needs --prefill", required=False)
    nodes.add_argument(
        "--reserve",
        type=integer(words=("none", NO_EVICT)),
        metavar="MODE",
        help="blocks that a decode node reserves for each of its requests: none; N, for its next "
        f"N tokens; {NO_EVICT}, for all of its tokens, so none is preempted (default: compare "
        f"none, 512 and {NO_EVICT})",
    )
    nodes.add_argument(
        "--allocate",
        choices=("early", "prefill_complete"),
        help="when a decode node grants blocks: before the prompt is computed, or after it "
        "(default: early)",
    )
    parser.set_defaults(module="replay")

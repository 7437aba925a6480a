"""`radixkv hits`: the prefix hits of a trace in a cache of a given size."""

from __future__ import annotations

import argparse
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ..replay.hits.counts import count_hits
from ..replay.hits.oracles import num_distinct_blocks
from ..replay.trace import Trace, read_trace
from .options import host_tier
from .output import check_destination, emit


def run(arguments: argparse.Namespace) -> int:
    """Count the hits and print them."""
    check_destination(arguments.json)
    host = host_tier(arguments)
    trace = read_trace(
        Path(arguments.trace), limit=arguments.requests, skip_malformed=arguments.skip_malformed
    )
    # A tier with room for all blocks there are counts as one of any larger size would.
    enough = num_distinct_blocks(trace)
    if host is not None:
        host = replace(host, num_blocks=min(host.num_blocks, enough))
    results = asdict(count_hits(trace, min(arguments.device_blocks, enough), host))
    if arguments.skip_malformed:
        results["skipped_lines"] = len(trace.skipped)
    emit(arguments.json, results, lambda: _describe(results) + _describe_lines(trace))
    return 0


def _describe_lines(trace: Trace) -> str:
    """Say what was odd about the lines of a trace."""
    late, skipped = trace.num_out_of_order, trace.skipped
    text = f"\n{late:,} are earlier than the line above: hits go by the lines" if late else ""
    if skipped:
        first = f"line {skipped[0].line} {skipped[0].reason}"
        text += f"\n{len(skipped):,} malformed lines were skipped; the first: {first}"
    return text


def _describe(results: dict[str, Any]) -> str:
    text = (
        f"{results['requests']:,} requests, {results['blocks']:,} blocks of 512 tokens: "
        f"{results['hit_blocks']:,} hit ({results['hit_rate']:.2%}), "
        f"{results['evicted_blocks']:,} evicted"
    )
    if "host_hit_blocks" not in results:
        return text
    return (
        f"{text}\n"
        f"host: {results['host_hit_blocks']:,} hit "
        f"({results['host_hit_blocks'] / max(results['blocks'], 1):.2%}), "
        f"{results['demoted_blocks']:,} demoted, {results['dropped_blocks']:,} dropped"
    )

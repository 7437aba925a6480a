"""`radixkv hits`: count the prefix hits of a trace in a cache of a given size."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ..replay.hits.counts import count_hits
from ..replay.hits.oracles import num_distinct_blocks
from ..replay.trace import Trace, read_trace
from .options.common import check_tiers, host_tier
from .shared.output import check_destination, emit


def run(arguments: argparse.Namespace) -> int:
    """Count the hits and print them."""
    check_destination(arguments.json)
    check_tiers(arguments)
    host = host_tier(arguments)
    trace = read_trace(
        Path(arguments.trace), limit=arguments.requests, skip_malformed=arguments.skip_malformed
    )
    # A tier that can hold all blocks of the trace counts the same as any larger one.
    enough = num_distinct_blocks(trace)
    if host is not None:
        host = replace(host, num_blocks=min(host.num_blocks, enough))
    results = asdict(count_hits(trace, min(arguments.device_blocks, enough), host))
    if arguments.skip_malformed:
        results["skipped_lines"] = len(trace.skipped)
    emit(arguments.json, results, *_lines(results, trace))
    return 0


def _lines(results: dict[str, Any], trace: Trace) -> Iterator[str]:
    yield (
        f"{results['requests']:,} requests, {results['blocks']:,} blocks of 512 tokens: "
        f"{results['hit_blocks']:,} hit ({results['hit_rate']:.2%}), "
        f"{results['evicted_blocks']:,} evicted"
    )
    if results["refused"]:
        yield (f"{results['refused']:,} requests have more blocks than the device and were refused")
    if "host_hit_blocks" in results:
        yield (
            f"host: {results['host_hit_blocks']:,} hit "
            f"({results['host_hit_blocks'] / max(results['blocks'], 1):.2%}), "
            f"{results['demoted_blocks']:,} demoted, {results['dropped_blocks']:,} dropped"
        )
    if trace.num_out_of_order:
        yield (
            f"{trace.num_out_of_order:,} requests have an earlier timestamp than the line above; "
            "hits are counted in the order of the lines"
        )
    if trace.skipped:
        yield (
            f"{len(trace.skipped):,} malformed lines were skipped; the first: "
            f"line {trace.skipped[0].line} {trace.skipped[0].reason}"
        )

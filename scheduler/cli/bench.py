"""`radixkv bench`: the cost of the cache manager."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ..bench.cache import PHASES, bench_cache
from ..bench.decode import bench_decode
from ..bench.evict import bench_evict
from ..replay.trace import read_trace
from .errors import BadInputError
from .options import check_sizes
from .output import (
    check_destination,
    emit,
    format_table,
)


def run(arguments: argparse.Namespace) -> int:
    """Run the benchmark that `arguments.benchmark` names, and print what it measured."""
    check_destination(arguments.json)
    check_sizes(arguments)
    measure, describe = {
        "cache": (_cache, _describe_cache),
        "evict": (_evict, _describe_evict),
        "decode": (_decode, _describe_decode),
    }[arguments.benchmark]
    results = measure(arguments)
    emit(arguments.json, results, lambda: describe(results))
    return 0


def _cache(arguments: argparse.Namespace) -> dict[str, Any]:
    num_blocks = arguments.device_tokens // arguments.block_size
    if num_blocks == 0:
        raise BadInputError(
            f"--device-tokens {arguments.device_tokens} is less than one block of "
            f"{arguments.block_size}"
        )
    trace = read_trace(Path(arguments.trace), limit=arguments.requests)
    result = bench_cache(trace.requests, block_size=arguments.block_size, num_blocks=num_blocks)
    return {"trace": trace.name} | result.to_json()


def _describe_cache(results: dict[str, Any]) -> str:
    rows = [("CPU time", "us/request median", "mean", "ns/block")]
    costs = {"whole request": results} | {name: results["phases"][name] for name in PHASES}
    for name, cost in costs.items():
        us = cost["us_per_request"]
        rows.append(
            (name, f"{us['median']:.2f}", f"{us['mean']:.2f}", f"{cost['ns_per_block']:.1f}")
        )
    return "\n".join(
        [
            f"{results['trace']}: {results['requests']:,} requests, "
            f"{results['prompt_tokens']:,} + {results['output_tokens']:,} tokens; "
            f"cache of {results['device_blocks']:,} blocks of {results['block_size']}",
            f"hit {results['hit_tokens']:,} tokens ({results['hit_rate']:.2%}), "
            f"evicted {results['evicted_blocks']:,} blocks",
            "",
            format_table(rows),
            f"(first pass, with the page faults of a growing process: "
            f"{results['first_pass_us_per_request']['mean']:.2f} us/request mean)",
        ]
    )


def _evict(arguments: argparse.Namespace) -> dict[str, Any]:
    return bench_evict(
        num_blocks=arguments.device_blocks,
        evict=arguments.evict,
        chain=arguments.chain,
        block_size=arguments.block_size,
        calls=arguments.calls,
    ).to_json()


def _describe_evict(results: dict[str, Any]) -> str:
    return (
        f"evict {results['evict']:,} of {results['device_blocks']:,} blocks in leaves of "
        f"{results['chain']}: {results['ms_per_call']:.4f} ms per call, "
        f"{results['us_per_block']:.4f} us per block (median of {results['calls']})"
    )


def _decode(arguments: argparse.Namespace) -> dict[str, Any]:
    return bench_decode(
        batch=arguments.batch,
        steps=arguments.steps,
        prompt_tokens=arguments.prompt_tokens,
        block_size=arguments.block_size,
    ).to_json()


def _describe_decode(results: dict[str, Any]) -> str:
    request, step = results["us_per_request"], results["us_per_step"]
    return (
        f"{results['batch']} requests, {results['steps']} steps: "
        f"{request['mean']:.4f} us per request and step "
        f"(median {request['median']:.4f}); a step takes {step['mean']:.2f} us "
        f"(median {step['p50']:.2f}, p99 {step['p99']:.2f})"
    )

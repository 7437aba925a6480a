"""`radixkv bench`: measure the CPU time of the cache manager, or of the start of an engine."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..bench.cache import PHASES, bench_cache
from ..bench.decode import bench_decode
from ..bench.evict import bench_evict
from ..bench.start import bench_start
from ..replay.trace import read_trace
from ..terminal.console import table
from ..terminal.interrupts import exit_on_interrupt
from .errors import BadInputError
from .options.common import check_memory
from .shared.output import check_destination, emit


def run(arguments: argparse.Namespace) -> int:
    """Run the benchmark that `arguments.benchmark` names, and print its results."""
    check_destination(arguments.json)
    check_memory(arguments)
    benches = {"cache": _cache, "evict": _evict, "decode": _decode, "start": _start, "step": _step}
    benches[arguments.benchmark](arguments)
    return 0


def _cache(arguments: argparse.Namespace) -> None:
    num_blocks = arguments.device_tokens // arguments.block_size
    if num_blocks == 0:
        raise BadInputError(
            f"--device-tokens must be at least one block of {arguments.block_size} tokens, "
            f"got {arguments.device_tokens}"
        )
    trace = read_trace(Path(arguments.trace), limit=arguments.requests)
    figures = bench_cache(
        trace.requests,
        block_size=arguments.block_size,
        num_blocks=num_blocks,
        tokens=arguments.tokens,
    )
    results = {"trace": trace.name, **figures}
    rows = []
    for name in ("whole request", *PHASES):
        cost = results if name == "whole request" else results["phases"][name]
        us = cost["us_per_request"]
        rows.append(
            (
                name,
                *(f"{us[word]:.2f}" for word in ("median", "mean", "p99_9", "max")),
                f"{cost['ns_per_block']:.1f}",
            )
        )
    emit(
        arguments.json,
        results,
        f"{results['trace']}: {results['requests']:,} requests, "
        f"{results['prompt_tokens']:,} + {results['output_tokens']:,} tokens; "
        f"cache of {results['device_blocks']:,} blocks of {results['block_size']}; "
        f"token ids as {results['tokens']}",
        f"hit {results['hit_tokens']:,} tokens ({results['hit_rate']:.2%}), "
        f"evicted {results['evicted_blocks']:,} blocks",
        "",
        table(("CPU time", "us/request median", "mean", "p99.9", "max", "ns/block"), rows),
        "(first pass, with the page faults of a growing process: "
        f"{results['first_pass_us_per_request']['mean']:.2f} us/request mean)",
    )


def _evict(arguments: argparse.Namespace) -> None:
    results = bench_evict(
        num_blocks=arguments.device_blocks,
        evict=arguments.evict,
        chain=arguments.chain,
        block_size=arguments.block_size,
        calls=arguments.calls,
    )
    emit(
        arguments.json,
        results,
        f"evict {results['evict']:,} of {results['device_blocks']:,} blocks in leaves of "
        f"{results['chain']}: {results['ms_per_call']:.4f} ms per call, "
        f"{results['us_per_block']:.4f} us per block (median of {results['calls']})",
    )


def _decode(arguments: argparse.Namespace) -> None:
    results = bench_decode(
        batch=arguments.batch,
        steps=arguments.steps,
        prompt_tokens=arguments.prompt_tokens,
        block_size=arguments.block_size,
    )
    request, step = results["us_per_request"], results["us_per_step"]
    emit(
        arguments.json,
        results,
        f"{results['batch']} requests, {results['steps']} steps: "
        f"{request['mean']:.4f} us per request and step "
        f"(median {request['median']:.4f}); a step takes {step['mean']:.2f} us "
        f"(median {step['p50']:.2f}, p99 {step['p99']:.2f})",
    )


def _start(arguments: argparse.Namespace) -> None:
    results = bench_start(arguments.layers)
    emit(
        arguments.json,
        results,
        f"{results['layers']} layers, {results['programs']} programs: "
        f"{results['cold_cpu_s']:.1f} s of CPU to compile and start, "
        f"{results['warm_cpu_s']:.1f} s with compiled programs",
    )


def _step(arguments: argparse.Namespace) -> None:
    from ..bench.step import bench_step  # imports JAX

    with exit_on_interrupt():
        results = bench_step(
            rows=arguments.rows,
            max_model_len=arguments.max_model_len,
            prompt_tokens=arguments.prompt_tokens,
            depth=arguments.depth,
            device_ms=arguments.device_ms,
            waiting=arguments.waiting,
        )
    total, *phases = results["host_us_per_step"].items()
    emit(
        arguments.json,
        results,
        f"{results['rows']} rows, {results['depth']} steps in flight: the host takes "
        f"{total[1]:.1f} us of CPU time per step and sends {results['bytes_per_step']:,} bytes",
        ", ".join(f"{name} {us:.1f} us" for name, us in phases),
        f"a device that takes {results['device_ms']} ms per step is idle for "
        f"{results['idle_share']:.2%} of the time",
    )

"""Compare the CPU cost of the cache manager with its peers and print Markdown tables.

Run:
    python benchmarks/peers.py WORKLOAD [--requests N] [--pool-tokens M ...] [--rounds R]

The workload is a trace, or made here: short chats, or a tree of agents (see `peer_workloads.py`).
Every manager handles the same requests one after the other: match the prompt, pin the hit,
allocate the rest, publish the prompt, extend by the output, publish, release. Each run is a new
process, and the managers take turns in every round. The figure is the CPU time of the calling
thread in a second pass on a new manager. Converting the tokens to the form that the manager takes
is not timed, unless `--tokens list` gives all of them lists. A ratio is the median of the rounds'
ratios.

A peer takes part if it can be imported: install it, or put its folder on PYTHONPATH. The output
lists the peers that are missing, with the reason and the way to get them.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shlex
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from machine import describe_machine, installed
from peer_adapters import VLLM, Adapter, MiniSGLang, RadixKV, SGLangRadix, SGLangUnified
from peer_workloads import WORKLOADS, requests_of

from radixkv.scheduler.bench.timing import clock_cost_ns, now_ns, quiet_heap

SGLANG = "`pip install sglang`, or unpack its wheel into a folder on PYTHONPATH"
MINI_SGLANG = "clone github.com/sgl-project/mini-sglang, put its folder `python` on PYTHONPATH"
VLLM_WHEEL = (
    "`pip install torch numpy msgspec packaging psutil pyzmq regex urllib3 uvloop`, and unpack "
    "vLLM's wheel into a folder on PYTHONPATH"
)
MANAGERS: dict[str, tuple[type[Adapter], str, str]] = {
    "radixkv": (RadixKV, "radixkv", ""),
    "vLLM KVCacheManager": (VLLM, "vllm", VLLM_WHEEL),
    "mini-sglang CacheManager": (MiniSGLang, "minisgl", MINI_SGLANG),
    "SGLang RadixCache": (SGLangRadix, "sglang", SGLANG),
    "SGLang UnifiedRadixCache (Rust)": (SGLangUnified, "sglang", SGLANG),
}
"""Name in the table -> adapter, distribution, and how to get the distribution."""


@dataclass(frozen=True)
class Run:
    """Figures of one run of a manager."""

    us_per_request: float
    hit_tokens: int


class MissingPeerError(Exception):
    """A peer that cannot be imported, with the reason."""


def main() -> None:
    """Run the managers in turns and print a table for each pool size."""
    arguments = parse_arguments()
    if arguments.run is not None:
        run_here(arguments)
        return
    missing: dict[str, str] = {}
    tables = [compare(arguments, pool_tokens, missing) for pool_tokens in arguments.pool_tokens]
    print("\n".join(describe_run(arguments, missing)))
    for pool_tokens, runs in zip(arguments.pool_tokens, tables, strict=True):
        print(f"\nPool of {pool_tokens:,} tokens:\n")
        print("\n".join(format_table(runs)))


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "workload", help=f"a Mooncake trace (.jsonl), or one of: {', '.join(WORKLOADS)}"
    )
    parser.add_argument(
        "--requests", type=positive,
        help="only the first N requests; default: the whole trace, or 2,000",
    )  # fmt: skip
    parser.add_argument(
        "--pool-tokens", type=positive, nargs="+",
        help="pool sizes in tokens, one table each; default: 3 and 30 million with a trace, "
        "150,000 without",
    )  # fmt: skip
    parser.add_argument("--block-size", type=positive, default=16, help="default: %(default)s")
    parser.add_argument(
        "--tokens", choices=("own", "list"), default="own",
        help="what the managers are given: each its own form, or lists that they convert; "
        "default: %(default)s",
    )  # fmt: skip
    parser.add_argument(
        "--managers", nargs="+", choices=MANAGERS, metavar="NAME", default=list(MANAGERS),
        help="only these, with radixkv; names as in the table",
    )  # fmt: skip
    parser.add_argument("--rounds", type=positive, default=3, help="default: %(default)s")
    parser.add_argument("--run", choices=MANAGERS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.workload not in WORKLOADS and not Path(arguments.workload).is_file():
        known = ", ".join(WORKLOADS)
        parser.error(f"{arguments.workload} is neither a trace nor one of: {known}")
    if arguments.pool_tokens is None:
        is_made = arguments.workload in WORKLOADS
        arguments.pool_tokens = [150_000] if is_made else [3_000_000, 30_000_000]
    if min(arguments.pool_tokens) < arguments.block_size:
        parser.error(f"a pool of {min(arguments.pool_tokens)} tokens has no block")
    return arguments


def positive(text: str) -> int:
    """Parse a positive integer."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a positive integer, got '{text}'")
    return int(text)


def compare(
    arguments: argparse.Namespace, pool_tokens: int, missing: dict[str, str]
) -> dict[str, list[Run]]:
    """Return the runs of every manager, one per round; add those that cannot run to `missing`."""
    runs: dict[str, list[Run]] = {
        name: []
        for name in MANAGERS
        if name in ("radixkv", *arguments.managers) and name not in missing
    }
    for round_number in range(1, arguments.rounds + 1):
        for name in list(runs):
            progress = f"pool of {pool_tokens}, round {round_number} of {arguments.rounds}: {name}"
            print(progress, file=sys.stderr)
            try:
                runs[name].append(run_alone(arguments, pool_tokens, name))
            except MissingPeerError as error:
                missing[name] = str(error)
                del runs[name]
    return runs


def run_alone(arguments: argparse.Namespace, pool_tokens: int, name: str) -> Run:
    """Run one manager in a new process.

    Raises:
        MissingPeerError: The manager is a peer that cannot be imported.
    """
    command = [sys.executable, __file__, arguments.workload, "--run", name]
    command += ["--pool-tokens", str(pool_tokens), *options_of(arguments)]
    finished = subprocess.run(command, check=True, stdout=subprocess.PIPE)
    # A peer may print while it is imported; the result is the last line.
    result = json.loads(finished.stdout.splitlines()[-1])
    if "missing" in result:
        raise MissingPeerError(result["missing"])
    return Run(**result)


def run_here(arguments: argparse.Namespace) -> None:
    """Measure one manager in this process and print the figures as one line of JSON."""
    adapter = MANAGERS[arguments.run][0]
    try:
        replay(adapter, arguments)
    except ImportError as error:
        if adapter is RadixKV:
            raise
        print(json.dumps({"missing": str(error)}))
        return
    print(json.dumps(asdict(replay(adapter, arguments))))


def replay(adapter: type[Adapter], arguments: argparse.Namespace) -> Run:
    """Pass the requests through a new manager and time each of them."""
    block_size = arguments.block_size
    num_blocks = arguments.pool_tokens[0] // block_size
    lengths = [len(work.tokens) for work in requests_of(arguments.workload, arguments.requests)]
    manager = adapter(num_blocks, block_size, max(lengths))
    spent_ns = hit_tokens = 0
    with quiet_heap():
        for work in requests_of(arguments.workload, arguments.requests):
            if arguments.tokens == "list":
                lists = work.prompt.tolist(), work.tokens.tolist()
                start_ns = now_ns()
                prompt, tokens = manager.load(lists[0]), manager.load(lists[1])
            else:
                prompt, tokens = manager.load(work.prompt), manager.load(work.tokens)
                start_ns = now_ns()
            num_hit = manager.run(prompt, tokens)
            spent_ns += now_ns() - start_ns
            hit_tokens += num_hit
    available = manager.available_tokens()
    assert available == num_blocks * block_size, (
        f"{adapter.__name__} has {available} tokens available after the last release, "
        f"of {num_blocks * block_size}: the adapter uses it wrongly"
    )
    return Run((spent_ns / len(lengths) - clock_cost_ns()) / 1000, hit_tokens)


def format_table(runs: dict[str, list[Run]]) -> list[str]:
    """Return the lines of a Markdown table with one row per manager."""
    ours = [run.us_per_request for run in runs["radixkv"]]
    lines = [
        "| Manager | us/request: median [range] | Ratio to radixkv | Hit tokens |",
        "| --- | ---: | ---: | ---: |",
    ]
    for name, of_rounds in runs.items():
        times_us = [run.us_per_request for run in of_rounds]
        ratio = median(time / our for time, our in zip(times_us, ours, strict=True))
        hits = {run.hit_tokens for run in of_rounds}
        assert len(hits) == 1, f"{name} hit {sorted(hits)} tokens in different rounds"
        lines.append(
            f"| {name} | {median(times_us):.0f} [{min(times_us):.0f} to {max(times_us):.0f}] "
            f"| {ratio:.2f} | {hits.pop():,} |"
        )
    return lines


def describe_run(arguments: argparse.Namespace, missing: dict[str, str]) -> list[str]:
    """Return the command, the machine, the versions and the missing peers."""
    words = ["python", "benchmarks/peers.py", Path(arguments.workload).name]
    words += ["--pool-tokens", *map(str, arguments.pool_tokens), *options_of(arguments)]
    words += ["--rounds", str(arguments.rounds)]
    if len(arguments.managers) < len(MANAGERS):
        words += ["--managers", *arguments.managers]
    names = dict.fromkeys(
        MANAGERS[name][1]
        for name in MANAGERS
        if name in ("radixkv", *arguments.managers) and name not in missing
    )
    versions = [f"{name} {version_of(name)}" for name in [*names, "numpy", "torch"]]
    return [
        f"- Command: `{shlex.join(words)}`",
        f"- Measured: {describe_machine(*versions)}",
        *(
            f"- Missing: {name} ({reason}). To get it: {MANAGERS[name][2]}."
            for name, reason in missing.items()
        ),
    ]


def options_of(arguments: argparse.Namespace) -> list[str]:
    """Return the options that differ from their default and that every run needs."""
    options = [] if arguments.requests is None else ["--requests", str(arguments.requests)]
    if arguments.block_size != 16:
        options += ["--block-size", str(arguments.block_size)]
    if arguments.tokens != "own":
        options += ["--tokens", arguments.tokens]
    return options


def version_of(package: str) -> str:
    """Return the installed version, or the commit of a source tree in git."""
    version = installed(package)
    spec = importlib.util.find_spec(package)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    if version != "(source tree)" or not folders:
        return version if spec else "(none)"
    command = ["git", "-C", folders[0], "rev-parse", "--short", "HEAD"]
    finished = subprocess.run(command, capture_output=True, text=True)
    return f"commit {finished.stdout.strip()}" if finished.returncode == 0 else version


if __name__ == "__main__":
    main()

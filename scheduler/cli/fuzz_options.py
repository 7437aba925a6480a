"""The options of `radixkv fuzz`, apart from its work: that loads NumPy, `--help` does not."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, Final

from .options import positive_int, seconds

_MOST_JOBS: Final = 256


def add_parser(commands: Any, run: Callable[[argparse.Namespace], int]) -> None:
    """Add the command to those that there are."""
    parser = commands.add_parser(
        "fuzz",
        help="test a cache manager, ours or yours, against the specification",
        description="Do random operations to a cache manager beside a model of what it may do, "
        "until a rule of the specification breaks; then shrink and show what led to it. Exits with "
        "1 if a rule broke.",
    )
    _add_what(parser)
    length = parser.add_mutually_exclusive_group()
    length.add_argument(
        "--seconds",
        type=seconds,
        metavar="S",
        help="how long (default: 10); 0 goes on until interrupted",
    )
    length.add_argument("--steps", type=positive_int, metavar="N", help="how many operations")
    length.add_argument("--replay", metavar="FILE.json", help="replay what --json has written")
    parser.add_argument(
        "--seed", type=int, default=0, metavar="K", help="equal seeds, equal cases (default: 0)"
    )
    parser.add_argument(
        "--jobs", type=_jobs, metavar="N", default=1, help="processes (default: %(default)s)"
    )
    parser.add_argument(
        "--json", metavar="FILE", help="write the finding, or the figures, as JSON; - is stdout"
    )
    parser.add_argument("--svg", metavar="FILE", help="draw the state before the failing step")
    parser.set_defaults(run=run)


def _jobs(text: str) -> int:
    value = positive_int(text)
    if value > _MOST_JOBS:
        raise argparse.ArgumentTypeError(f"{value} processes are more than {_MOST_JOBS}")
    return value


def _add_what(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--target",
        metavar="package.module:factory",
        help="what makes an adapter from (num_blocks, block_size), or path/to/file.py:factory "
        "(default: radixkv's own)",
    )
    parser.add_argument(
        "--what", choices=["cache", "pool", "scheduler", "tiers"], help="its kind (default: cache)"
    )
    parser.add_argument(
        "--engine",
        choices=["random", "hypothesis"],
        default="random",
        help="who chooses the operations (default: %(default)s)",
    )
    parser.add_argument(
        "--depth",
        choices=["api", "events", "full"],
        help="how much of a cache is looked at (default: full for radixkv's own, else api)",
    )

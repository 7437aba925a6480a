"""Options of `radixkv fuzz`."""

from __future__ import annotations

from .common import Commands, add_count, integer, seconds


def add_parser(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "fuzz",
        help="test a cache manager, ours or yours, against the specification",
        description="Apply random operations to a cache manager, a scheduler or a hand-off between "
        "nodes, and to a model of it, until a rule "
        "of the specification breaks. Then shrink the operations to a short program and print it. "
        "Exits with 1 if a rule breaks.",
    )
    parser.add_argument(
        "--target",
        metavar="package.module:factory",
        help="factory that makes an adapter: of a cache from (num_blocks, block_size), of a pool "
        "from (num_blocks), of every other kind from a dictionary; also path/to/file.py:factory "
        "(default: radixkv's own)",
    )
    parser.add_argument(
        "--what",
        choices=["cache", "costs", "handoff", "pool", "scheduler", "tiered_scheduler", "tiers"],
        help="kind of the target (default: cache)",
    )
    parser.add_argument(
        "--engine",
        choices=["random", "hypothesis"],
        default="random",
        help="generator of the operations (default: %(default)s)",
    )
    parser.add_argument(
        "--depth",
        choices=["api", "events", "full"],
        help="how much of a cache is checked: api, its calls; events, also what happens inside; "
        "full, also its state (default: full for radixkv's own, else api)",
    )
    for what, default in (("block", "1 to 4"), ("pool", "4 to 14 blocks")):
        parser.add_argument(
            f"--{what}-sizes",
            type=integer(minimum=1),
            nargs="+",
            metavar="N",
            default=[],
            help=f"{what} sizes of a cache (default: those that the target names, or {default})",
        )
    parser.add_argument(
        "--known",
        nargs="+",
        metavar="RULE",
        default=[],
        help="rules that the target is known to break: they are counted, and not judged",
    )
    length = parser.add_mutually_exclusive_group()
    length.add_argument(
        "--seconds",
        type=seconds,
        metavar="S",
        help="run for S seconds; 0 runs until interrupted (default: 10)",
    )
    add_count(length, "--steps", "run N operations", required=False)
    length.add_argument(
        "--replay", metavar="FILE.json", help="replay a finding written with --json"
    )
    parser.add_argument(
        "--seed",
        type=int,
        metavar="K",
        help="equal seeds give equal cases; the seed of a run is printed (default: a new one)",
    )
    parser.add_argument(
        "--jobs",
        type=integer(maximum=256),
        metavar="N",
        default=1,
        help="number of processes (default: %(default)s)",
    )
    parser.add_argument(
        "--json",
        metavar="FILE",
        help="write the finding, or the statistics, to FILE as JSON; - prints only JSON",
    )
    parser.add_argument(
        "--svg", metavar="FILE", help="draw the state before the failing step to FILE"
    )
    parser.add_argument(
        "--script",
        metavar="FILE.py",
        help="write a finding as a plain script of calls on your manager, which needs no radixkv",
    )
    parser.set_defaults(module="fuzz")

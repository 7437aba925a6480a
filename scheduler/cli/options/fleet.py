"""Options of `radixkv serve --ray`, and of `radixkv fleet`."""

from __future__ import annotations

import argparse
from typing import Final, NamedTuple

from ..errors import BadInputError
from .common import Commands, Options, add_count, check_excludes, check_needs

NAMESPACE: Final = "radixkv"


class FleetSize(NamedTuple):
    """Number of nodes of each role, and of devices that share the model in each node."""

    prefill: int = 1
    decode: int = 1
    tp: int = 1

    @classmethod
    def parse(cls, text: str) -> FleetSize:
        """Parse the value of --ray, such as ``prefill=2,decode=4,tp=2``."""
        counts: dict[str, int] = {}
        for part in text.split(","):
            name, _, number = part.partition("=")
            is_count = number.isascii() and number.isdigit() and 0 < int(number) < 10_000
            if name not in cls._fields or name in counts or not is_count:
                raise argparse.ArgumentTypeError(
                    f"expected counts like prefill=2,decode=4,tp=2, got {text!r}"
                )
            counts[name] = int(number)
        return cls(**counts)


def add_ray(group: Options) -> None:
    """Add the options of a fleet."""
    group.add_argument(
        "--ray",
        type=FleetSize.parse,
        metavar="COUNTS",
        help="run the nodes as actors of the Ray cluster that this machine belongs to (or that "
        "RAY_ADDRESS names), which places them and starts them again; without a cluster, start one "
        "here. COUNTS is like prefill=2,decode=4,tp=2; what is not named is 1",
    )
    _add_namespace(group, None)


def add_parser(commands: Commands) -> None:
    """Add `radixkv fleet` and its subcommands."""
    parser = commands.add_parser(
        "fleet",
        help="change the size of a fleet on Ray",
        description="Work with the nodes of a `radixkv serve --ray`.",
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    scale = actions.add_parser(
        "scale",
        help="start or drain nodes",
        description="Tell the server how many nodes it shall have. It starts new ones, and drains "
        "those that are too many: they get no more requests, and end when theirs have ended.",
    )
    add_count(scale, "--prefill", "number of prefill nodes (default: unchanged)", required=False)
    add_count(scale, "--decode", "number of decode nodes (default: unchanged)", required=False)
    _add_namespace(scale, NAMESPACE)
    scale.set_defaults(module="fleet.scale")


def _add_namespace(parser: Options, default: str | None) -> None:
    parser.add_argument(
        "--ray-namespace",
        metavar="NAME",
        default=default,
        help=f"namespace of the fleet in the Ray cluster (default: {NAMESPACE})",
    )


def expand_ray(arguments: argparse.Namespace) -> None:
    """Replace --ray by the options of nodes that it stands for; without it, change nothing.

    Raises:
        BadInputError: For an option that excludes it, or needs it.
    """
    check_needs(arguments, "--ray", "--ray-namespace")
    if arguments.ray is None:
        return
    check_excludes(arguments, "--ray", "--disaggregate", "--gateway", "--secret-file")
    check_excludes(arguments, "--ray", "--memory-fraction", "--otlp-traces-endpoint", "--kv-events")
    hint = ": give it with --ray, like prefill=2,decode=4,tp=2"
    check_excludes(arguments, "--ray", "--prefill", "--decode", "--tp", hint=hint)
    if arguments.device_blocks is None:
        raise BadInputError("--ray needs --device-blocks")
    arguments.disaggregate = True
    arguments.prefill, arguments.decode, arguments.tp = arguments.ray
    if arguments.tp == 1:
        arguments.tp = None

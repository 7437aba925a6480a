"""Options of `radixkv events`."""

from __future__ import annotations

from .common import Commands, add_count, add_json, seconds


def add_parser(commands: Commands) -> None:
    """Add the command and its subcommands."""
    parser = commands.add_parser(
        "events",
        help="check the KV events that a server publishes",
        description="Work with the KV events of a server: of this library, vLLM or SGLang.",
    )
    parser.set_defaults(module="events")
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    check = actions.add_parser(
        "check",
        help="check that the events can be true",
        description="Subscribe to the KV events of a server and apply them as a router does. "
        "Reports batches that were missed, blocks that are removed from a tier that does not have "
        "them or stored where they are, unknown parents, hashes that name two prefixes, and "
        "changes of the block size. The exit status is 1 if there was any, and 2 if no "
        "batch came.",
    )
    check.add_argument(
        "endpoint", metavar="ENDPOINT", help="address of the publisher, such as tcp://HOST:5557"
    )
    check.add_argument(
        "--replay",
        metavar="ENDPOINT",
        help="address of its replay socket: to begin with what it published before, and to get "
        "missed batches",
    )
    check.add_argument(
        "--topic", default="", help="check only messages whose topic begins so (default: all)"
    )
    check.add_argument(
        "--seconds",
        type=seconds,
        metavar="S",
        help="end after this time (default: when it is interrupted)",
    )
    add_count(check, "--batches", "end after N batches", required=False)
    add_json(check)

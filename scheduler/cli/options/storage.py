"""Options of `radixkv storage`."""

from __future__ import annotations

from .common import Commands, Options, add_json, integer, seconds, storage_url


def add_parser(commands: Commands) -> None:
    """Add the command and its actions."""
    parser = commands.add_parser(
        "storage",
        help="list, verify or remove the blocks in storage",
        description="Manage the blocks in storage. A directory must not be open in another "
        "process; a server or a bucket may be in use.",
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)

    ls = actions.add_parser(
        "ls",
        help="count the blocks and their bytes",
        description="Count the blocks in storage and their bytes; on a server or in a bucket, "
        "also per namespace.",
    )
    ls.add_argument("--keys", action="store_true", help="also list each key with its bytes")
    _add_common(ls, "ls")

    verify = actions.add_parser(
        "verify",
        help="check the checksums of all blocks",
        description="Read every block and check its length, key and checksum. Exits with 1 if a "
        "block is corrupt or cannot be read.",
    )
    verify.add_argument("--delete", action="store_true", help="remove the corrupt blocks")
    _add_common(verify, "verify")

    gc = actions.add_parser(
        "gc",
        help="remove blocks, the least recently used first",
        description="Remove the least recently used blocks until the rest is within a limit, and "
        "unfinished files of processes that died. Only a directory records when blocks were used.",
    )
    budget = gc.add_mutually_exclusive_group(required=True)
    budget.add_argument(
        "--max-bytes",
        type=integer(maximum=None),
        metavar="N",
        help="maximum size of the blocks that remain",
    )
    budget.add_argument("--all", action="store_true", help="remove all blocks, of any storage")
    _add_common(gc, "gc")


def _add_common(parser: Options, action: str) -> None:
    parser.add_argument(
        "url",
        type=storage_url,
        metavar="URL",
        help="URL of the storage: file:///DIRECTORY, redis://HOST[:PORT][/DB], rediss://..., "
        "unix:///SOCKET or s3://BUCKET[/PREFIX]; env:NAME reads it from an environment variable. "
        "mooncake:// cannot list its blocks",
    )
    parser.add_argument(
        "--namespace",
        metavar="DIGITS",
        help="only the blocks of one namespace of a server or bucket: the first 16 digits of its "
        "digest, as ls prints them. A directory does not separate namespaces",
    )
    parser.add_argument(
        "--timeout-s",
        type=seconds,
        metavar="S",
        help="how long to wait for a connection, and for an answer (default: depends on the URL)",
    )
    parser.add_argument(
        "--ca-file", metavar="FILE", help="PEM file of the certificates that rediss: trusts"
    )
    add_json(parser)
    parser.set_defaults(module="storage", action=action)

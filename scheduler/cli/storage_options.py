"""The options of `radixkv storage`, apart from its work: that loads NumPy, `--help` does not."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from .options import (
    num_bytes,
    seconds,
    storage_url,
)

_URL_HELP = (
    "where: file:///DIRECTORY, redis://HOST[:PORT][/DB], rediss://..., unix:///SOCKET or "
    "s3://BUCKET[/PREFIX], or env:NAME for one in the environment; mooncake:// does not list what "
    "it has"
)


def add_parser(commands: Any, run: Callable[[argparse.Namespace], int]) -> None:
    """Add the command to those that there are."""
    parser = commands.add_parser(
        "storage",
        help="list, verify or remove the blocks in storage",
        description="Look after the blocks that are kept outside the process. A directory must not "
        "be open in another process; a server or a bucket may be in use.",
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)

    ls = actions.add_parser(
        "ls",
        help="count the blocks and their bytes",
        description="Count the blocks in storage; in a server or bucket, also those of each "
        "namespace that is there.",
    )
    ls.add_argument("--keys", action="store_true", help="also show each key and its bytes")
    _add_common(ls, run, "ls")

    verify = actions.add_parser(
        "verify",
        help="read every block and check that it is what was stored",
        description="Read every block and check its length, key and checksum. Exits with 1 if one "
        "is corrupt or cannot be read.",
    )
    verify.add_argument("--delete", action="store_true", help="remove the corrupt ones")
    _add_common(verify, run, "verify")

    gc = actions.add_parser(
        "gc",
        help="remove blocks, the least recently used first",
        description="Remove the least recently used blocks until the rest is within a budget, and "
        "what dead writers left unfinished. Only a directory knows the order of use.",
    )
    budget = gc.add_mutually_exclusive_group(required=True)
    budget.add_argument(
        "--max-bytes", type=num_bytes, metavar="N", help="of the blocks that stay, at most"
    )
    budget.add_argument("--all", action="store_true", help="remove all blocks, of any storage")
    _add_common(gc, run, "gc")


def _add_common(
    parser: argparse.ArgumentParser, run: Callable[[argparse.Namespace], int], action: str
) -> None:
    parser.add_argument("url", type=storage_url, metavar="URL", help=_URL_HELP)
    parser.add_argument(
        "--namespace",
        metavar="DIGITS",
        help="only the blocks of this namespace in a server or bucket: the first 16 digits of its "
        "digest, as ls shows them without this option; a directory does not tell them apart",
    )
    parser.add_argument(
        "--timeout-s",
        type=seconds,
        metavar="S",
        help="how long a server may take to connect, and to answer (default: its backend's own)",
    )
    parser.add_argument("--ca-file", metavar="FILE", help="certificates that rediss: trusts, PEM")
    parser.add_argument(
        "--json", metavar="FILE", help="write the results as JSON; - puts only them on stdout"
    )
    parser.set_defaults(run=run, action=action)

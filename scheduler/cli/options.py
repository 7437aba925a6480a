"""Options that several commands have, and what their values may be. Loads nothing but argparse."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING, Final

from .errors import BadInputError

if TYPE_CHECKING:
    from ...kvcache.tiers.host_tier import HostConfig, WritePolicy

LARGEST_INT32 = 2**31 - 1
"""Block ids and token ids are int32, so no size can be larger."""

_BYTES_PER_BLOCK: Final = 16  # of a `BlockPool` while it is made


def positive_int(text: str) -> int:
    """Parse an option that must be between 1 and the largest int32."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a positive integer, got {text!r}")
    if value > LARGEST_INT32:
        raise argparse.ArgumentTypeError(f"{value} is larger than {LARGEST_INT32}")
    return value


def size_or_zero(text: str) -> int:
    """Parse an option that must be between 0 and the largest int32."""
    return 0 if text == "0" else positive_int(text)


def tokens_to_reserve(text: str) -> int | None:
    """Parse how many more tokens of each request to keep room for; None: all of them."""
    if text == "no_evict":
        return None
    try:
        return size_or_zero(text)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(
            f"expected a number of tokens, or no_evict, got {text!r}"
        ) from None


def num_bytes(text: str) -> int:
    """Parse a budget of bytes: more than zero."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a positive number of bytes, got {text!r}")
    return value


def seconds(text: str) -> float:
    """Parse a time that may be zero."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number of seconds, 0 or more, got {text!r}")
    return value


def storage_url(text: str) -> str:
    """Return a URL, or with env:NAME the environment's: others can see a command's arguments."""
    name = text.removeprefix("env:")
    if name == text:
        return text
    if not name:
        raise argparse.ArgumentTypeError("env: is without the name of a variable")
    if not os.environ.get(name):
        raise argparse.ArgumentTypeError(f"the environment has no {name}")
    return os.environ[name]


def add_host_tier(
    parser: argparse.ArgumentParser, unit: str, *, write: WritePolicy | None = None
) -> None:
    """Add the options of a host tier; without --host-blocks there is none.

    Args:
        parser: of the command.
        unit: what a block is.
        write: the default of --host-write; None: that of `HostConfig`.
    """
    add_size(parser, "--host-blocks", f"a host tier of so many {unit}", required=False)
    parser.add_argument(
        "--host-write",
        choices=("exclusive", "back", "through"),
        help="when blocks are copied to the host: exclusive: when the device evicts them, and a "
        "hit moves them back; back: the same, but the host keeps its copy; through: when they are "
        f"computed (default: {write or 'through with storage, else back'})",
    )
    parser.set_defaults(default_host_write=write)


def add_storage(parser: argparse.ArgumentParser) -> None:
    """Add the options of a storage tier; without --storage there is none."""
    parser.add_argument(
        "--storage",
        type=storage_url,
        metavar="URL",
        help="keep blocks outside the process, for others and for later: file:///DIRECTORY, "
        "redis://HOST[:PORT][/DB], rediss://..., unix:///SOCKET, s3://BUCKET[/PREFIX] or "
        "mooncake://HOST[:PORT]; env:NAME for one in the environment, where others do not see its "
        "password; needs --host-blocks. A directory is for one process: nodes that generate starts "
        "have one each in it",
    )
    parser.add_argument(
        "--storage-max-bytes",
        type=num_bytes,
        metavar="N",
        help="budget of file:; the least recently used blocks go first (default: 16 GiB)",
    )


def host_tier(arguments: argparse.Namespace) -> HostConfig | None:
    """Return the host tier that was asked for; None if none was.

    Raises:
        BadInputError: if it was given without --host-blocks.
    """
    if arguments.host_write is not None and arguments.host_blocks is None:
        raise BadInputError("--host-write needs --host-blocks")
    if arguments.host_blocks is None:
        return None
    from ...kvcache.tiers.host_tier import HostConfig  # here, because --help must not load numpy

    return HostConfig(arguments.host_blocks, arguments.host_write or arguments.default_host_write)


def check_sizes(arguments: argparse.Namespace) -> None:
    """Refuse tiers whose bookkeeping alone takes more memory than the machine has.

    Linux would promise it, and then end this process or another.

    Raises:
        BadInputError: with both figures.
    """
    has = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for option in ("device_blocks", "host_blocks"):
        num_blocks = getattr(arguments, option, None) or 0
        needs = num_blocks * _BYTES_PER_BLOCK
        if needs > has:
            raise BadInputError(
                f"--{option.replace('_', '-')} {num_blocks}: to keep account of so many blocks "
                f"takes {needs:,} bytes, and this machine has {has:,}"
            )


def add_size(
    parser: argparse.ArgumentParser,
    option: str,
    help_text: str,
    *,
    default: int | None = None,
    required: bool = True,
) -> None:
    """Add an option that is a positive integer."""
    parser.add_argument(
        option,
        type=positive_int,
        metavar="N",
        default=default,
        required=required and default is None,
        help=help_text,
    )


def add_requests(parser: argparse.ArgumentParser) -> None:
    """Add the option that cuts a trace."""
    add_size(parser, "--requests", "use the first N requests of the trace only", required=False)


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add the option that asks for JSON."""
    parser.add_argument(
        "--json", metavar="FILE", help="write the results as JSON; - puts only them on stdout"
    )

"""Options that several commands have, and what their values may be. Loads nothing but argparse."""

from __future__ import annotations

import argparse

LARGEST_INT32 = 2**31 - 1
"""Block ids and token ids are int32, so no size can be larger."""


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


def seconds(text: str) -> float:
    """Parse a time that may be zero."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number of seconds, 0 or more, got {text!r}")
    return value


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

"""Where a command's results and its progress go."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import BadInputError

if TYPE_CHECKING:
    from rich.console import RenderableType


def check_destination(file: str | None, option: str = "--json") -> None:
    """Refuse a file to write results to that cannot be written, before the work is done.

    Args:
        file: What the option says: None or `-` for no file.
        option: Its name.

    Raises:
        BadInputError: The path is a directory, its directory does not exist, or it is not ours to
            write.
    """
    if file in (None, "-"):
        return
    path = Path(str(file))
    if path.is_dir():
        raise BadInputError(f"{option} {path}: is a directory")
    if not path.parent.is_dir():
        raise BadInputError(f"{option} {path}: there is no directory {path.parent}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise BadInputError(f"{option} {path}: may not be written")


def emit(
    json_path: str | None, results: Mapping[str, Any], text: Callable[[], str | RenderableType]
) -> None:
    """Write results where `--json` says.

    Args:
        json_path: None: text on stdout; `-`: JSON on stdout; else text on stdout, JSON in the file.
        results: What JSON shall hold; NaN and infinity are refused, since JSON has neither.
        text: Makes the text or the tables for people; called only where they are shown.
    """
    if json_path != "-":
        shown = text()
        if isinstance(shown, str):
            print(shown)
        else:
            from ..console import make_console

            make_console().print(shown)
    if json_path is not None:
        document = json.dumps(results, indent=2, allow_nan=False)
        if json_path == "-":
            print(document)
        else:
            Path(json_path).write_text(document + "\n", encoding="utf-8")


def format_table(rows: Iterable[tuple[str, ...]]) -> str:
    """Align rows of cells: the first column to the left, the others to the right."""
    table = list(rows)
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in table
    )

"""Rich consoles for stdout and stderr, and the tables that commands and reports print.

Import this module only where something is printed: `radixkv --help` does not load Rich.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Iterable, Sequence
from typing import Any, Final, NoReturn

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

PIPE_WIDTH: Final = 100
"""Width in columns where the output is not a terminal: files, pipes and tests see stable text."""

_VERDICT_STYLES: Final = {"PASS": "bold green", "FAIL": "bold red", "SKIP": "bold yellow"}


class _Console(Console):
    """A console that leaves a broken pipe to its caller; Rich would end the process."""

    def on_broken_pipe(self) -> NoReturn:
        raise  # the BrokenPipeError that Rich handles when it calls this


def make_console(*, stderr: bool = False) -> Console:
    """Return a console that writes to the current stdout or stderr.

    It is as wide as its terminal, or `PIPE_WIDTH` columns. It uses no colour if its stream is not a
    terminal, or if the environment sets `NO_COLOR`. It prints strings as they are: brackets are
    not markup.
    """
    stream = sys.stderr if stderr else sys.stdout
    is_terminal = stream is not None and stream.isatty()
    return _plain(is_terminal, stderr=stderr, width=None if is_terminal else PIPE_WIDTH)


def to_text(renderable: RenderableType) -> str:
    """Return what a file or a pipe gets of `renderable`, without the last newline."""
    text = io.StringIO()
    _plain(False, file=text, width=PIPE_WIDTH).print(renderable)
    return text.getvalue().removesuffix("\n")


def table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Make a table: the first column is aligned to the left, the others to the right.

    Cells that do not fit the width are folded, not cut.

    Args:
        headers: One header per column, with a rule below; empty for a table without headers.
        rows: The cells of each row.
    """
    made = Table(
        box=box.SIMPLE_HEAD if headers else None,
        show_header=bool(headers),
        show_edge=False,
        pad_edge=False,
        padding=(0, 1 if headers else 2, 0, 0),  # the box adds a space between columns
    )
    cells = [[Text(cell) for cell in row] for row in rows]
    for column, header in enumerate(headers or (cells[0] if cells else ())):
        made.add_column(
            Text(str(header)) if headers else "",
            justify="right" if column else "left",
            overflow="fold",
        )
    for row in cells:
        made.add_row(*row)
    return made


def verdict_text(word: str) -> Text:
    """Return PASS, FAIL or SKIP in the colour that a terminal shows it in."""
    return Text(word, style=_VERDICT_STYLES[word])


def _plain(is_terminal: bool, **options: Any) -> Console:
    return _Console(
        force_terminal=is_terminal,  # not FORCE_COLOR, which would change what a pipe gets
        markup=False,
        emoji=False,
        highlight=False,
        **options,
    )

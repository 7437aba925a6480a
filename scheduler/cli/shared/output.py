"""Output of commands: results as text and JSON, and a progress bar on stderr."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ..errors import BadInputError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ....kvcache.storage import Storage, StorageStats
    from ...nodes import NodeStats


def check_destination(file: str | None, option: str = "--json") -> None:
    """Reject a file that cannot be written, before the work begins.

    Args:
        file: Value of the option; None names no file, and `-` the output of a command with --json.
        option: Name of the option.

    Raises:
        BadInputError: The path is a directory, its directory does not exist, or it is not writable.
    """
    if file is None or (file == "-" and option == "--json"):
        return
    if file == "-":
        raise BadInputError(f"{option} needs the name of a file, got -")
    path = Path(str(file))
    if path.is_dir():
        raise BadInputError(f"{option} {path}: expected a file, got a directory")
    if not path.parent.is_dir():
        raise BadInputError(f"{option} {path}: the directory {path.parent} does not exist")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise BadInputError(f"{option} {path}: permission denied")


def emit(json_path: str | None, results: Mapping[str, Any] | str, *parts: RenderableType) -> None:
    """Write results as text, as JSON, or both.

    Args:
        json_path: Value of --json. None: text on stdout; `-`: JSON on stdout; else text on stdout
            and JSON in the file.
        results: The results, without NaN and infinity, which JSON does not have; or a JSON text.
        parts: The text, from top to bottom. A string is printed as it is, never wrapped.
    """
    if json_path != "-":
        for part in parts:
            if isinstance(part, str):
                print(part)
            else:
                from ...terminal.console import make_console  # `radixkv fuzz` works without Rich

                make_console().print(part)
    if json_path is not None:
        if not isinstance(results, str):
            results = json.dumps(results, indent=2, allow_nan=False) + "\n"
        if json_path == "-":
            print(results, end="")
        else:
            Path(json_path).write_text(results, encoding="utf-8")


class ProgressBar:
    """A `radixkv.scheduler.replay.progress.Progress` that draws a bar, and erases it at the end.

    It draws nothing if `quiet`, if stderr is not a terminal, or in CI (environment variable `CI`).

    Example:
        with ProgressBar(quiet=False) as progress:
            run_replay(..., progress=progress)
    """

    def __init__(self, quiet: bool) -> None:
        from rich.progress import (
            BarColumn,
            Progress,
            SpinnerColumn,
            TextColumn,
            TimeRemainingColumn,
        )

        from ...terminal.console import make_console

        console = make_console(stderr=True)
        self._progress = Progress(
            SpinnerColumn("line"),  # moves while a program is compiled
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            TextColumn("{task.percentage:.0f}% ({task.completed:,.0f} of {task.total:,.0f})"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            redirect_stdout=False,  # Rich would print it on stderr
            disable=quiet or bool(os.environ.get("CI")) or not console.is_interactive,
        )
        self._task = self._progress.add_task("", visible=False)
        self._stage = ""

    def __enter__(self) -> ProgressBar:
        self._progress.start()
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Show the progress of a stage; a new stage starts a new bar."""
        is_new, self._stage = stage != self._stage, stage
        if is_new:
            self._progress.reset(self._task, description=stage, visible=True)
        self._progress.update(self._task, completed=done, total=max(total, 1), refresh=is_new)


def describe_node(stats: NodeStats, storage: Storage | None = None) -> dict[str, Any]:
    """Return the statistics of a node for JSON, with names for its faults."""
    described = asdict(stats)
    faults = stats.transport.faults
    described["transport"]["faults"] = {fault.value: count for fault, count in faults.items()}
    if storage is not None:
        described["storage"] = describe_storage(storage.stats())
    return described


def describe_storage(stats: StorageStats) -> dict[str, Any]:
    """Return the statistics of a storage for JSON, with names for its statuses."""
    return {
        "blocks": {status.name.lower(): count for status, count in stats.blocks.items()},
        "stored_bytes": stats.stored_bytes,
        "loaded_bytes": stats.loaded_bytes,
        "dropped_bytes": stats.dropped_bytes,
        "errors": dict(stats.errors),
    }

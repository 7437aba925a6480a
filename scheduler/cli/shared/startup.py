"""What a command does before its engine starts: the compilation cache, and lines on stderr."""

from __future__ import annotations

import platform
import sys
import warnings
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

from ...terminal.log_lines import listen
from ..exit_status import say

_DIRECTORY = "JAX_COMPILATION_CACHE_DIR"
_ENABLED = "JAX_ENABLE_COMPILATION_CACHE"
_LOGGER = "radixkv.scheduler.engine"
_ERASE = "\x1b[K"
"""Erases the line from the cursor on, which `\\r` has moved to its beginning."""


def set_compilation_cache(environment: MutableMapping[str, str], *, enabled: bool) -> None:
    """Set the environment variables of JAX's persistent compilation cache, before JAX is loaded.

    Variables that the user has set win. The cache is `radixkv/programs-...` in the user's cache
    directory, one for each kind of processor, because programs for a CPU run only on its kind.

    Args:
        environment: Environment of this process, which the nodes that it starts inherit.
        enabled: False turns the cache off, also one that the user has set.
    """
    if not enabled:
        environment[_ENABLED] = "false"
        return
    # JAX would not keep programs that took less than a second, which are many.
    environment.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    environment.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
    if _DIRECTORY in environment:
        return
    try:
        home = environment.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        directory = Path(home) / "radixkv" / f"programs-{_processor()}"
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (OSError, RuntimeError) as error:  # the user may have no home
        say(f"warning: no compilation cache: {error}")
        return
    environment[_DIRECTORY] = str(directory)


@contextmanager
def report_on_stderr() -> Iterator[None]:
    """Print on stderr which program the engine compiles, and each warning in one line.

    On a terminal, a line about a program is replaced by the next one.
    """
    is_terminal = sys.stderr is not None and sys.stderr.isatty()
    erase, end = (_ERASE, "\r") if is_terminal else ("", "\n")

    def print_line(text: str, end: str = "\n") -> None:
        if sys.stderr is not None:  # a service may have closed it
            print(f"{erase}{text}", end=end, file=sys.stderr, flush=True)

    try:
        with (
            warnings.catch_warnings(),
            listen(_LOGGER, lambda record: print_line(f"radixkv: {record.getMessage()}", end)),
        ):
            warnings.showwarning = lambda message, *_, **__: print_line(
                f"radixkv: warning: {message}"
            )
            yield
    finally:
        if is_terminal:
            print_line("", end="")


def _processor() -> str:
    """Return a name of the kind of this machine's processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = [platform.processor()]
    kind = next((line for line in lines if line.startswith(("flags", "Features"))), lines[0])
    return f"{platform.machine()}-{sha256(kind.encode()).hexdigest()[:8]}"

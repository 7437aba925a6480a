"""The ``radixkv`` command line.

Exit status: 0 success, 1 a check of the command, or one of its nodes or processes, failed, 2 wrong
usage or input (one line on stderr), 130 interrupted, 141 the reader of stdout went away.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NoReturn

from ..terminal.interrupts import hold_interrupts
from .errors import BadInputError
from .exit_status import report
from .options import bench, events, fleet, fuzz, generate, hits, nodes, replay, serve, storage


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: Arguments after the program's name; None for those of the process.

    Returns:
        The exit status, as listed in the docstring of the module.
    """
    try:
        arguments = build_parser().parse_args(argv)
        if hasattr(arguments, "no_compilation_cache"):
            from .shared.startup import (
                set_compilation_cache,  # here, because --help needs none of it
            )

            set_compilation_cache(os.environ, enabled=not arguments.no_compilation_cache)
        with hold_interrupts():  # the module of a command may load JAX
            command = import_module(f".{arguments.module}", __package__)
        status: int = command.run(arguments)
        if sys.stdout is not None:  # a service may have closed it
            sys.stdout.flush()
    except BaseException as error:
        ended = report(error)
        if ended is None:
            raise  # a bug in radixkv: its traceback is the report
        return ended
    return status


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands; each names the module of this package that runs it."""
    parser = _Parser(prog="radixkv", description="A KV cache for LLM inference in JAX.")
    parser.add_argument(
        "--version", action=_VersionAction, nargs=0, help="print the version and exit"
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for module in (replay, hits, generate, serve, nodes, fleet, bench, fuzz, storage, events):
        module.add_parser(commands)
    return parser


class _Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Reject unknown arguments here and not in the parser above, which has another --help."""
        known, rest = super().parse_known_args(args, namespace)
        if rest:
            self.error(f"unrecognized arguments: {' '.join(rest)}")
        return known, rest

    def error(self, message: str) -> NoReturn:
        message = re.sub(r"(\w+://)\S*@", r"\1...@", message)  # a URL may contain a password
        raise BadInputError(f"{message} (see `{self.prog} --help`)")


class _VersionAction(argparse.Action):
    """Print the installed version, whose metadata is read only then."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        from importlib.metadata import PackageNotFoundError, version

        try:
            print(f"radixkv {version('radixkv')}")
        except PackageNotFoundError:
            print("radixkv (not installed: run from a source tree)")
        parser.exit()


if __name__ == "__main__":
    sys.exit(main())

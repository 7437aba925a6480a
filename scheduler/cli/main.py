"""The ``radixkv`` command line.

Exit status: 0 success, 1 a check of the command or one of its nodes failed, 2 wrong usage or input
(one line on stderr), 130 interrupted, 141 the reader of stdout went away.
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
from .options import bench, events, fleet, fuzz, generate, hits, nodes, replay, serve, storage

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141


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
            from .startup import set_compilation_cache  # here, because --help needs none of it

            set_compilation_cache(os.environ, enabled=not arguments.no_compilation_cache)
        with hold_interrupts():  # the module of a command may load JAX
            command = import_module(f".{arguments.module}", __package__)
        status: int = command.run(arguments)
        if sys.stdout is not None:  # a service may have closed it
            sys.stdout.flush()
    except SystemExit as stop:  # argparse has printed --help or --version
        return EXIT_OK if stop.code is None else int(stop.code)
    except KeyboardInterrupt:
        return _fail("interrupted", EXIT_INTERRUPTED)
    except BrokenPipeError:
        # Python flushes stdout again when it exits: redirect that flush.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    except Exception as error:
        if isinstance(error.__context__, KeyboardInterrupt):  # Hypothesis may replace an interrupt
            return _fail("interrupted", EXIT_INTERRUPTED)
        message, status = _explain(error)
        if message is None:
            raise  # a bug in radixkv: its traceback is the report
        return _fail(message, status)
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


def _explain(error: Exception) -> tuple[str | None, int]:
    """Return a message and the exit status; the message is None if the user cannot act on it."""
    message = str(error)
    if isinstance(error, BadInputError):
        return message, EXIT_BAD_INPUT
    from ...kvcache.errors import RadixKVError  # here, because --help must not load numpy
    from ..errors import NodesFailedError

    if isinstance(error, NodesFailedError):
        return message, EXIT_FAILED
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}", EXIT_BAD_INPUT
    if isinstance(error, MemoryError):
        return f"not enough memory on this machine: {error}", EXIT_BAD_INPUT
    if type(error).__name__ == "JaxRuntimeError" and "RESOURCE_EXHAUSTED" in message:
        return f"not enough memory on the device: {message}", EXIT_BAD_INPUT
    return message if isinstance(error, RadixKVError | OSError) else None, EXIT_BAD_INPUT


def _fail(message: str, status: int) -> int:
    print(f"radixkv: {' '.join(message.split())}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())

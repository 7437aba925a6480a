"""The `radixkv` command line: options here, work in `radixkv.scheduler.cli`.

This module imports neither numpy nor JAX, so that `radixkv --help` is immediate: a command's own
module is imported when it runs.

Exit status: 0 done, 1 a check of the command failed, or the nodes that it needs did, 2 bad usage or
input (one line on stderr), 130 interrupted, 141 the reader of stdout went away.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from ..interrupts import hold_interrupts
from . import (
    fuzz_options,
    generate_options,
    node_options,
    storage_options,
    trace_options,
)
from .errors import BadInputError
from .options import (
    add_json,
    add_requests,
    add_size,
)

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: The arguments after the program's name; those of the process when None.

    Returns:
        The exit status, as listed in the module's docstring.
    """
    try:
        arguments = build_parser().parse_args(argv)
        status: int = arguments.run(arguments)
        if sys.stdout is not None:  # a service may have closed it
            sys.stdout.flush()
    except SystemExit as stop:  # argparse has printed --help or --version
        return EXIT_OK if stop.code is None else int(stop.code)
    except KeyboardInterrupt:
        return _fail("interrupted", EXIT_INTERRUPTED)
    except BrokenPipeError:
        # Python flushes stdout once more when it ends: give that flush somewhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    except Exception as error:
        if isinstance(error.__context__, KeyboardInterrupt):  # Hypothesis cannot take every one
            return _fail("interrupted", EXIT_INTERRUPTED)
        message = _explain(error)
        if message is None:
            raise  # a defect of radixkv: its traceback is the report
        return _fail(message, _status_of(error))
    return status


def _explain(error: Exception) -> str | None:
    """Put an error that the user can act on in one line; None for any other."""
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    if isinstance(error, MemoryError):
        return f"not enough memory on this machine: {error}"
    if type(error).__name__ == "JaxRuntimeError" and "RESOURCE_EXHAUSTED" in str(error):
        return f"not enough memory on the device: {_one_line(error)}"
    if isinstance(error, BadInputError | OSError):
        return _one_line(error)
    from ...kvcache.errors import RadixKVError  # here, because --help must not load numpy

    return _one_line(error) if isinstance(error, RadixKVError) else None


def _status_of(error: Exception) -> int:
    """Tell what a user got wrong from what went wrong."""
    if isinstance(error, BadInputError):
        return EXIT_BAD_INPUT
    from ..errors import NodesFailedError  # here, because --help must not load numpy

    return EXIT_FAILED if isinstance(error, NodesFailedError) else EXIT_BAD_INPUT


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _fail(message: str, status: int) -> int:
    print(f"radixkv: {message}", file=sys.stderr)
    return status


class _Parser(argparse.ArgumentParser):
    """An argument parser whose complaint is one line."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuse what no option takes here, not in the parser above: it has another --help."""
        known, rest = super().parse_known_args(args, namespace)
        if rest:
            self.error(f"unrecognized arguments: {' '.join(rest)}")
        return known, rest

    def error(self, message: str) -> NoReturn:
        # It may quote a URL, and that may hold a password.
        message = re.sub(r"(\w+://)\S*@", r"\1...@", message)
        raise BadInputError(f"{message} (see `{self.prog} --help`)")


class _VersionAction(argparse.Action):
    """Print the installed version; reading the metadata is put off until it is asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        from importlib.metadata import PackageNotFoundError, version

        try:
            print(f"radixkv {version('radixkv')}")
        except PackageNotFoundError:
            print("radixkv (not installed: run from a source tree)")
        parser.exit()


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of every command; each sets `run(arguments) -> exit status`."""
    parser = _Parser(prog="radixkv", description="A KV cache for LLM inference in JAX.")
    parser.add_argument(
        "--version", action=_VersionAction, nargs=0, help="print the version and exit"
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    trace_options.add_replay(commands, _run_replay)
    trace_options.add_hits(commands, _run_hits)
    generate_options.add_parser(commands, _run_generate)
    node_options.add_parsers(commands, _run_node)
    _add_bench(commands)
    fuzz_options.add_parser(commands, _run_fuzz)
    storage_options.add_parser(commands, _run_storage)
    return parser


_Commands = Any  # argparse's type for this is private, and generic only for type checkers


def _add_bench(commands: _Commands) -> None:
    parser = commands.add_parser(
        "bench",
        help="measure the cost of the cache manager",
        description="Measure the CPU time of the cache manager, on the thread that calls it.",
    )
    benches = parser.add_subparsers(title="benchmarks", metavar="BENCHMARK", required=True)

    cache = benches.add_parser(
        "cache",
        help="whole life of a request, on a trace",
        description="Match, admit, extend, publish and release each request of a trace, one after "
        "the other; each id stands for 512 tokens of its own, output tokens are unique. The trace "
        "runs three times on equal managers: to warm up, timed per request, timed per phase.",
    )
    cache.add_argument("trace", metavar="TRACE", help="a .jsonl trace")
    add_size(cache, "--block-size", "tokens per block")
    add_size(cache, "--device-tokens", "size of the cache in tokens (cut to whole blocks)")
    add_requests(cache)
    add_json(cache)
    cache.set_defaults(run=_run_bench, benchmark="cache")

    evict = benches.add_parser(
        "evict",
        help="one eviction in a full cache",
        description="Fill a pool with published, unreferenced blocks and evict some in one call; "
        "refill, and repeat.",
    )
    add_size(evict, "--device-blocks", "size of the pool")
    add_size(evict, "--evict", "blocks to evict in one call")
    add_size(evict, "--chain", "blocks per leaf")
    add_size(evict, "--block-size", "tokens per block (default: %(default)s)", default=16)
    add_size(evict, "--calls", "timed calls (default: %(default)s)", default=9)
    add_json(evict)
    evict.set_defaults(run=_run_bench, benchmark="evict")

    decode = benches.add_parser(
        "decode",
        help="one more token for every running request",
        description="Grow a batch of leases by one token a step, in one extend_batch call.",
    )
    add_size(decode, "--batch", "running requests (default: %(default)s)", default=256)
    add_size(decode, "--steps", "tokens each request grows by")
    add_size(decode, "--prompt-tokens", "their prompts (default: %(default)s)", default=1024)
    add_size(decode, "--block-size", "tokens per block (default: %(default)s)", default=16)
    add_json(decode)
    decode.set_defaults(run=_run_bench, benchmark="decode")


def _run_replay(arguments: argparse.Namespace) -> int:
    with hold_interrupts():
        from .replay import run
    return run(arguments)


def _run_hits(arguments: argparse.Namespace) -> int:
    with hold_interrupts():
        from .hits import run
    return run(arguments)


def _run_generate(arguments: argparse.Namespace) -> int:
    with hold_interrupts():
        from .generate import run
    return run(arguments)


def _run_node(arguments: argparse.Namespace) -> int:
    with hold_interrupts():
        from .node import run
    return run(arguments)


def _run_bench(arguments: argparse.Namespace) -> int:
    with hold_interrupts():
        from .bench import run
    return run(arguments)


def _run_fuzz(arguments: argparse.Namespace) -> int:
    with hold_interrupts():
        from .fuzz import run
    return run(arguments)


def _run_storage(arguments: argparse.Namespace) -> int:
    with hold_interrupts():
        from .storage import run
    return run(arguments)


if __name__ == "__main__":
    sys.exit(main())

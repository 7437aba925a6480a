"""What a command says on stderr, and how it ends: with an exit status, and one such line."""

from __future__ import annotations

import os
import sys
from typing import Final

from .errors import BadInputError

_NO_DEVICE: Final = "Unable to initialize backend"
"""Begin of what JAX says of a device that it does not have, or of no library for it."""

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141


def say(line: str) -> None:
    """Print a line of radixkv on stderr; a service may have closed it."""
    if sys.stderr is not None:  # print would take stdout in its place
        print(f"radixkv: {line}", file=sys.stderr, flush=True)


def report(error: BaseException) -> int | None:
    """Print why a command ends, and return its exit status; None for a defect of radixkv."""
    if isinstance(error, SystemExit):  # argparse has printed --help or --version
        return int(error.code or EXIT_OK)
    if isinstance(error, BrokenPipeError):
        # Python flushes stdout again when it exits: redirect that flush.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    # Hypothesis may replace an interrupt
    if isinstance(error, KeyboardInterrupt) or isinstance(error.__context__, KeyboardInterrupt):
        return _fail("interrupted", EXIT_INTERRUPTED)
    message, status = _explain(error)
    return None if message is None else _fail(message, status)


def _explain(error: BaseException) -> tuple[str | None, int]:
    """Return a message and the exit status; the message is None if the user cannot act on it."""
    message = str(error)
    if isinstance(error, BadInputError):
        return message, EXIT_BAD_INPUT
    from ...kvcache.errors import RadixKVError  # here, because --help must not load numpy
    from ..errors import GroupError, NodesFailedError

    if isinstance(error, NodesFailedError | GroupError):
        return message, EXIT_FAILED
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}", EXIT_BAD_INPUT
    if isinstance(error, MemoryError):
        return f"not enough memory on this machine: {error}", EXIT_BAD_INPUT
    if type(error).__name__ == "JaxRuntimeError" and "RESOURCE_EXHAUSTED" in message:
        return f"not enough memory on the device: {message}", EXIT_BAD_INPUT
    if isinstance(error, RuntimeError) and (place := message.find(_NO_DEVICE)) >= 0:
        return message[place:], EXIT_BAD_INPUT  # another process may have said it in a traceback
    return message if isinstance(error, RadixKVError | OSError) else None, EXIT_BAD_INPUT


def _fail(message: str, status: int) -> int:
    say(" ".join(message.split()))
    return status

"""Commands whose model lies on the devices of several processes: one leads, the others follow."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final

from ..errors import BadInputError
from ..exit_status import EXIT_FAILED, report

if TYPE_CHECKING:
    from ...nodes.process_group import ProcessGroup

_TIMEOUT_S: Final = 600.0
"""Time in which machines of unequal speed must load the model and compile its programs."""


def leave_to_process_0(arguments: argparse.Namespace) -> None:
    """Clear the options of what only process 0 does: results, storage, and what is published."""
    if arguments.process_id:
        for name in ("json", "storage", "storage_max_bytes", "kv_events", "kv_events_replay"):
            setattr(arguments, name, None)


@contextmanager
def group_of_options(arguments: argparse.Namespace) -> Iterator[ProcessGroup | None]:
    """Connect the processes that the options name, before JAX knows its devices; None for one.

    After an error in the block, this process ends at once, with the message and the status that
    `main` gives the error: the shutdown of JAX would wait for a process that is lost.

    Raises:
        BadInputError: if the address cannot be used, or a library is not installed.
        SecretError: if the secret is too short.
    """
    if arguments.coordinator is None:
        yield None
        return
    if find_spec("zmq") is None:
        raise BadInputError("--coordinator needs the library 'zmq': pip install 'radixkv[nodes]'")
    import jax

    from ...nodes.channel import ChannelAddressError, load_secret  # here, because they need it
    from ...nodes.channel.address import check_target, host_of
    from ...nodes.channel.secret import ENVIRONMENT
    from ...nodes.process_group import ProcessGroup, init_processes

    coordinator, secret = arguments.coordinator, load_secret()
    try:
        check_target(coordinator)
    except ChannelAddressError as error:
        raise BadInputError(f"--coordinator: {error}") from None
    if secret is None and not host_of(coordinator).is_loopback:
        raise BadInputError(
            f"--coordinator {coordinator} can be reached from other machines, so it needs a "
            f"secret: set {ENVIRONMENT}, the same for all processes"
        )
    try:
        _keep_stdout()
        before = signal.getsignal(signal.SIGTERM)
        init_processes(coordinator, arguments.num_processes, arguments.process_id)
        signal.signal(signal.SIGTERM, before)  # JAX has one that ends nothing
        bind = f"{coordinator.rpartition(':')[0]}:0"
        with ProcessGroup(bind, secret=secret, timeout_s=_TIMEOUT_S) as group:
            yield group
        jax.distributed.shutdown()  # type: ignore[no-untyped-call]  # JAX's
    except BaseException as error:
        status = report(error)
        if status is None:  # a bug in radixkv
            traceback.print_exc()
            status = EXIT_FAILED
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        os._exit(status)


def _keep_stdout() -> None:
    """Let libraries such as Gloo and NCCL, which print on stdout, print on stderr."""
    if sys.stdout is not None:
        sys.stdout.flush()
        own = os.dup(sys.stdout.fileno())
        os.dup2(2 if sys.stderr is not None else os.open(os.devnull, os.O_WRONLY), 1)
        sys.stdout = os.fdopen(own, "w", encoding=sys.stdout.encoding)

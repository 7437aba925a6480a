"""`radixkv events check`: apply the KV events of a server, and report what cannot be true."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..terminal.console import table
from ..terminal.interrupts import remember_interrupts
from .errors import BadInputError
from .exit_status import say
from .shared.kv_events import check_libraries
from .shared.output import check_destination, emit

if TYPE_CHECKING:
    from ..events.check import StreamChecker
    from ..events.subscriber import EventSubscriber

_POLL_S = 0.2


def run(arguments: argparse.Namespace) -> int:
    """Check until the time is over, or until an interrupt; 1 if there was a finding.

    Raises:
        BadInputError: for an address that cannot be used, or from which nothing came.
    """
    check_libraries("events")
    check_destination(arguments.json)
    from ..events import EventSubscriber  # here, because it needs the extra
    from ..events.check import OF_RESTARTS, StreamChecker

    with (
        EventSubscriber(arguments.endpoint, arguments.replay, arguments.topic) as subscriber,
        remember_interrupts() as is_interrupted,
    ):
        checker = StreamChecker(subscriber.replay)
        try:
            say(f"checking {arguments.endpoint}")
            _check(arguments, subscriber, checker, is_interrupted)
        except KeyboardInterrupt:  # the second
            pass
        except TimeoutError as error:
            raise BadInputError(str(error)) from None
    document = describe(checker)
    rows = [(name, f"{number:,}") for name, number in document["counts"].items()]
    lines: list[Any] = [table((), rows)]
    for name, finding in document["findings"].items():
        lines += ["", f"{name}: {finding['number']:,}", *(f"  {why}" for why in finding["first"])]
    if not OF_RESTARTS.isdisjoint(checker.findings):
        lines += ["", "A restart of the publisher that cannot be seen breaks K3, K4 and K5, too."]
    if checker.num_batches and not checker.findings:
        lines += ["", "No finding."]
    if checker.joined_late:
        lines += ["", "Not every batch is known: unknown blocks are not reported."]
    emit(arguments.json, document, *lines)
    if not checker.num_batches and not checker.findings:
        raise BadInputError(f"no batch came from {arguments.endpoint}, so nothing was checked")
    return int(bool(checker.findings))


def _check(
    arguments: argparse.Namespace,
    subscriber: EventSubscriber,
    checker: StreamChecker,
    is_interrupted: Callable[[], bool],
) -> None:
    from ..events import EventFormatError

    end = None if arguments.seconds is None else time.monotonic() + arguments.seconds
    checker.begin()
    while arguments.batches is None or checker.num_batches < arguments.batches:
        wait_s = _POLL_S if end is None else min(_POLL_S, end - time.monotonic())
        if wait_s < 0 or is_interrupted():
            return
        try:
            message = subscriber.receive(wait_s)
        except EventFormatError as error:
            checker.add_malformed(error)
            continue
        if message is not None:
            checker.receive(message)


def describe(checker: StreamChecker) -> dict[str, Any]:
    """Return what was seen, for JSON."""
    blocks = {f"{medium} blocks": number for medium, number in checker.num_blocks().items()}
    return {
        "counts": {
            "batches": checker.num_batches,
            "batches by replay": checker.num_replayed,
            "restarts": checker.num_restarts,
            **dict(sorted(checker.num_events.items())),
            **blocks,
        },
        "joined_late": checker.joined_late,
        "findings": {
            name: {"number": number, "first": checker.examples[name]}
            for name, number in sorted(checker.findings.items())
        },
    }

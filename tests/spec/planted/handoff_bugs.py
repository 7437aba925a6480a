"""The planted bugs of the hand-off by which the kill table proves its rules, one for each rule."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Final

from radixkv.spec.harness.handoff.world import HandoffSubject

from ...scheduler.handoff.bites import BITES
from ...scheduler.handoff.bugs import BUGS
from ...scheduler.handoff.bugs import Bug as HandoffBug
from ...scheduler.handoff.gateway_bugs import GATEWAY_BUGS
from ...scheduler.handoff.planted import planted
from ...scheduler.handoff.scheduler_bugs import SCHEDULER_BUGS
from ...scheduler.handoff.worlds import subject_of
from .plant import Bug

_ALL: Final = {bug.name: bug for bug in (*BUGS, *GATEWAY_BUGS, *SCHEDULER_BUGS)}
_NAMES: Final = dict.fromkeys(
    (
        *BITES.values(),
        "D publishes nothing",
    )
)

HANDOFF_BUGS: Final = tuple(
    Bug(bug.name, bug.file, bug.edits, bug.seen_in, world="handoff")
    for bug in map(_ALL.__getitem__, _NAMES)
)
"""The tests of the hand-off plant the others, which scenarios find."""

_open: Final = ExitStack()


def handoff_with(bug: Bug) -> HandoffSubject:
    """Return the hand-off with a bug as a test subject; it is valid until the next call."""
    _open.close()
    package = _open.enter_context(planted(HandoffBug(bug.name, bug.file, bug.edits)))
    return subject_of(package)

"""All bugs to plant into `scheduler/`."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from .input_bugs import SCHEDULER_INPUT_BUGS
from .plant import Bug
from .sample_bugs import SAMPLE_BUGS
from .scheduler_ahead_bugs import AHEAD_BUGS
from .scheduler_end_bugs import COUNT_BUGS, END_BUGS, PREEMPTION_BUGS, RESERVATION_BUGS
from .scheduler_step_bugs import ADMISSION_BUGS, STEP_BUGS

SCHEDULER_BUGS: Final[tuple[Bug, ...]] = tuple(
    replace(bug, world="scheduler")
    for bug in (
        *STEP_BUGS,
        *AHEAD_BUGS,
        *ADMISSION_BUGS,
        *PREEMPTION_BUGS,
        *END_BUGS,
        *RESERVATION_BUGS,
        *COUNT_BUGS,
        *SCHEDULER_INPUT_BUGS,
        *SAMPLE_BUGS,
    )
)

"""Bugs to plant into the scheduler: all of them."""

from __future__ import annotations

from .scheduler_end_bugs import COUNT_BUGS, END_BUGS, PREEMPTION_BUGS, RESERVATION_BUGS
from .scheduler_step_bugs import ADMISSION_BUGS, STEP_BUGS

SCHEDULER_BUGS = (
    *STEP_BUGS,
    *ADMISSION_BUGS,
    *PREEMPTION_BUGS,
    *END_BUGS,
    *RESERVATION_BUGS,
    *COUNT_BUGS,
)

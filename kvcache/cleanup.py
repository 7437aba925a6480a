"""Giving back what was taken, when the giving itself may raise."""

from __future__ import annotations

import sys
from collections.abc import Callable


def give_back(*steps: Callable[[], object]) -> None:
    """Take every step, in order, whatever the others raise.

    While an error is handled, that one is to be reported: an error of a step becomes a note on it.
    An interrupt is raised all the same, once the last step was taken. A step must not leave
    anything to do if it raises.

    Raises:
        BaseException: the first error of a step, if no error is being handled.
    """
    handled = sys.exception()
    failed: BaseException | None = None
    for step in steps:
        try:
            step()
        except BaseException as error:
            is_interrupt = not isinstance(error, Exception)
            if handled is not None and not is_interrupt:
                handled.add_note(f"then {type(error).__name__}, when something was given back")
            elif failed is None or (is_interrupt and isinstance(failed, Exception)):
                failed = error
    if failed is not None:
        raise failed

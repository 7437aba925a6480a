"""Gives a process a wall clock of its own, hours off and with jumps; see `test_nodes`."""

from __future__ import annotations

import os
import random
import time
from typing import Final

_DRAW: Final = random.Random(os.getpid())
_TRUE_TIME_NS: Final = time.time_ns
_OFFSETS_NS: Final = [_DRAW.randint(-(10**14), 10**14) for _ in range(5)]  # +-28 hours


def _time_ns() -> int:
    return _TRUE_TIME_NS() + _DRAW.choice(_OFFSETS_NS)


time.time_ns = _time_ns
time.time = lambda: _time_ns() / 1e9

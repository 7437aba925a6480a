"""Simulation of the hand-off protocol under faults: loss, duplication, crashes and restarts.

Tests and the documentation use it; nothing else in the package does.
"""

from __future__ import annotations

from .drain import check_managers, drain, drain_and_check, fair_round, is_drained
from .invariants import INVARIANTS, Invariant, SimulationError
from .nodes import SimulationConfig
from .programs import Failure, replay, run, run_random, to_json
from .simulation import Op, Simulation

__all__ = [
    "INVARIANTS",
    "Failure",
    "Invariant",
    "Op",
    "Simulation",
    "SimulationConfig",
    "SimulationError",
    "check_managers",
    "drain",
    "drain_and_check",
    "fair_round",
    "is_drained",
    "replay",
    "run",
    "run_random",
    "to_json",
]

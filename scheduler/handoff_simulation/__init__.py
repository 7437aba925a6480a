"""The simulation of the hand-off under every fault. Tests run it; nothing that ships uses it."""

from __future__ import annotations

from .drain import (
    check,
    fair_round,
    finish,
    is_done,
    settle,
)
from .invariants import (
    INVARIANTS,
    Invariant,
    SimulationError,
)
from .nodes import SimulationConfig
from .operations import Op, Simulation
from .programs import (
    Failure,
    replay,
    run,
    run_random,
    to_json,
)

__all__ = [
    "INVARIANTS",
    "Failure",
    "Invariant",
    "Op",
    "Simulation",
    "SimulationConfig",
    "SimulationError",
    "check",
    "fair_round",
    "finish",
    "is_done",
    "replay",
    "run",
    "run_random",
    "settle",
    "to_json",
]

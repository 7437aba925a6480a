"""Preemption: what happens to the KV of a request that loses its blocks."""

from __future__ import annotations

from typing import Final, Literal, TypeAlias, get_args

PreemptMode: TypeAlias = Literal["recompute", "host", "storage"]
"""What happens to the KV of a preempted request: it is dropped, or parked in a tier."""

PREEMPT_MODES: Final = get_args(PreemptMode)

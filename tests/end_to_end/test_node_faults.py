"""Faults of the peer process at each message of the protocol: this node ends the attempt."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from radixkv.scheduler.handoff.gateway_messages import Finished, Started

from .node_faults import MOMENTS, TRANSFER_S, pair

LATE_S = 60.0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("role", "transport"), [("prefill", "jax"), ("decode", "jax"), ("decode", "nixl")]
)
def test_a_lost_peer_costs_only_an_attempt(
    model_dir: Callable[[str], Path], role: str, transport: str
) -> None:
    with pair(model_dir("qwen3"), role, transport) as both:
        for moment in MOMENTS[role]:
            fault = both.lose_peer(moment, signal.SIGSTOP)
            # Nothing waits longer than a transfer may take, which says little of a busy machine:
            # for how long it is see `python -m tests.end_to_end.node_faults`.
            assert fault.seconds < TRANSFER_S + LATE_S, fault
        # An end is seen as silence is.
        both.lose_peer(MOMENTS[role][2], signal.SIGKILL)
        for kind in (Started, Finished) if role == "decode" else ():
            both.lose_report(kind)

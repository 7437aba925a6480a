"""Fixtures and traces for the replay tests."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import strategies as st

from radixkv.scheduler.replay.engine_run.real_run import RealRunConfig
from radixkv.scheduler.replay.simulation import cluster, simulated_node, single_node
from radixkv.scheduler.replay.trace import Trace, TraceRequest, bundled_trace_path, read_trace

# The smallest run with preemption and eviction: each engine compiles three programs.
SMALL_REAL_RUN = RealRunConfig(
    max_requests=8, max_model_len=160, tight_num_blocks=12, token_budget=16, max_running=2
)


@pytest.fixture(scope="session")
def bundled_trace() -> Trace:
    return read_trace(bundled_trace_path())


@pytest.fixture
def write_lines(tmp_path: Path) -> Callable[..., Path]:
    """Write lines (objects become JSON, bytes stay) to a file and return its path."""

    def write(*lines: object) -> Path:
        path = tmp_path / "trace.jsonl"
        encoded = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
        path.write_bytes(b"".join(line + b"\n" for line in encoded))
        return path

    return write


def make_trace(*paths: Sequence[int], output_length: int = 1, gap_ms: float = 0.0) -> Trace:
    """A trace of whole 512-token blocks."""
    return Trace(
        tuple(
            TraceRequest(index * gap_ms, 512 * len(path), output_length, tuple(path))
            for index, path in enumerate(paths)
        )
    )


def _trace_of(arrivals: list[tuple[list[int], int, float]]) -> Trace:
    """Make a trace of hash ids, output lengths and the milliseconds before each request."""
    gaps = [gap for _, _, gap in arrivals]
    return Trace(
        tuple(
            TraceRequest(sum(gaps[: index + 1]), 512 * len(path) - 100, num_outputs, tuple(path))
            for index, (path, num_outputs, _) in enumerate(arrivals)
        )
    )


SMALL_TRACES = st.lists(
    st.tuples(
        st.lists(st.integers(0, 2), min_size=1, max_size=4),
        st.sampled_from([1, 30, 200]),
        st.sampled_from([0.0, 1.0, 500.0, 4_000.0]),
    ),
    min_size=1,
    max_size=16,
).map(_trace_of)
"""Prompts over a small tree, with outputs, at times that make them queue or wait."""


@pytest.fixture
def ticking_clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the clocks of the simulations: a reading takes 1 s of CPU, or 1,000 s elapsed."""
    cpu, elapsed = count(), count(step=1_000)
    clocks = SimpleNamespace(
        thread_time=lambda: float(next(cpu)), perf_counter=lambda: float(next(elapsed))
    )
    for module in (simulated_node, single_node, cluster):
        monkeypatch.setattr(module, "time", clocks)

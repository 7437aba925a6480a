"""The step benchmark runs an engine's host path beside a device with a clock of its own."""

from __future__ import annotations

import time

import numpy as np
import pytest

from radixkv.scheduler.bench import step
from radixkv.scheduler.bench.step import BLOCK_SIZE, PHASES, bench_step
from radixkv.scheduler.bench.workload import WorkloadError
from radixkv.scheduler.mixed import MixedScheduler

from .conftest import Clock

pytestmark = pytest.mark.usefixtures("no_collection")


@pytest.fixture(autouse=True)
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "NUM_STEPS", 3 * BLOCK_SIZE)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_bytes_do_not_depend_on_the_length_of_a_model(depth: int) -> None:
    short, long = (
        bench_step(rows=3, max_model_len=length, depth=depth, device_ms=0.0, prompt_tokens=5)
        for length in (200, 20_000)
    )
    # A token and five numbers for each of the three rows of the shape.
    assert short["bytes_per_step"] == long["bytes_per_step"] == 6 * 3 * 4
    assert set(short["host_us_per_step"]) == {"total", *PHASES}


def test_waiting_requests_stay_waiting() -> None:
    results = bench_step(rows=2, max_model_len=200, waiting=5, device_ms=0.0)
    assert (results["rows"], results["waiting"], results["steps"]) == (2, 5, 3 * BLOCK_SIZE)
    assert results["bytes_per_step"] == 6 * 2 * 4


def test_a_device_is_idle_from_the_end_of_a_step_to_the_next_launch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    device = step._StandInDevice(2.0)
    device.launch()  # until 2
    now = 1.0
    device.launch()  # until 4, because it waits for the first
    assert device.idle_s == 0.0
    now = 7.0
    device.launch()  # until 9
    assert device.idle_s == 3.0
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    for _ in range(3):
        device.wait()
    assert slept == [2.0]  # the first two are over


def test_idle_time_before_the_measurement_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    device = step._StandInDevice(2.0)
    assert device.begin() == 0.0
    device.launch()  # until 2
    now = 5.0
    assert device.begin() == 5.0
    now = 6.0
    device.launch()  # until 8
    assert device.idle_s == 1.0
    now = 7.0
    device.begin()
    now = 8.5
    device.launch()
    assert device.idle_s == 0.5


def test_requests_too_short_for_the_steps_are_refused() -> None:
    text = r"^max_model_len 58 is less than 5 prompt tokens and 54 new ones$"
    with pytest.raises(WorkloadError, match=text):
        bench_step(rows=1, max_model_len=58, prompt_tokens=5)
    bench_step(rows=1, max_model_len=59, prompt_tokens=5, device_ms=0.0)


@pytest.mark.parametrize("depth", [1, 3])
def test_each_phase_has_the_median_of_its_measured_steps(
    depth: int, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    lasted: dict[str, list[int]] = {}

    def takes(owner: object, function: str, phase: str, factor_ns: int) -> None:
        lasted[phase] = []

        def duration_ns(call: int) -> int:
            lasted[phase].append(factor_ns * (call + 1) ** 2)
            return lasted[phase][-1]

        clock.takes(owner, function, duration_ns)

    takes(MixedScheduler, "schedule", "schedule", 1009)
    takes(step, "pack", "pack", 2003)
    takes(step, "_step", "dispatch", 3001)
    takes(MixedScheduler, "update", "update", 5003)
    results = bench_step(rows=2, max_model_len=200, depth=depth, device_ms=0.0)
    # The steps before, which fill the queue, do not count; nor does what the clock costs.
    assert all(len(each) > step.NUM_STEPS for each in lasted.values())
    phases = {
        name: round(float(np.median(each[-step.NUM_STEPS :])) / 1000, 1)
        for name, each in lasted.items()
    }
    assert results["host_us_per_step"] == {
        "total": round(sum(phases.values()), 1),
        "read": 0.0,
        **phases,
    }
    sizes: dict[str, float] = {"rows": 2, "max_model_len": 200, "prompt_tokens": 64, "depth": depth}
    sizes |= {"device_ms": 0.0, "waiting": 0, "steps": step.NUM_STEPS}
    assert {name: results[name] for name in sizes} == sizes

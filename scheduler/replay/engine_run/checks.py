"""Checks of the real run: the passes through the engine, compared with each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..checks import Check
from .scaling import ScaledRequest


@dataclass(frozen=True, slots=True)
class PassResult:
    """Counts of one pass of the requests through an engine.

    Attributes:
        name: Name of the pass.
        num_blocks: Size of the pool.
        steps: Engine steps.
        prefill_tokens: Prompt tokens computed, including recomputation after preemption.
        hit_tokens: Prompt tokens that hit on the device.
        preemptions: Number of preemptions.
        evicted_blocks: Cached blocks evicted.
        compilations: Programs compiled after warm-up; each would stall a server.
        wall_s: Duration, without warm-up.
        host_hit_tokens: Prompt tokens that hit on the host.
        parked, resumed: Requests preempted with their KV saved, and readmitted with it.
        recomputed_tokens: Tokens computed again after a preemption.
        bytes_to_host, bytes_to_device: Bytes copied between device and host.
    """

    name: str
    num_blocks: int
    steps: int
    prefill_tokens: int
    hit_tokens: int
    preemptions: int
    evicted_blocks: int
    compilations: int
    wall_s: float
    host_hit_tokens: int = 0
    parked: int = 0
    resumed: int = 0
    recomputed_tokens: int = 0
    bytes_to_host: int = 0
    bytes_to_device: int = 0


@dataclass(frozen=True, slots=True)
class EnginePass:
    """A pass with its output tokens and its checks for leaked blocks."""

    result: PassResult
    outputs: list[list[int]]
    leaks: Sequence[Check]


def check_tokens(passes: Sequence[EnginePass], requests: Sequence[ScaledRequest]) -> Check:
    """Check that every pass has the tokens of the reference, as many as requested."""
    name = "identical tokens"
    reference = passes[0]
    for other in passes[1:]:
        for index, (wanted, got) in enumerate(zip(reference.outputs, other.outputs, strict=True)):
            if wanted != got:
                place = next(
                    (i for i, (a, b) in enumerate(zip(wanted, got, strict=False)) if a != b),
                    min(len(wanted), len(got)),
                )
                detail = f"{other.result.name}: request {index} differs at output token {place}"
                return Check(name, False, detail)
    for index, (request, output) in enumerate(zip(requests, reference.outputs, strict=True)):
        if len(output) != request.max_new_tokens:
            numbers = f"{len(output)} tokens of {request.max_new_tokens}"
            return Check(name, False, f"{reference.result.name}: request {index} has {numbers}")
    total = sum(map(len, reference.outputs))
    return Check(name, True, f"{total:,} output tokens, {len(passes)} times")


def check_exercised(runs: Sequence[PassResult]) -> Check:
    """Check that the tight pool preempted and evicted; otherwise equal tokens prove little."""
    off, on = runs[1:3]
    detail = (
        f"{off.preemptions} and {on.preemptions} preemptions, {on.evicted_blocks} blocks evicted"
    )
    exercised = off.preemptions > 0 and on.preemptions > 0 and on.evicted_blocks > 0
    if not exercised:
        detail = f"not exercised: {detail}"
    return Check("the tight pool preempts and evicts", True, detail, skipped=not exercised)


def check_parked(runs: Sequence[PassResult]) -> Check:
    """Check that every parked request resumed with its KV, and nothing was recomputed."""
    tiered = runs[3]
    detail = (
        f"{tiered.parked} parked, {tiered.resumed} resumed, {tiered.host_hit_tokens:,} host hits; "
        f"{tiered.recomputed_tokens:,} tokens recomputed"
    )
    exercised = tiered.parked > 0
    ok = tiered.parked == tiered.resumed and tiered.recomputed_tokens == 0
    if not exercised:
        detail = f"not exercised: {detail}"
    name = "preempted requests keep their KV on the host"
    return Check(name, ok, detail, skipped=ok and not exercised)


def check_hits_save_prefill(runs: Sequence[PassResult]) -> Check:
    """Check that hits reduced the number of prefill tokens computed."""
    off, on = runs[1:3]
    saved = off.prefill_tokens - on.prefill_tokens
    detail = f"{off.prefill_tokens:,} - {on.prefill_tokens:,} = {saved:,} tokens"
    return Check("hits reduce the prefill tokens computed", saved > 0 or not on.hit_tokens, detail)


def check_compilations(runs: Sequence[PassResult]) -> Check:
    """Check that every program was compiled before the first step."""
    detail = ", ".join(f"{run.name} {run.compilations}" for run in runs)
    return Check("no compilation after warm-up", not any(run.compilations for run in runs), detail)


def check_no_leak(passes: Sequence[EnginePass]) -> Check:
    """Check that no pass leaked a block, on the device or on the host."""
    for one in passes:
        for leak in one.leaks:
            if not leak.ok:
                return Check(leak.name, False, f"{one.result.name}: {leak.detail}")
    last = passes[-1]
    return Check(last.leaks[0].name, True, f"{last.result.name}: {last.leaks[0].detail}")

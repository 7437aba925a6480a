"""Run of the real engine on a tiny model: tokens must not depend on caches or preemption.

Four passes over the same requests, scaled down (see `scaling`)::

    reference   no prefix cache, room for all     the expected tokens
    cache off   no prefix cache, a tight pool     preemption and recomputation
    cache on    prefix cache,    a tight pool     also sharing and eviction
    host tier   the same, and a host tier         preemption that parks, and host hits

The pool is made as tight as necessary to cause preemption and eviction, at the limit so small that
it holds only the longest request: requests with short outputs hardly grow. The size is found by the
scheduler alone, without the model, because an engine takes seconds to compile.
"""

from __future__ import annotations

import itertools
import math
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass

from ....kvcache.manager import CacheManager
from ....kvcache.tiers.host_tier import HostConfig
from ....kvcache.tiers.operations import OpKind
from ...batching.preemption import PreemptMode
from ...engine import Engine, EngineStats, programs
from ...mixed import MixedScheduler
from ...models import Model, load_model, make_tiny_checkpoint
from ...request import Request
from ...step_plan import SchedulerStats
from ...terminal.log_lines import listen
from ..checks import Check, check_all_blocks_returned, check_all_host_blocks_returned
from ..progress import Progress, no_progress
from ..simulation.single_node import FIRST_OUTPUT_TOKEN
from ..simulation.tier_links import TierLinks
from ..trace import Trace
from .checks import (
    EnginePass,
    PassResult,
    check_compilations,
    check_exercised,
    check_hits_save_prefill,
    check_no_leak,
    check_parked,
    check_tokens,
)
from .scaling import BLOCK_SIZE, ScaledRequest, scale_request, select_requests


@dataclass(frozen=True, slots=True)
class RealRunConfig:
    """Number of requests and sizes of the engines.

    Attributes:
        max_requests: Number of requests to take from the trace.
        max_model_len: Longest prompt plus output in scaled tokens; longer requests are skipped.
        tight_num_blocks: Size of the tight pool, or the first size to try; raised if the longest
            request needs more.
        host_num_blocks: Size of the host tier, with room for every parked request.
        token_budget, max_running: As in the engine. Each power of two up to them is a program to
            compile, which takes longer than the run.
        seed: Seed of the model's weights.
    """

    max_requests: int = 40
    max_model_len: int = 320
    tight_num_blocks: int = 48
    host_num_blocks: int = 512
    token_budget: int = 32
    max_running: int = 8
    seed: int = 0


@dataclass(frozen=True, slots=True)
class RealRun:
    """The passes and their checks; no passes if every request is too long."""

    requests: int
    prompt_tokens: int
    output_tokens: int
    runs: tuple[PassResult, ...]
    checks: tuple[Check, ...]


def run_real(
    trace: Trace, config: RealRunConfig | None = None, progress: Progress = no_progress
) -> RealRun:
    """Run a slice of a trace through the engine in four ways and compare the tokens."""
    config = config or RealRunConfig()
    chosen = select_requests(trace, config.max_requests, config.max_model_len)
    if not chosen:
        reason = f"no request is shorter than {config.max_model_len:,} tokens when scaled down"
        return RealRun(0, 0, 0, (), (Check("identical tokens", True, reason, skipped=True),))
    with tempfile.TemporaryDirectory() as directory:
        make_tiny_checkpoint(directory, seed=config.seed)
        model = load_model(directory)
    requests = [scale_request(request, model.config.vocab_size) for request in chosen]
    num_blocks = [_num_blocks(request) for request in requests]
    roomy = max(config.tight_num_blocks, sum(num_blocks))
    tight = _find_tight_pool(requests, config, max(num_blocks))
    variants = (_Variant("reference", roomy, prefix_cache=False), *_tight_variants(config, tight))
    passes = [_run_engine(model, requests, config, variant, progress) for variant in variants]
    runs = tuple(one.result for one in passes)
    return RealRun(
        requests=len(requests),
        prompt_tokens=sum(len(request.prompt) for request in requests),
        output_tokens=sum(len(output) for output in passes[0].outputs),
        runs=runs,
        checks=(
            check_tokens(passes, requests),
            check_exercised(runs),
            check_parked(runs),
            check_hits_save_prefill(runs),
            check_compilations(runs),
            check_no_leak(passes),
        ),
    )


def _find_tight_pool(requests: Sequence[ScaledRequest], config: RealRunConfig, least: int) -> int:
    """Return the largest pool that makes the scheduler preempt, evict and park, or least."""
    num_blocks = max(config.tight_num_blocks, least)
    while num_blocks > least:
        (off, _), (on, evicted), (tiered, _) = (
            _rehearse(requests, config, variant) for variant in _tight_variants(config, num_blocks)
        )
        if off.preemptions and on.preemptions and evicted and tiered.parked:
            return num_blocks
        num_blocks = num_blocks * 3 // 4
    return least


def _num_blocks(request: ScaledRequest) -> int:
    return -(-(len(request.prompt) + request.max_new_tokens) // BLOCK_SIZE)


# ------------------------------------------------------------------------------------- one pass


@dataclass(frozen=True, slots=True)
class _Variant:
    """Settings that distinguish one pass from the others."""

    name: str
    num_blocks: int
    prefix_cache: bool = True
    host: HostConfig | None = None

    @property
    def preempt(self) -> PreemptMode:
        """Preemption mode: park requests where there is a host tier."""
        return "recompute" if self.host is None else "host"


def _tight_variants(config: RealRunConfig, num_blocks: int) -> tuple[_Variant, ...]:
    """Return the passes to run in a tight pool."""
    return (
        _Variant("cache off", num_blocks, prefix_cache=False),
        _Variant("cache on", num_blocks),
        _Variant("host tier", num_blocks, host=HostConfig(config.host_num_blocks)),
    )


def _rehearse(
    requests: Sequence[ScaledRequest], config: RealRunConfig, variant: _Variant
) -> tuple[SchedulerStats, int]:
    """Run the scheduler alone, with made-up tokens and instant copies; also count evictions."""
    manager = CacheManager(variant.num_blocks, BLOCK_SIZE, host=variant.host)
    scheduler = MixedScheduler(
        manager,
        token_budget=config.token_budget,
        max_running=config.max_running,
        prefix_cache=variant.prefix_cache,
        reserve_tokens=0,
        preempt=variant.preempt,
    )
    link = None if manager.tiers is None else TierLinks(manager.tiers, 1, math.inf)
    for index, request in enumerate(requests):
        scheduler.add(Request(str(index), request.prompt, request.max_new_tokens))
    new_tokens = itertools.count(FIRST_OUTPUT_TOKEN)
    while scheduler.has_work:
        plan = scheduler.schedule()
        if link is not None:
            link.dispatch(0.0)
            link.deliver(0.0)
        if plan.num_chunks:
            scheduler.update(plan, list(itertools.islice(new_tokens, plan.num_chunks)))
    return scheduler.stats(), manager.stats().evicted_blocks


def _run_engine(
    model: Model,
    requests: Sequence[ScaledRequest],
    config: RealRunConfig,
    variant: _Variant,
    progress: Progress,
) -> EnginePass:
    """Run all requests, submitted at once, through a new engine."""
    name = variant.name
    engine = _start_engine(model, config, variant, progress)
    progress(f"real run, {name}", 0, len(requests))
    for index, request in enumerate(requests):
        engine.add_request(Request(str(index), request.prompt, request.max_new_tokens))
    started = time.perf_counter()
    outputs: list[list[int]] = [[] for _ in requests]
    finished = 0
    while engine.has_work:
        for done in engine.step():
            outputs[int(done.request_id)] = list(done.output_tokens)
            finished += 1
        progress(f"real run, {name}", finished, len(requests))
    wall_s = time.perf_counter() - started
    engine.close()
    stats = engine.stats()
    leaks = [check_all_blocks_returned(engine.manager)]
    if stats.cache.tiers is not None:
        leaks.append(check_all_host_blocks_returned(stats.cache.tiers))
    return EnginePass(_summarize(variant, stats, wall_s), outputs, leaks)


def _start_engine(
    model: Model, config: RealRunConfig, variant: _Variant, progress: Progress
) -> Engine:
    """Make an engine. Each program that it compiles is a unit of the progress."""
    stage = f"real run, {variant.name}: compiling"
    progress(stage, 0, 1)
    with listen(
        programs.__name__,  # its messages are "compiling 3 of 7 programs"
        lambda record: progress(stage, *map(int, record.args or ())),  # type: ignore[arg-type]
    ):
        engine = Engine(
            model,
            block_size=BLOCK_SIZE,
            num_blocks=variant.num_blocks,
            token_budget=config.token_budget,
            max_running=config.max_running,
            max_model_len=config.max_model_len,
            prefix_cache=variant.prefix_cache,
            reserve_tokens=0,  # no room for growth: causes the most preemptions
            preempt=variant.preempt,
            host=variant.host,
        )
    progress(stage, 1, 1)
    return engine


def _summarize(variant: _Variant, stats: EngineStats, wall_s: float) -> PassResult:
    scheduler = stats.scheduler
    copied_bytes = {} if stats.copies is None else stats.copies.copied_bytes
    return PassResult(
        name=variant.name,
        num_blocks=variant.num_blocks,
        steps=stats.steps,
        prefill_tokens=stats.prefill_tokens_computed,
        hit_tokens=scheduler.hit_tokens,
        preemptions=scheduler.preemptions,
        evicted_blocks=stats.cache.evicted_blocks,
        compilations=stats.compilations_after_warm_up,
        wall_s=wall_s,
        host_hit_tokens=scheduler.host_hit_tokens,
        parked=scheduler.parked,
        resumed=scheduler.resumed_parked,
        recomputed_tokens=scheduler.recomputed_tokens,
        bytes_to_host=copied_bytes.get(OpKind.DEVICE_TO_HOST.value, 0),
        bytes_to_device=copied_bytes.get(OpKind.HOST_TO_DEVICE.value, 0),
    )

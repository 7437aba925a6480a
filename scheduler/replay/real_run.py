"""A scaled slice of the trace through the real engine and a tiny model: the tokens must not vary.

Prompts are divided by 32, so that 512 tokens of the trace are one block of 16, and the tokens of a
block are a hash of its id: requests share here exactly the blocks they share in the trace. Outputs
are divided by 8 only, or they would be too short to outgrow their blocks. Four runs of the same
requests::

    reference   no prefix cache, room for all     what the tokens should be
    cache off   no prefix cache, a tight pool     preemption and recomputation
    cache on    prefix cache,    a tight pool     also sharing and eviction
    host tier   the same, and a host tier         preemption that writes out, and host hits

If nothing was preempted or evicted, the last three are run again in a smaller pool, down to one
that holds the longest request alone: requests with short outputs hardly outgrow what they begin
with.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from ...kvcache.host_tier import HostConfig
from ...kvcache.operations import OpKind
from ..engine import Engine
from ..engine_stats import EngineStats
from ..models import Model, load_model, make_tiny_checkpoint
from ..request import Request
from .checks import Check
from .ledger import check_all_blocks_returned, check_all_host_blocks_returned
from .progress import Progress, no_progress
from .real_checks import (
    EnginePass,
    EngineRun,
    ScaledRequest,
    check_compilations,
    check_exercised,
    check_no_leak,
    check_parked,
    check_saved,
    check_tokens,
)
from .trace import TOKENS_PER_HASH_ID, Trace, TraceRequest

PROMPT_SCALE = 32
OUTPUT_SCALE = 8
BLOCK_SIZE = TOKENS_PER_HASH_ID // PROMPT_SCALE

Words: TypeAlias = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class RealRunConfig:
    """How many requests, and how tight the pool.

    Attributes:
        max_requests: requests taken from the trace.
        max_model_len: longest prompt and output, in scaled tokens; longer requests are left out.
        tight_num_blocks: the small pool, or the first of several; it holds any one request.
        host_num_blocks: of the host tier under it, with room for all that is written out.
        token_budget, max_running: of the engine; each power of two up to them is a program to
            compile, which takes longer than the run.
        seed: of the model's weights.
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
    """Four passes, and whether they agree."""

    requests: int
    prompt_tokens: int
    output_tokens: int
    runs: tuple[EngineRun, ...]
    checks: tuple[Check, ...]


def run_real(
    trace: Trace, config: RealRunConfig | None = None, progress: Progress = no_progress
) -> RealRun:
    """Run a slice of a trace through the engine, without and with the prefix cache, and compare."""
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
    most = max(config.tight_num_blocks, sum(num_blocks))
    reference = _run_engine(
        model, requests, config, _SetUp("reference", most, prefix_cache=False), progress
    )
    for tight in _pools(config.tight_num_blocks, max(num_blocks)):
        set_ups = (
            _SetUp("cache off", tight, prefix_cache=False),
            _SetUp("cache on", tight),
            _SetUp("host tier", tight, host=HostConfig(config.host_num_blocks)),
        )
        tried = [_run_engine(model, requests, config, set_up, progress) for set_up in set_ups]
        passes = [reference, *tried]
        runs = tuple(one.run for one in passes)
        if not (check_exercised(runs).skipped or check_parked(runs).skipped):
            break
    return RealRun(
        requests=len(requests),
        prompt_tokens=sum(len(request.prompt) for request in requests),
        output_tokens=sum(len(output) for output in passes[0].outputs),
        runs=runs,
        checks=(
            check_tokens(passes, requests),
            check_exercised(runs),
            check_parked(runs),
            check_saved(runs),
            check_compilations(runs),
            check_no_leak(passes),
        ),
    )


def _pools(first: int, least: int) -> Iterator[int]:
    """Yield sizes of pools, each three quarters of the one before, down to least."""
    num_blocks = max(first, least)
    while num_blocks > least:
        yield num_blocks
        num_blocks = num_blocks * 3 // 4
    yield least


def _num_blocks(request: ScaledRequest) -> int:
    return -(-(len(request.prompt) + request.max_new_tokens) // BLOCK_SIZE)


def select_requests(trace: Trace, max_requests: int, max_model_len: int) -> list[TraceRequest]:
    """Choose requests that fit the model, in file order: conversations of several turns first.

    A conversation is told by its first two blocks (in Mooncake's conversation trace the first is
    the same for all). Consecutive requests would share little else: turns are minutes apart.
    """
    fitting = [
        request for request in trace.requests if sum(_scaled_lengths(request)) <= max_model_len
    ]
    turns: dict[tuple[int, ...], list[int]] = {}
    for index, request in enumerate(fitting):
        turns.setdefault(request.hash_ids[:2], []).append(index)
    singles = [key for key, indices in turns.items() if len(key) < 2 or len(indices) == 1]
    for key in singles:  # to the end of the order
        turns[key] = turns.pop(key)
    chosen = [index for indices in turns.values() for index in indices][:max_requests]
    return [fitting[index] for index in sorted(chosen)]


def scale_request(request: TraceRequest, vocab_size: int) -> ScaledRequest:
    """Scale a request down. Token i of a block is a hash of (hash id, i), below vocab_size."""
    ids = np.asarray(request.hash_ids, dtype=np.int64)
    words = (ids[:, None] * BLOCK_SIZE + np.arange(BLOCK_SIZE)).astype(np.uint64)
    prompt = (_mix(words) % np.uint64(vocab_size)).astype(np.int32).reshape(-1)
    num_prompt, num_outputs = _scaled_lengths(request)
    return ScaledRequest(prompt[:num_prompt], num_outputs)


def _scaled_lengths(request: TraceRequest) -> tuple[int, int]:
    return -(-request.input_length // PROMPT_SCALE), -(-request.output_length // OUTPUT_SCALE)


def _mix(words: Words) -> Words:
    """The finalizer of SplitMix64 (Steele, Lea and Flood, 2014): neighbours become unrelated."""
    words = words + np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


# ------------------------------------------------------------------------------------- one pass


@dataclass(frozen=True, slots=True)
class _SetUp:
    """What distinguishes a pass."""

    name: str
    num_blocks: int
    prefix_cache: bool = True
    host: HostConfig | None = None


def _run_engine(
    model: Model,
    requests: Sequence[ScaledRequest],
    config: RealRunConfig,
    set_up: _SetUp,
    progress: Progress,
) -> EnginePass:
    """Run all requests, added at once, through a new engine."""
    name = set_up.name
    progress(f"real run, {name}", 0, len(requests))
    engine = Engine(
        model,
        block_size=BLOCK_SIZE,
        num_blocks=set_up.num_blocks,
        token_budget=config.token_budget,
        max_running=config.max_running,
        max_model_len=config.max_model_len,
        prefix_cache=set_up.prefix_cache,
        reserve_tokens=0,  # no room kept for growth: the surest way to preemptions
        preempt="recompute" if set_up.host is None else "host",
        host=set_up.host,
    )
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
    return EnginePass(_summarize(set_up, stats, wall_s), outputs, leaks)


def _summarize(set_up: _SetUp, stats: EngineStats, wall_s: float) -> EngineRun:
    scheduler = stats.scheduler
    copied_bytes = {} if stats.copies is None else stats.copies.copied_bytes
    return EngineRun(
        name=set_up.name,
        num_blocks=set_up.num_blocks,
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

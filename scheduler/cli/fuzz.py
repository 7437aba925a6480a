"""`radixkv fuzz`: test a cache manager, a block pool or a scheduler against the specification."""

from __future__ import annotations

import argparse
import importlib.util
import json
import secrets
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...spec.adapters.cache import AdapterError
from ...spec.adapters.cache_target import DEPTHS
from ...spec.adapters.load_target import TargetError, target_beside
from ...spec.harness.engine import Finding, Subject
from ...spec.harness.findings.known import MET
from ...spec.harness.findings.program import to_program
from ...spec.harness.findings.script import to_script
from ...spec.harness.findings.shrink import shrink
from ...spec.harness.findings.svg import to_svg
from ...spec.harness.findings.trace_file import (
    TraceFile,
    TraceFileError,
    breaks_again,
    read_trace_file,
    replay_file,
)
from ...spec.harness.subjects import WHATS, SubjectOptions, What
from ..fuzz.campaign import (
    DEFAULT_TARGETS,
    CampaignConfig,
    CampaignResult,
    load_subject,
    run_campaign,
)
from .errors import BadInputError
from .shared.output import check_destination, emit

NUM_SEEDS = 1 << 31

EXIT_FOUND = 1
EXIT_INTERRUPTED = 130


def run(arguments: argparse.Namespace) -> int:
    """Run a campaign or replay a finding, and print the result."""
    for option in ("json", "svg", "script"):
        check_destination(getattr(arguments, option), f"--{option}")
    if arguments.engine == "hypothesis" and importlib.util.find_spec("hypothesis") is None:
        raise BadInputError("--engine hypothesis needs Hypothesis: pip install hypothesis")
    try:
        if arguments.replay is not None:
            return _replay(arguments)
        return _run_campaign(arguments)
    except (TargetError, AdapterError) as error:
        raise BadInputError(_with_origin(arguments, error)) from error
    except TraceFileError as error:
        raise BadInputError(str(error)) from error
    except BrokenProcessPool:
        raise BadInputError(
            "a process of --jobs ended unexpectedly; run without --jobs to see why"
        ) from None
    except (AttributeError, TypeError) as error:
        if not arguments.target:
            raise  # a bug of ours
        problem = f"the factory made no adapter of a {arguments.what or 'cache'}: {error}"
        raise BadInputError(_with_origin(arguments, problem)) from error


def _with_origin(arguments: argparse.Namespace, problem: object) -> str:
    """Prefix a problem with the source of the target: the option or the replayed file."""
    if arguments.target:
        return f"--target {arguments.target}: {problem}"
    return f"{arguments.replay}: {problem}" if arguments.replay else str(problem)


def _run_campaign(arguments: argparse.Namespace) -> int:
    what: What = arguments.what or "cache"
    _check_depth(arguments, what)
    config = CampaignConfig(
        what,
        arguments.target or DEFAULT_TARGETS[what],
        arguments.depth or ("api" if arguments.target else "full"),
        arguments.engine,
        secrets.randbelow(NUM_SEEDS) if arguments.seed is None else arguments.seed,
        _options(arguments),
    )
    # Here, to report errors at once.
    subject = load_subject(what, config.target, config.depth, config.options)
    seconds = 10.0 if arguments.seconds is None else arguments.seconds
    result = run_campaign(
        config,
        num_steps=arguments.steps,
        seconds=None if arguments.steps is not None or seconds == 0 else seconds,
        num_jobs=arguments.jobs,
    )
    rate = result.num_steps / result.wall_s if result.wall_s else 0
    summary = (
        f"{result.num_steps:,} steps, {result.num_cases:,} cases, {rate:,.0f} steps/s, "
        f"seed {config.seed}"
    )
    met = {
        name.removeprefix(MET): times
        for name, times in result.situations.items()
        if name.startswith(MET)
    }
    if config.options.known:
        told = ", ".join(f"{name} ({met[name]:,} times)" for name in sorted(met))
        summary += f"\nknown findings met: {told or 'none'}"
    if result.finding is not None:
        origin = (what, config.target, config.depth, config.options.known)
        return _emit_finding(arguments, subject, result.finding, origin, summary)
    _emit_success(arguments, result, summary)
    return EXIT_INTERRUPTED if result.interrupted else 0


def _check_depth(arguments: argparse.Namespace, what: What) -> None:
    if arguments.depth and what != "cache":
        raise BadInputError(f"--depth: only a cache has depths, not {what}")


def _replay(arguments: argparse.Namespace) -> int:
    drawing = {
        "--engine": arguments.engine != "random",
        "--seed": arguments.seed is not None,
        "--jobs": arguments.jobs != 1,
        "--block-sizes": arguments.block_sizes,
        "--pool-sizes": arguments.pool_sizes,
    }
    if given := [option for option, is_given in drawing.items() if is_given]:
        raise BadInputError(f"--replay draws nothing: leave out {', '.join(given)}")
    path = Path(arguments.replay)
    file = read_trace_file(path)
    what = _one_of(WHATS, arguments.what or file.what, f'{arguments.replay}: "what"')
    _check_depth(arguments, what)
    target = arguments.target or target_beside(file.target, path) or DEFAULT_TARGETS[what]
    depth = _one_of(DEPTHS, arguments.depth or file.depth, f'{arguments.replay}: "depth"')
    known = tuple(arguments.known) or file.known
    subject = load_subject(what, target, depth, replace(_options(arguments), known=known))
    try:
        finding = replay_file(subject, file)
    except TraceFileError as error:
        raise BadInputError(f"{arguments.replay}: {error}") from error
    num_steps = len((finding or file.finding).trace)
    summary = f"{num_steps:,} steps of {arguments.replay}"
    if finding is not None:
        origin = (what, target, depth, known)
        return _emit_finding(arguments, subject, finding, origin, summary, shrinks=False)
    _emit_success(arguments, CampaignResult(num_steps, 1), summary)
    return 0


def _options(arguments: argparse.Namespace) -> SubjectOptions:
    return SubjectOptions(
        tuple(arguments.block_sizes), tuple(arguments.pool_sizes), tuple(arguments.known)
    )


def _one_of(choices: tuple[Any, ...], value: str, place: str) -> Any:
    if value not in choices:
        raise BadInputError(f"{place} must be one of {', '.join(choices)}, got {value!r}")
    return value


def _emit_finding(
    arguments: argparse.Namespace,
    subject: Subject,
    finding: Finding,
    origin: tuple[Any, Any, Any, tuple[str, ...]],
    summary: str,
    *,
    shrinks: bool = True,
) -> int:
    """Print and write a finding, shrunk if it is reproducible."""
    is_reproducible = breaks_again(subject, finding)
    if shrinks and is_reproducible:
        finding = shrink(subject, finding)
    if arguments.svg is not None:
        Path(arguments.svg).write_text(to_svg(subject, finding), encoding="utf-8")
    parts = [to_program(finding, subject)]
    if arguments.script is not None:
        script = to_script(finding, subject)
        if script:
            Path(arguments.script).write_text(script, encoding="utf-8")
        else:
            parts.append(
                "\nno --script: the adapter makes nothing with radixkv.spec.recorded, no call has "
                "an answer to compare, or the finding is not found again"
            )
    if not is_reproducible:
        parts.append("\nA replay of this trace breaks no rule: the target is not deterministic.")
    parts.append(f"\nfailed: {finding.rule}: {summary}")
    emit(arguments.json, TraceFile(finding, *origin).text(), *parts)
    return EXIT_FOUND


def _emit_success(arguments: argparse.Namespace, result: CampaignResult, summary: str) -> None:
    """Print and write the statistics of a campaign that broke no rule."""
    statistics = {
        "steps": result.num_steps,
        "cases": result.num_cases,
        "wall_s": round(result.wall_s, 3),
        "interrupted": result.interrupted,
        "situations": dict(result.situations.most_common()),
    }
    word = "interrupted" if result.interrupted else "ok"
    emit(arguments.json, json.dumps(statistics, indent=1) + "\n", f"{word}: {summary}")

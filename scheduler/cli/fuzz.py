"""`radixkv fuzz`: test a cache manager, a block pool or a scheduler against the specification."""

from __future__ import annotations

import argparse
import importlib.util
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...spec.adapters.cache import AdapterError
from ...spec.adapters.cache_target import DEPTHS
from ...spec.adapters.load_target import TargetError
from ...spec.harness.engine import Finding, Subject
from ...spec.harness.program import to_program
from ...spec.harness.shrink import shrink
from ...spec.harness.subjects import WHATS, What
from ...spec.harness.svg import to_svg
from ...spec.harness.trace_file import (
    TraceFile,
    TraceFileError,
    breaks_again,
    read_trace_file,
    replay_file,
)
from ..fuzz.campaign import (
    Aim,
    Report,
    run_campaign,
    subject_of,
)
from ..fuzz.targets import OWN
from .errors import BadInputError
from .output import check_destination

EXIT_FOUND = 1
EXIT_INTERRUPTED = 130


def run(arguments: argparse.Namespace) -> int:
    """Hunt, or replay; show what was found."""
    for option in ("json", "svg"):
        check_destination(getattr(arguments, option), f"--{option}")
    if arguments.engine == "hypothesis" and importlib.util.find_spec("hypothesis") is None:
        raise BadInputError("--engine hypothesis needs Hypothesis: pip install hypothesis")
    try:
        if arguments.replay is not None:
            return _replay(arguments)
        return _hunt(arguments)
    except (TargetError, AdapterError) as error:
        raise BadInputError(_with_origin(arguments, error)) from error
    except TraceFileError as error:
        raise BadInputError(str(error)) from error
    except BrokenProcessPool:
        raise BadInputError("one of the --jobs ended abruptly; try without --jobs") from None
    except (AttributeError, TypeError) as error:
        if not arguments.target:
            raise  # ours: a defect
        wanted = f"what it makes is no adapter of a {arguments.what or 'cache'}: {error}"
        raise BadInputError(_with_origin(arguments, wanted)) from error


def _with_origin(arguments: argparse.Namespace, what_is_wrong: object) -> str:
    """Put in front what named the target: the option, or the file that is replayed."""
    if arguments.target:
        return f"--target {arguments.target}: {what_is_wrong}"
    return f"{arguments.replay}: {what_is_wrong}" if arguments.replay else str(what_is_wrong)


def _hunt(arguments: argparse.Namespace) -> int:
    what: What = arguments.what or "cache"
    aim = Aim(
        what,
        arguments.target or OWN[what],
        arguments.depth or ("api" if arguments.target else "full"),
        arguments.engine,
        arguments.seed,
    )
    subject = subject_of(aim.what, aim.target, aim.depth)  # what is wrong with it is told at once
    seconds = 10.0 if arguments.seconds is None else arguments.seconds
    report = run_campaign(
        aim,
        num_steps=arguments.steps,
        seconds=None if arguments.steps is not None or seconds == 0 else seconds,
        num_jobs=arguments.jobs,
    )
    origin = (aim.what, aim.target, aim.depth)
    shown = _Shown(arguments, f"{_figures(report)}, seed {aim.seed}")
    if report.finding is not None:
        return shown.failure(subject, report.finding, origin)
    shown.success("interrupted" if report.interrupted else "ok", report)
    return EXIT_INTERRUPTED if report.interrupted else 0


def _replay(arguments: argparse.Namespace) -> int:
    file = read_trace_file(Path(arguments.replay))
    what = _one_of(WHATS, arguments.what or file.what, f'{arguments.replay}: "what"')
    target = arguments.target or file.target or OWN[what]
    depth = arguments.depth or file.depth
    depth = _one_of(DEPTHS, depth, f'{arguments.replay}: "depth"')
    subject = subject_of(what, target, depth)
    try:
        finding = replay_file(subject, file)
    except TraceFileError as error:
        raise BadInputError(f"{arguments.replay}: {error}") from error
    num_steps = len(file.finding.trace if finding is None else finding.trace)
    shown = _Shown(arguments, f"{num_steps:,} steps of {arguments.replay}")
    if finding is not None:
        return shown.failure(subject, finding, (what, target, depth), shrinking=False)
    shown.success("ok", Report(num_steps, 1))
    return 0


def _one_of(choices: tuple[Any, ...], value: str, where: str) -> Any:
    if value not in choices:
        raise BadInputError(f"{where} must be one of {', '.join(choices)}, got {value!r}")
    return value


def _figures(report: Report) -> str:
    rate = report.num_steps / report.wall_s if report.wall_s else 0
    return f"{report.num_steps:,} steps, {report.num_cases:,} cases, {rate:,.0f} steps/s"


@dataclass(frozen=True)
class _Shown:
    """Writes the outcome where the options say: text on stdout, unless JSON goes there."""

    arguments: argparse.Namespace
    summary: str

    def failure(
        self,
        subject: Subject,
        found: Finding,
        origin: tuple[Any, Any, Any],
        shrinking: bool = True,
    ) -> int:
        """Show a finding, shrunk."""
        again = breaks_again(subject, found)
        finding = shrink(subject, found) if shrinking and again else found
        self.json(TraceFile(finding, *origin).text())
        if self.arguments.svg is not None:
            Path(self.arguments.svg).write_text(to_svg(subject, finding), encoding="utf-8")
        self.text(to_program(finding, subject))
        if not again:
            self.text("\nReplayed, this trace breaks nothing: what is tested is not deterministic.")
        self.text(f"\nfailed: {finding.rule}: {self.summary}")
        return EXIT_FOUND

    def success(self, word: str, report: Report) -> None:
        """Show that nothing was found."""
        import json

        figures = {
            "steps": report.num_steps,
            "cases": report.num_cases,
            "wall_s": round(report.wall_s, 3),
            "interrupted": report.interrupted,
            "situations": dict(report.situations.most_common()),
        }
        self.json(json.dumps(figures, indent=1) + "\n")
        self.text(f"{word}: {self.summary}")

    def json(self, document: str) -> None:
        """Write JSON where --json says."""
        path = self.arguments.json
        if path == "-":
            print(document, end="")
        elif path is not None:
            Path(path).write_text(document, encoding="utf-8")

    def text(self, text: str) -> None:
        """Print text for people, unless stdout is for JSON."""
        if self.arguments.json != "-":
            print(text)

"""A pytest plugin: ``kvspec.toml`` is a fuzz test, every ``*.trace.json`` a regression test.

A ``kvspec.toml`` names the target and the number of steps::

    target = "mypackage.cache:make_adapter"   # or "adapter.py:make_adapter", beside this file
    what = "cache"     # the others are optional; these are the defaults
    depth = "api"
    steps = 20_000
    seed = 0           # without it, each run has a new seed, which a failure names
    block_sizes = [1, 2, 3, 4]       # and pool_sizes, the numbers of blocks
    known = []         # rules that it is known to break: they are not judged, as ["Q31"]

Several targets are tables of one file, each with these keys: ``[cache]``, ``[tiers]`` and so on.

A broken rule is reported with the shrunk program, which is also written next to the file as a trace
and fails as a regression test until it is fixed. The plugin imports only pytest until pytest
collects such a file.
"""

from __future__ import annotations

import secrets
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, get_args

import pytest

if TYPE_CHECKING:
    from .engine import Finding, Subject
    from .findings.trace_file import TraceFile

FUZZ_FILE: Final = "kvspec.toml"
TRACE_ENDING: Final = ".trace.json"
LARGEST_TRACE: Final = 1 << 20
"""In bytes. Larger files with this ending are traces of other tools."""

DEFAULTS: Final[dict[str, Any]] = {
    "target": "", "what": "cache", "depth": "api", "steps": 20_000, "seed": 0,
    "block_sizes": [], "pool_sizes": [], "known": [],
}  # fmt: skip
LISTED: Final = {"block_sizes": int, "pool_sizes": int, "known": str}


class KvSpecError(Exception):
    """A file cannot be used; only the message, one line, is shown."""


class RuleBroken(Exception):
    """A rule of the specification is broken; the message is the complete report."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options; each overrides the value of a kvspec.toml or a trace."""
    group = parser.getgroup("radixkv", "cache managers against their specification (radixkv)")
    group.addoption("--kv-target", metavar="TARGET", help="package.module:factory or file.py:name")
    group.addoption("--kv-depth", choices=["api", "events", "full"], help="how deep it is tested")
    group.addoption("--kv-steps", type=int, metavar="N", help="operations per kvspec.toml")
    group.addoption("--kv-scale", type=float, metavar="F", default=1, help="times as many of them")
    group.addoption("--kv-seed", type=int, metavar="K", help="equal seeds, equal operations")


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """Collect the two kinds of files."""
    if file_path.name == FUZZ_FILE:
        return FuzzFile.from_parent(parent, path=file_path)
    if file_path.name.endswith(TRACE_ENDING) and _is_ours(file_path):
        return TraceTestFile.from_parent(parent, path=file_path)
    return None


def _is_ours(path: Path) -> bool:
    if path.stat().st_size > LARGEST_TRACE:
        return False
    content = path.read_bytes()
    return all(word in content for word in (b'"rule"', b'"config"', b'"trace"'))


class FuzzFile(pytest.File):
    """A kvspec.toml."""

    def collect(self) -> Iterable[pytest.Item]:
        """It holds one test, or one for each of its tables."""
        given: dict[str, Any] = {}
        problem = ""
        try:
            given = tomllib.loads(self.path.read_text(encoding="utf-8"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            problem = f"{self.path}: not TOML: {error}"
        has_tables = given and all(isinstance(value, dict) for value in given.values())
        for name, table in given.items() if has_tables else [("fuzz", given)]:
            item = FuzzItem.from_parent(self, name=name)
            item.given, item.problem = table, problem
            yield item


class TraceTestFile(pytest.File):
    """A trace."""

    def collect(self) -> Iterable[pytest.Item]:
        """It holds one test."""
        yield TraceItem.from_parent(self, name="replay")


class _Item(pytest.Item):
    """A test that reports a message instead of a traceback through the specification."""

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], *args: Any) -> Any:
        """Show only the message of expected failures."""
        if isinstance(excinfo.value, KvSpecError | RuleBroken):
            return str(excinfo.value)
        return super().repr_failure(excinfo, *args)

    def reportinfo(self) -> tuple[Path, None, str]:
        """Name the test by its file."""
        return self.path, None, f"{self.path.name}: {self.name}"

    def option(self, name: str, otherwise: Any) -> Any:
        """Return the value on the command line, or else the given one."""
        given = self.config.getoption(f"kv_{name}")
        return otherwise if given is None else given


class FuzzItem(_Item):
    """Random operations until a rule breaks or the steps are used up."""

    given: Mapping[str, Any]
    problem: str

    def runtest(self) -> None:
        """Run; if a rule breaks, shrink, write the trace, and fail with the report."""
        options = self._options()
        with _in_one_line(self.path):
            from .findings.shrink import shrink
            from .findings.trace_file import TraceFile
            from .random_engine import run

            subject = _subject(self, options["what"], options["target"], options["depth"], options)
            found = run(subject, options["seed"], options["steps"]).finding
            if found is None:
                return
            finding = shrink(subject, found)
            origin = (options["what"], options["target"], options["depth"])
            file = TraceFile(finding, *origin, known=tuple(options["known"]))
            path = self.path.with_name(file.file_name())
            path.write_text(file.text(), encoding="utf-8")
            seed = options["seed"]
            raise RuleBroken(f"{_report(finding, subject)}\n\nwritten to {path}; seed {seed}")

    def _options(self) -> dict[str, Any]:
        if self.problem:
            raise KvSpecError(self.problem)
        new_seed = {"seed": secrets.randbelow(1 << 31)}
        for key, value in self.given.items():
            if key not in DEFAULTS:
                raise KvSpecError(f"{self.path}: no such key: {key} (of {', '.join(DEFAULTS)})")
            kind = type(DEFAULTS[key])
            each = LISTED.get(key)
            if type(value) is not kind or (each and not all(type(one) is each for one in value)):
                names = {str: "a string", int: "an integer", list: "a list of "}
                wanted = names[kind] + ({str: "strings", int: "integers"}[each] if each else "")
                raise KvSpecError(f"{self.path}: {key} must be {wanted}, got {value!r}")
        options = {
            key: self.option(key, value) if key != "what" and key not in LISTED else value
            for key, value in {**DEFAULTS, **new_seed, **self.given}.items()
        }
        options["steps"] = int(options["steps"] * self.config.getoption("kv_scale"))
        if options["steps"] < 1:  # it would pass without testing anything
            raise KvSpecError(f"{self.path}: steps must be at least 1, got {options['steps']}")
        return options


class TraceItem(_Item):
    """A trace that broke a rule once and must not do so again."""

    def runtest(self) -> None:
        """Replay; fail if any rule breaks."""
        with _in_one_line(self.path):
            from .findings.trace_file import read_trace_file, replay_file

            file: TraceFile = read_trace_file(self.path)
            target, depth = self.option("target", file.target), self.option("depth", file.depth)
            subject = _subject(self, file.what, target, depth, {"known": file.known})
            finding = replay_file(subject, file)
            if finding is not None:
                raise RuleBroken(_report(finding, subject))


def _subject(
    item: _Item,
    what: Any,
    target: str,
    depth: Any,
    options: Mapping[str, Any] = MappingProxyType({}),
) -> Subject:
    from ..adapters.cache_target import Depth
    from ..adapters.load_target import load_target, target_beside
    from .subjects import WHATS, SubjectOptions, make_subject

    if what not in WHATS:
        raise KvSpecError(f"{item.path}: what must be one of {', '.join(WHATS)}, got {what!r}")
    if depth not in get_args(Depth):
        wanted = ", ".join(get_args(Depth))
        raise KvSpecError(f"{item.path}: depth must be one of {wanted}, got {depth!r}")
    if not target:
        raise KvSpecError(f"{item.path}: no target: give one in the file, or --kv-target")
    target = target_beside(target, item.path)
    listed = {key: tuple(options.get(key, ())) for key in LISTED}
    return make_subject(what, load_target(target), depth, SubjectOptions(**listed))


@contextmanager
def _in_one_line(path: Path) -> Iterator[None]:
    """Turn an error in a file or target into one line that names the file."""
    from ..adapters.cache import AdapterError
    from ..adapters.load_target import TargetError
    from .findings.trace_file import TraceFileError

    try:
        yield
    except (AdapterError, TargetError, TraceFileError) as error:
        text = str(error)
        raise KvSpecError(text if text.startswith(str(path)) else f"{path}: {text}") from error


def _report(finding: Finding, subject: Subject) -> str:
    from .findings.program import to_program

    return to_program(finding, subject)

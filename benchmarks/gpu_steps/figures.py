"""Evaluation of the records: the target figures, and the two tables of the report."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from .problems import FULL, HEADLINE, Record, point

OURS = "mosaic"


class Figure(NamedTuple):
    """A target figure; `got` is None if the run did not measure it."""

    name: str
    wanted: float
    got: float | None
    at_least: bool = True

    @property
    def verdict(self) -> str:
        """Whether the run met the target."""
        if self.got is None:
            return "not measured"
        met = self.got >= self.wanted if self.at_least else self.got <= self.wanted
        return "pass" if met else "FAIL"


class Measured:
    """The records of a run, indexed by operation, implementation, point and block size."""

    def __init__(self, records: Iterable[Record]) -> None:
        records = list(records)
        self.ceilings = {r["ceiling"]: r["rate"] for r in records if "ceiling" in r}
        self.times = {
            (r["operation"], r["implementation"], r["point"], r["block_size"]): r
            for r in records
            if "operation" in r
        }
        self.checks = [r for r in records if "check" in r]

    def seconds(
        self, operation: str, name: str, block_size: int = HEADLINE, by: str = OURS
    ) -> float | None:
        """Seconds of one call."""
        record = self.times.get((operation, by, name, block_size))
        return record and record["seconds"]

    def rate(
        self, operation: str, name: str, block_size: int = HEADLINE, by: str = OURS
    ) -> float | None:
        """Bytes or operations per second."""
        record = self.times.get((operation, by, name, block_size))
        return record and rate(record)


def rate(record: Record) -> float:
    """Bytes or operations per second."""
    work: float = record["bytes"] if "bytes" in record else record["flops"]
    return work / record["seconds"]


def _ratio(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a / b


def figures(records: Iterable[Record]) -> list[Figure]:
    """Return every target figure, met or not."""
    m = Measured(records)
    copy = m.ceilings.get("copy")
    wrong = sum(not check["ok"] for check in m.checks) if m.checks else None
    found = [Figure("cases outside the error bound", 0, wrong, at_least=False)]
    for (batch, length), wanted in (((64, 4096), 0.9), ((256, 1024), 0.9), ((8, 8192), 0.75)):
        got = _ratio(m.rate("decode", point(batch, length)), copy)
        found.append(Figure(f"decode {point(batch, length)}: share of copy bandwidth", wanted, got))
    for name, wanted in zip(FULL.mixed, (0.85, 0.85, 0.9, 0.85), strict=True):
        got = _ratio(m.rate("decode", name), copy)
        found.append(Figure(f"decode {name}: share of copy bandwidth", wanted, got))
    for peer in ("flashinfer", "torch-cudnn", "jax-cudnn-paged"):
        for each in FULL.decode:
            ours, theirs = (m.seconds("decode", point(*each), by=who) for who in (OURS, peer))
            if theirs is not None:  # the report names the peers that could not run
                found.append(
                    Figure(f"decode {point(*each)}: speed beside {peer}", 1, _ratio(theirs, ours))
                )
    name = "8192 new"
    tera = _ratio(m.rate("extend", name), 1e12)
    found.append(Figure(f"extend {name}: TFLOP/s", 450, tera))
    small = "128 new, 32k cached"
    tera = _ratio(m.rate("extend", small), 1e12)
    found.append(Figure(f"extend {small}: TFLOP/s", 300, tera))
    dense = m.rate("extend", name, by="torch-cudnn")
    found.append(
        Figure(f"extend {name}: share of cuDNN's rate", 0.75, _ratio(m.rate("extend", name), dense))
    )
    for operation in ("copy", "gather", "scatter"):
        for count in FULL.moved_blocks:
            got = _ratio(m.rate(operation, f"{count} blocks"), copy)
            found.append(
                Figure(f"{operation} of {count} blocks: share of copy bandwidth", 0.9, got)
            )
    for each in FULL.decode:
        small, large = (m.seconds("decode", point(*each), size) for size in (16, 64))
        found.append(
            Figure(
                f"decode {point(*each)}: time in blocks of 16 / 64",
                1.1,
                _ratio(small, large),
                False,
            )
        )
    return found


def _rows(head: tuple[str, ...], rows: Iterable[Iterable[str]]) -> str:
    lines = (" | ".join(row) for row in (head, ["---"] * len(head), *rows))
    return "\n".join(f"| {line} |" for line in lines)


def table_of_times(records: list[Record]) -> str:
    """Table of all times, with their share of the bandwidth or compute ceiling."""
    m = Measured(records)
    order: Callable[[Record], tuple[str, str, int]] = lambda r: (  # noqa: E731
        r["operation"],
        r["point"],
        r["block_size"],
    )
    rows = []
    for record in sorted(m.times.values(), key=order):
        moved = "bytes" in record
        ceiling = m.ceilings.get("copy" if moved else "matrix product")
        share = "" if ceiling is None else f"{100 * rate(record) / ceiling:.0f} %"
        note = ", not masked" if record.get("masked") is False else ""
        rows.append(
            (
                record["operation"],
                record["point"] + note,
                str(record["block_size"]),
                record["implementation"],
                f"{1e6 * record['seconds']:.1f}",
                f"{rate(record) / 1e12:.2f} {'TB/s' if moved else 'TFLOP/s'}",
                share,
            )
        )
    head = ("operation", "point", "block size", "by", "us", "rate", "of the ceiling")
    return _rows(head, rows)


def table_of_figures(records: list[Record]) -> str:
    """Table of all target figures with their verdicts."""
    rows = []
    for figure in figures(records):
        sign = ">=" if figure.at_least else "<="
        got = "" if figure.got is None else f"{figure.got:.3g}"
        rows.append((figure.name, f"{sign} {figure.wanted:g}", got, figure.verdict))
    return _rows(("figure", "wanted", "got", "verdict"), rows)


def text_of_counters(record: Record) -> str:
    """One line for the counters of one kernel; what the profiler did not give is "unknown"."""

    def share(name: str) -> str:
        return "unknown" if record[name] is None else f"{record[name]:.0f} %"

    seconds = record["seconds"]
    took = "an unknown time" if seconds is None else f"{1e6 * seconds:.1f} us"
    stalls = ", ".join(f"{name} {cycles:.1f}" for name, cycles in record["stalls"].items())
    return (
        f"counters of {record['counters_of']}: {took}, DRAM {share('dram')}, tensor cores"
        f" {share('tensor')}, cycles of stalls per instruction: {stalls or 'unknown'}"
    )


def text_of_tuning(rule: Record, records: list[Record]) -> str:
    """One line for a tuned problem: the time of the rule, and the best configuration."""
    timed = [record for record in records if record.get("tuned") == rule["tuned"]]
    best = min(timed, key=lambda record: float(record["seconds"]))
    return (
        f"{rule['tuned']}: {1e6 * rule['seconds']:.1f} us by the rule, {1e6 * best['seconds']:.1f}"
        f" us with {best['entry']['config']}, of {len(timed)} configurations"
    )

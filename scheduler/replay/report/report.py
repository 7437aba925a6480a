"""The report of a replay: the same facts as text for people and as JSON for programs."""

from __future__ import annotations

import dataclasses
import os
import platform
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from ..checks import Check
from ..cluster.result import ClusterResult
from ..engine_run.engine_run import RealRun
from ..hits.hit_curve import HitCurve
from ..simulation.simulation import SimulationResult
from ..trace import TOKENS_PER_HASH_ID, Trace
from .cluster_section import ClusterSection, cluster_lines
from .sections import (
    RealSection,
    SimulationSection,
    hit_lines,
    real_lines,
    simulation_lines,
    trace_lines,
)


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """What a replay found; `ok` is whether every check held."""

    trace: Trace
    hits: HitCurve
    simulation: SimulationSection
    apart: ClusterSection
    real: RealSection
    wall_s: float

    @property
    def ok(self) -> bool:
        """Whether every check held."""
        return all(check.ok for _, check in self.checks())

    def checks(self) -> list[tuple[str, Check]]:
        """Every check, with the section it belongs to."""
        checks = [("hits", check) for check in self.hits.checks]
        for name, run in self.simulation.runs.items():
            checks += [(f"simulation, {name}", check) for check in run.checks]
        for name, cluster in self.apart.runs.items():
            checks += [(f"apart, {name}", check) for check in cluster.checks]
        return checks + [("real_run", check) for check in self.real.run.checks]

    def to_json(self) -> dict[str, Any]:
        """Everything, in JSON's own types and stable names; what is not known is null."""
        trace, simulation, real = self.trace, self.simulation, self.real
        return {
            "ok": self.ok,
            "wall_s": self.wall_s,
            "environment": environment(),
            "trace": {
                "name": trace.name,
                "requests": len(trace.requests),
                "input_tokens": trace.num_input_tokens,
                "output_tokens": trace.num_output_tokens,
                "out_of_order": trace.num_out_of_order,
                "skipped": [dataclasses.asdict(line) for line in trace.skipped],
            },
            "hits": {
                "tokens_per_block": TOKENS_PER_HASH_ID,
                "rows": [dataclasses.asdict(row) for row in self.hits.rows],
            },
            "simulation": {
                "costs": dataclasses.asdict(simulation.costs),
                "config": dataclasses.asdict(simulation.config),
                "runs": {name: _without_checks(run) for name, run in simulation.runs.items()},
            },
            "apart": {
                name: {
                    "config": dataclasses.asdict(self.apart.configs[name]),
                    **_without_checks(run),
                }
                for name, run in self.apart.runs.items()
            },
            "real_run": {"config": dataclasses.asdict(real.config), **_without_checks(real.run)},
            "checks": [
                {"section": section, **dataclasses.asdict(check)}
                for section, check in self.checks()
            ],
        }

    def text(self) -> str:
        """The report for a terminal of 100 columns."""
        lines = [
            *trace_lines(self.trace),
            *hit_lines(self.hits),
            *simulation_lines(self.simulation),
            *cluster_lines(self.apart),
            *real_lines(self.real),
        ]
        lines += ["", self._verdict()]
        return "\n".join(lines)

    def _verdict(self) -> str:
        verdicts = [check.verdict for _, check in self.checks()]
        failed, skipped = verdicts.count("FAIL"), verdicts.count("SKIP")
        parts = [f"PASS: {len(verdicts) - skipped} checks"]
        if failed:
            parts = [f"FAIL: {failed} of {len(verdicts)} checks"]
        if skipped:
            parts.append(f"{skipped} skipped")
        return f"{', '.join(parts)}; {self.wall_s:.1f} s"


def environment() -> dict[str, Any]:
    """What the figures were measured with."""
    versions: dict[str, str | None] = {}
    for package in ("radixkv", "numpy", "jax", "jaxlib"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = None
    return {
        "versions": versions,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
    }


def _without_checks(result: SimulationResult | ClusterResult | RealRun) -> dict[str, Any]:
    fields = dataclasses.asdict(result)
    del fields["checks"]
    return fields

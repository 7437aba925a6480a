"""Mutants of the files that no world replaces, hunted by their unit tests.

``python -m tests.spec.unit_mutants``, from the checkout root, draws some mutants of each file
below, and runs the file's tests on each in a new process, with a copy of the package.
`tests.spec.mutants` hunts the others. Survivors are in `equivalent_unit_mutants.toml`, with the
reason why they are no bugs, or stand for a test that is missing.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from .mutants import explained
from .mutations import Key, Mutant, all_mutants, tree_of

ROOT: Final = Path(__file__).parents[2]
EQUIVALENT: Final = Path(__file__).with_name("equivalent_unit_mutants.toml")

_COPIES, _STORAGE, _KERNELS = "tests/kvcache/copies/", "tests/kvcache/storage/", "tests/kernels/"
_SCHEDULERS, _HANDOFF = "tests/scheduler/schedulers/", "tests/scheduler/handoff/"
_END_TO_END = "tests/end_to_end/"
_ENGINE, _EVENTS = "tests/scheduler/engine/", "tests/scheduler/events/"
_METRICS, _MODELS = "tests/scheduler/metrics/", "tests/scheduler/models/"
_REPLAY, _TEXT = "tests/scheduler/replay/", "tests/scheduler/text/"
_NODES, _TRANSPORT = "tests/scheduler/nodes/", "tests/scheduler/nodes/transport/"
_BENCH, _CLI = "tests/scheduler/bench/", "tests/scheduler/cli/"
_SERVER, _SERVING = "tests/scheduler/server/", "tests/scheduler/serving/"
_SPEC = "tests/spec/"


def _tests(folder: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{folder}test_{name}.py" for name in names)


_MIXED: Final = _tests(
    _SCHEDULERS, "mixed", "mixed_sharing", "mixed_preemption", "mixed_tiers", "mixed_prefetch",
    "mixed_parking", "mixed_abort", "mixed_tier_aborts", "mixed_reset", "reservation",
)  # fmt: skip
_SIDES: Final = _tests(_HANDOFF, "sides", "decode_side", "deferred_asks", "prefill_ends",
                       "decode_admission", "scenarios")  # fmt: skip
_SPEC_CACHE: Final = _tests(
    _SPEC,
    "cache_model",
    "operations",
    "events",
    "guards",
    "traffic",
    "misuse",
    "cache_spec",
    "designs",
)
_SPEC_TIERS: Final = _tests(
    _SPEC,
    "residency",
    "tier_model",
    "operations",
    "traffic",
    "wrong_answers",
    "tier_spec",
    "tier_planted",
)
_SPEC_SCHEDULER: Final = _tests(
    _SPEC,
    "scheduler_model",
    "operations",
    "traffic",
    "wrong_answers",
    "guards",
    "scheduler_designs",
    "tiered_scheduler_spec",
    "scheduler_spec",
)
_SPEC_HANDOFF: Final = _tests(
    _SPEC,
    "handoff_model",
    "handoff_operations",
    "operations",
    "traffic",
    "wrong_answers",
    "handoff_spec",
    "handoff_planted",
)

HUNTED: Final[dict[str, tuple[str, ...]]] = {
    "kvcache/copies/background_writer.py": _tests(_COPIES, "background_writer", "tier_driver"),
    "kvcache/copies/block_arrays.py": _tests(_COPIES, "block_arrays"),
    "kvcache/copies/block_copies.py": _tests(_COPIES, "block_copies"),
    "kvcache/copies/host_arrays.py": _tests(_COPIES, "host_arrays", "tier_driver"),
    "kvcache/copies/in_flight.py": _tests(_COPIES, "tier_driver", "tier_driver_machine"),
    "kvcache/copies/storage_copies.py": _tests(_COPIES, "storage_copies", "tier_driver"),
    "kvcache/copies/tier_driver.py": _tests(_COPIES, "tier_driver", "tier_driver_machine"),
    "kvcache/storage/checksummed.py": _tests(_STORAGE, "value_format", "workers", "files"),
    "kvcache/storage/files/backend.py": _tests(_STORAGE, "files", "crashes", "maintenance"),
    "kvcache/storage/files/lru_index.py": _tests(_STORAGE, "lru_index", "files"),
    "kvcache/storage/keys.py": _tests(_STORAGE, "keys"),
    "kvcache/storage/maintenance.py": _tests(_STORAGE, "maintenance"),
    "kvcache/storage/operation_table.py": _tests(_STORAGE, "operation_table", "workers"),
    "kvcache/storage/urls.py": _tests(_STORAGE, "urls"),
    "kvcache/storage/value_format.py": _tests(_STORAGE, "value_format"),
    "kvcache/storage/workers.py": _tests(_STORAGE, "workers", "operation_table"),
    "scheduler/batching/batch.py": _MIXED,
    "scheduler/batching/leases.py": _MIXED,
    "scheduler/batching/preemption.py": _MIXED,
    "scheduler/batching/queues.py": _MIXED,
    "scheduler/batching/transfers.py": _MIXED,
    "scheduler/reservation.py": (
        *_tests(_SCHEDULERS, "reservation", "mixed"),
        *_tests(_HANDOFF, "decode_admission", "decode_scheduler"),
    ),
    "scheduler/handoff/attempts.py": _SIDES,
    "scheduler/handoff/decode_side.py": _SIDES,
    "scheduler/handoff/prefill_side.py": _SIDES,
    "scheduler/handoff/deferred_asks.py": _SIDES,
    "scheduler/handoff/part_cut.py": _tests(_HANDOFF, "part_cut"),
    "scheduler/gateway/router.py": _tests(_HANDOFF, "router", "cache_index"),
    "scheduler/gateway/cache_index.py": _tests(_HANDOFF, "cache_index"),
    "scheduler/gateway/gateway.py": _tests(
        _HANDOFF, "gateway", "network_gateway", "request_copies", "scenarios"
    ),
    "scheduler/gateway/network_gateway.py": _tests(_HANDOFF, "network_gateway", "scenarios"),
    "scheduler/gateway/retries.py": _tests(_HANDOFF, "gateway", "sides"),
    "scheduler/engine/adjustments.py": (
        *_tests(_ENGINE, "adjustments", "sampling"),
        *_tests(_END_TO_END, "adjusted_sampling", "guided"),
    ),
    "scheduler/engine/calls.py": _tests(_ENGINE, "calls"),
    "scheduler/engine/logprobs.py": _tests(_END_TO_END, "logprobs"),
    "scheduler/engine/sampling.py": _tests(_ENGINE, "sampling"),
    "scheduler/events/check.py": _tests(_EVENTS, "check"),
    "scheduler/events/publisher.py": _tests(_EVENTS, "publisher"),
    "scheduler/events/subscriber.py": _tests(_EVENTS, "publisher", "check"),
    "scheduler/events/wire.py": _tests(_EVENTS, "wire"),
    "scheduler/metrics/definitions.py": _tests(_METRICS, "definitions", "recorder"),
    "scheduler/metrics/engine_metrics.py": (
        *_tests(_METRICS, "definitions", "recorder"),
        *_tests(_END_TO_END, "metrics"),
    ),
    "scheduler/metrics/histogram.py": _tests(_METRICS, "definitions", "recorder"),
    "scheduler/metrics/nodes_metrics.py": _tests(_METRICS, "nodes_metrics"),
    "scheduler/metrics/recorder.py": _tests(_METRICS, "recorder", "definitions"),
    "scheduler/models/checkpoint.py": _tests(_MODELS, "checkpoint"),
    "scheduler/models/config.py": _tests(_MODELS, "config"),
    "scheduler/models/json_fields.py": _tests(_MODELS, "config"),
    "scheduler/models/rope.py": _tests(_MODELS, "config", "numerics", "goldens"),
    "scheduler/models/transformer.py": _tests(_MODELS, "transformer", "numerics", "goldens"),
    "scheduler/nodes/kv_sender.py": _tests(_NODES, "kv_sender"),
    "scheduler/nodes/transport/staging.py": _tests(_TRANSPORT, "staging"),
    "scheduler/nodes/transport/storage_engine.py": _tests(_TRANSPORT, "storage_engine"),
    "scheduler/nodes/transport/transfer_table.py": _tests(
        _TRANSPORT, "transfer_table", "storage_engine", "nixl_engine", "processes"
    ),
    "scheduler/replay/checks.py": _tests(_REPLAY, "checks", "report"),
    "scheduler/replay/engine_run/checks.py": _tests(_REPLAY, "real_run"),
    "scheduler/replay/engine_run/scaling.py": _tests(_REPLAY, "real_run"),
    "scheduler/replay/hits/counts.py": _tests(_REPLAY, "hits", "tier_law", "report"),
    "scheduler/replay/hits/hit_curve.py": _tests(_REPLAY, "hits"),
    "scheduler/replay/hits/oracles.py": _tests(_REPLAY, "hits"),
    "scheduler/replay/hits/tier_law.py": _tests(_REPLAY, "tier_law"),
    "scheduler/replay/report.py": _tests(_REPLAY, "report", "page", "checks"),
    "scheduler/replay/simulation/accounting.py": _tests(
        _REPLAY, "single_node", "cluster", "tier_links", "simulated_storage"
    ),
    "scheduler/replay/simulation/cluster.py": _tests(_REPLAY, "cluster", "latency"),
    "scheduler/replay/simulation/cost_model.py": _tests(_REPLAY, "cost_model", "single_node"),
    "scheduler/replay/simulation/latency.py": _tests(_REPLAY, "latency", "cluster"),
    "scheduler/replay/simulation/simulated_node.py": _tests(_REPLAY, "cluster"),
    "scheduler/replay/simulation/simulated_storage.py": _tests(_REPLAY, "simulated_storage"),
    "scheduler/replay/simulation/single_node.py": _tests(_REPLAY, "single_node", "tier_links"),
    "scheduler/replay/simulation/tier_links.py": _tests(_REPLAY, "tier_links", "single_node"),
    "scheduler/replay/trace.py": _tests(_REPLAY, "trace"),
    "scheduler/text/detokenizer.py": _tests(_TEXT, "detokenizer"),
    "scheduler/text/output_text.py": _tests(_TEXT, "detokenizer"),
    "scheduler/text/stop_strings.py": _tests(_TEXT, "detokenizer"),
    "scheduler/text/tokenizer.py": _tests(_TEXT, "tokenizer", "detokenizer"),
    "scheduler/cli/fuzz.py": _tests(_SPEC, "fuzz_options", "known", "script", "fuzz_command"),
    "scheduler/cli/options/fuzz.py": _tests(_SPEC, "fuzz_options", "fuzz_command"),
    "scheduler/fuzz/cache_adapter.py": _tests(
        _SPEC, "our_cache_adapter", "misuse", "shrink", "draw", "cache_spec"
    ),
    "scheduler/fuzz/campaign.py": _tests(_SPEC, "fuzz_options", "fuzz_command"),
    "scheduler/fuzz/handoff_adapter.py": _tests(_SPEC, "our_handoff_adapter", "handoff_spec"),
    "scheduler/fuzz/kv_events.py": _tests(_SPEC, "our_cache_adapter", "cache_spec"),
    "scheduler/fuzz/lent_tokens.py": _tests(_SPEC, "inputs"),
    "scheduler/fuzz/misuse.py": _tests(_SPEC, "misuse", "cache_spec"),
    "scheduler/fuzz/pool_adapter.py": _tests(_SPEC, "our_cache_adapter", "cache_spec"),
    "scheduler/fuzz/scheduler_adapter.py": _tests(_SPEC, "our_adapters", "scheduler_spec"),
    "scheduler/fuzz/tiers/adapter.py": _tests(
        _SPEC, "our_tier_adapter", "misuse", "inputs", "tier_spec"
    ),
    "scheduler/fuzz/tiers/events.py": _tests(_SPEC, "tier_spec"),
    "scheduler/fuzz/tiers/misuse.py": _tests(_SPEC, "misuse", "tier_spec"),
    "scheduler/fuzz/tiers/snapshot.py": _tests(_SPEC, "our_tier_adapter", "tier_spec"),
    "scheduler/fuzz/tiered_scheduler_adapter.py": _tests(
        _SPEC, "our_adapters", "our_tier_adapter", "tiered_scheduler_spec"
    ),
    "scheduler/bench/cache.py": _tests(_BENCH, "cache", "workload"),
    "scheduler/bench/decode.py": _tests(_BENCH, "decode"),
    "scheduler/bench/evict.py": _tests(_BENCH, "evict"),
    "scheduler/bench/step.py": _tests(_BENCH, "step"),
    "scheduler/bench/timing.py": _tests(_BENCH, "timing"),
    "scheduler/bench/workload.py": _tests(_BENCH, "workload", "cache"),
    "scheduler/cli/exit_status.py": _tests(_CLI, "exit_status"),
    "scheduler/cli/events.py": _tests(_CLI, "events"),
    "scheduler/cli/hits.py": _tests(_CLI, "hits"),
    "scheduler/cli/main.py": _tests(_CLI, "exit_status", "main", "console"),
    "scheduler/cli/shared/completions.py": _tests(_CLI, "completions"),
    "scheduler/cli/shared/output.py": _tests(_CLI, "output"),
    "scheduler/cli/shared/processes.py": _tests(_CLI, "processes"),
    "scheduler/cli/shared/prompts.py": _tests(_CLI, "prompts"),
    "scheduler/cli/shared/startup.py": _tests(_CLI, "startup"),
    "scheduler/cli/storage.py": _tests(_CLI, "storage"),
    "scheduler/engine/batch_state.py": _tests(_ENGINE, "step_arrays"),
    "scheduler/engine/step_arrays.py": _tests(_ENGINE, "step_arrays"),
    "scheduler/engine/storage_namespace.py": _tests(_ENGINE, "storage_namespace"),
    "scheduler/engine/tier_copies.py": _tests(_ENGINE, "tier_copies"),
    "scheduler/server/auth.py": _tests(_SERVER, "doors"),
    "scheduler/server/connections.py": (
        *_tests(_SERVER, "connections"),
        *_tests(_END_TO_END, "server_connections"),
    ),
    "scheduler/server/descriptors.py": _tests(_SERVER, "descriptors"),
    "scheduler/server/errors.py": _tests(_SERVER, "doors"),
    "scheduler/server/generation.py": (
        *_tests(_SERVER, "generation"),
        *_tests(_END_TO_END, "server"),
    ),
    "scheduler/server/http_metrics.py": _tests(_SERVER, "http_metrics"),
    "scheduler/server/limits.py": _tests(_SERVER, "bodies", "doors", "stalls"),
    "scheduler/server/replies.py": _tests(_SERVER, "replies"),
    "scheduler/server/schema.py": _tests(_SERVER, "schema", "bodies"),
    "scheduler/server/streams.py": _tests(_SERVER, "streams"),
    "scheduler/serving/outputs.py": _tests(_SERVING, "outputs"),
    "scheduler/serving/params.py": _tests(_SERVING, "params"),
    "scheduler/serving/sizes.py": _tests(_SERVING, "sizes"),
    "spec/adapters/cache.py": _tests(_SPEC, "target", "inputs", "foreign"),
    "spec/adapters/cache_target.py": _tests(_SPEC, "target", "inputs", "foreign"),
    "spec/adapters/handoff.py": _tests(_SPEC, "our_handoff_adapter"),
    "spec/adapters/load_target.py": _tests(_SPEC, "target", "foreign"),
    "spec/adapters/recorder.py": _tests(_SPEC, "script"),
    "spec/adapters/references.py": _tests(_SPEC, "references"),
    "spec/adapters/scheduler.py": _tests(_SPEC, "target"),
    "spec/adapters/scheduler_target.py": _tests(_SPEC, "target", "scheduler_designs"),
    "spec/adapters/tier_target.py": _tests(_SPEC, "target", "inputs", "tier_spec"),
    "spec/adapters/tiers.py": _tests(_SPEC, "target"),
    "spec/harness/engine.py": _tests(_SPEC, "engines", "draw", "shrink"),
    "spec/harness/findings/known.py": _tests(_SPEC, "known", "script"),
    "spec/harness/findings/program.py": _tests(_SPEC, "shrink", "draw"),
    "spec/harness/findings/script.py": _tests(_SPEC, "script"),
    "spec/harness/findings/shrink.py": _tests(_SPEC, "shrink"),
    "spec/harness/findings/svg.py": _tests(_SPEC, "draw"),
    "spec/harness/findings/trace_file.py": _tests(_SPEC, "shrink", "pytest_plugin", "fuzz_command"),
    "spec/harness/hypothesis_engine.py": _tests(_SPEC, "engines", "machine"),
    "spec/harness/machine.py": _tests(_SPEC, "machine"),
    "spec/harness/operations.py": _tests(_SPEC, "engines", "draw"),
    "spec/harness/pytest_plugin.py": _tests(_SPEC, "pytest_plugin"),
    "spec/harness/random_engine.py": _tests(_SPEC, "engines", "shrink", "known"),
    "kernels/block_copy/xla.py": _tests(_KERNELS, "block_copy"),
    "kernels/kv_write/xla.py": _tests(_KERNELS, "kv_write"),
    "kernels/merge_states.py": _tests(_KERNELS, "merge"),
    "kernels/online_softmax.py": _tests(_KERNELS, "paged_decode", "paged_extend"),
    "kernels/paged_decode/xla.py": _tests(_KERNELS, "paged_decode"),
    "kernels/paged_extend/work_list.py": _tests(_KERNELS, "work_list"),
    "kernels/paged_extend/xla.py": _tests(_KERNELS, "paged_extend"),
    "spec/harness/cache/admit.py": _SPEC_CACHE,
    "spec/harness/cache/checks.py": _SPEC_CACHE,
    "spec/harness/cache/compute.py": (*_SPEC_CACHE, *_tests(_SPEC, "wrong_answers")),
    "spec/harness/cache/end.py": _SPEC_CACHE,
    "spec/harness/cache/operations.py": _SPEC_CACHE,
    "spec/harness/cache/picture.py": _SPEC_CACHE,
    "spec/harness/cache/requests.py": _SPEC_CACHE,
    "spec/harness/cache/serve.py": _SPEC_CACHE,
    "spec/harness/cache/state.py": _SPEC_CACHE,
    "spec/harness/cache/stream.py": _SPEC_CACHE,
    "spec/harness/cache/world.py": _SPEC_CACHE,
    "spec/harness/cost_world.py": _tests(_SPEC, "traffic", "costs", "operations"),
    "spec/harness/events.py": _SPEC_CACHE,
    "spec/harness/handoff/configuration.py": _SPEC_HANDOFF,
    "spec/harness/handoff/drain.py": _SPEC_HANDOFF,
    "spec/harness/handoff/events.py": _SPEC_HANDOFF,
    "spec/harness/handoff/operations.py": _SPEC_HANDOFF,
    "spec/harness/handoff/state.py": _SPEC_HANDOFF,
    "spec/harness/handoff/steps.py": _SPEC_HANDOFF,
    "spec/harness/handoff/world.py": _SPEC_HANDOFF,
    "spec/harness/pool_world.py": _tests(_SPEC, "pool_spec", "traffic", "cache_spec"),
    "spec/harness/scheduler/configuration.py": _SPEC_SCHEDULER,
    "spec/harness/scheduler/copies.py": _SPEC_SCHEDULER,
    "spec/harness/scheduler/counts.py": _SPEC_SCHEDULER,
    "spec/harness/scheduler/differential.py": _SPEC_SCHEDULER,
    "spec/harness/scheduler/operations.py": _SPEC_SCHEDULER,
    "spec/harness/scheduler/state.py": _SPEC_SCHEDULER,
    "spec/harness/scheduler/step.py": _SPEC_SCHEDULER,
    "spec/harness/scheduler/world.py": _SPEC_SCHEDULER,
    "spec/harness/subjects.py": _SPEC_CACHE,
    "spec/harness/tiers/checks.py": _SPEC_TIERS,
    "spec/harness/tiers/configuration.py": _SPEC_TIERS,
    "spec/harness/tiers/copies.py": _SPEC_TIERS,
    "spec/harness/tiers/executor.py": _SPEC_TIERS,
    "spec/harness/tiers/operations.py": _SPEC_TIERS,
    "spec/harness/tiers/picture.py": _SPEC_TIERS,
    "spec/harness/tiers/requests.py": _SPEC_TIERS,
    "spec/harness/tiers/state.py": _SPEC_TIERS,
    "spec/harness/tiers/storage.py": _SPEC_TIERS,
    "spec/harness/tiers/take.py": _SPEC_TIERS,
    "spec/harness/tiers/world.py": _SPEC_TIERS,
    "spec/model/cache.py": _SPEC_CACHE,
    "spec/model/events.py": _SPEC_CACHE,
    "spec/model/ghost.py": _tests(_SPEC, "ghost"),
    "spec/model/group.py": _tests(_SPEC, "group"),
    "spec/model/handoff.py": _SPEC_HANDOFF,
    "spec/model/promises.py": _SPEC_CACHE,
    "spec/model/scheduler.py": _SPEC_SCHEDULER,
    "spec/model/scheduler_policies.py": _SPEC_SCHEDULER,
    "spec/model/tiers/operations.py": _SPEC_TIERS,
    "spec/model/tiers/residency.py": _SPEC_TIERS,
    "spec/model/tiers/uses.py": _SPEC_TIERS,
    "spec/model/two_tier_law.py": _tests(_SPEC, "residency", "tier_model", "tier_spec"),
    "spec/rules/rule.py": _tests(_SPEC, "rules", "cache_model", "known"),
}
"""The tests that hunt the mutants of each file, the nearest first."""


@dataclass(frozen=True)
class Result:
    """How the hunt for a mutant ended.

    Attributes:
        killed_by: the first test that fails, "no end" if the tests do not end, or "".
    """

    mutant: Mutant
    killed_by: str
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """Return the result as plain data."""
        mutant = self.mutant
        return {
            "file": mutant.file,
            "function": mutant.function,
            "line": mutant.line,
            "change": mutant.change,
            "killed_by": self.killed_by,
            "seconds": round(self.seconds, 1),
        }


class PackageCopy:
    """A copy of the package in a temporary folder, which one mutant at a time changes."""

    def __init__(self, folder: Path, *, slow: bool = False) -> None:
        self._folder = folder
        self._chosen = ["-m", ""] if slow else []
        package = folder / "radixkv"
        no_code = shutil.ignore_patterns("*.pyc")
        shutil.copytree(ROOT / "package", package, ignore=no_code)
        for name in ("spec", "kernels", "kvcache", "scheduler"):
            shutil.copytree(ROOT / name, package / name, ignore=no_code)

    def run_tests(self, file: str, source: str, tests: Sequence[str], limit_s: float) -> str:
        """Run tests with another source of a file; return what fails, see `Result.killed_by`."""
        path = self._folder / "radixkv" / file
        original = path.read_bytes()
        path.write_text(source, "utf-8")
        try:
            return self._run(tests, limit_s)
        finally:
            path.write_bytes(original)

    def _run(self, tests: Sequence[str], limit_s: float) -> str:
        # No .pyc of a mutant may be left: the next one can have its size and its second.
        copy = {"PYTHONPATH": str(self._folder), "PYTHONDONTWRITEBYTECODE": "1"}
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-n0", "--tb=no", "-p",
                   "no:cacheprovider", *self._chosen, *tests]  # fmt: skip
        try:
            done = subprocess.run(command, cwd=ROOT, env={**os.environ, **copy}, text=True,
                                  capture_output=True, timeout=limit_s, start_new_session=True,
                                  check=False)  # fmt: skip
        except subprocess.TimeoutExpired:
            return "no end"
        if done.returncode == 0:
            return ""
        failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
        return failed[0].split(" - ")[0] if failed else f"pytest exits with {done.returncode}"


def choose(files: Iterable[str], most: int, seed: int, only: str = "") -> Iterator[list[Mutant]]:
    """Yield up to `most` mutants of each file, drawn by a seed; with `only`, those of that name."""
    for file in files:
        found = all_mutants(file, (ROOT / file).read_text("utf-8"))
        found = [mutant for mutant in found if only in f"{mutant.function}: {mutant.change}"]
        if len(found) > most:
            found = random.Random(f"{seed} {file}").sample(found, most)
        yield sorted(found, key=lambda mutant: mutant.number)


def hunt(mutants: Sequence[Mutant], copy: PackageCopy) -> Iterator[Result]:
    """Yield how the hunt for each mutant of a file ends.

    Raises:
        AssertionError: the tests fail without a mutant.
    """
    file = mutants[0].file
    source, tests = (ROOT / file).read_text("utf-8"), HUNTED[file]
    begin = time.perf_counter()
    # As a mutant, without comments and with other lines: no test may fail because of these.
    failed = copy.run_tests(file, ast.unparse(ast.parse(source)), tests, 600)
    assert not failed, f"without a mutant of {file}: {failed}"
    limit_s = 15 + 3 * (time.perf_counter() - begin)
    for mutant in mutants:
        begin = time.perf_counter()
        changed = ast.unparse(tree_of(mutant, source))
        killed_by = copy.run_tests(file, changed, tests, limit_s)
        yield Result(mutant, killed_by, time.perf_counter() - begin)


def report(results: Iterable[Result], reasons: Mapping[Key, str]) -> list[Result]:
    """Print the survivors; return those without a reason."""
    unexplained: list[Result] = []
    number = num_killed = 0
    for result in results:
        number, num_killed = number + 1, num_killed + bool(result.killed_by)
        if result.killed_by:
            continue
        mutant = result.mutant
        why = reasons.get(mutant.key, "UNEXPLAINED")
        if mutant.key not in reasons:
            unexplained.append(result)
        print(f"{mutant.file}:{mutant.line}: {mutant.function}: {mutant.change}\n    {why}",
              flush=True)  # fmt: skip
    explained_too = number - num_killed - len(unexplained)
    print(f"{number} mutants, {num_killed} killed, {explained_too} explained, "
          f"{len(unexplained)} unexplained", flush=True)  # fmt: skip
    return unexplained


def _kept(results: Iterable[Result], kept: list[Result]) -> Iterator[Result]:
    """Yield results and put them into a list, so that survivors are printed as they are found."""
    for result in results:
        kept.append(result)
        yield result


def main(arguments: Sequence[str] | None = None) -> int:
    """Hunt a sample of the mutants; the exit status is 1 if a survivor has no reason.

    Args:
        arguments: of the command line; None for those of the process.
    """
    parser = argparse.ArgumentParser(prog="python -m tests.spec.unit_mutants", description=__doc__)
    parser.add_argument("--files", default="", help="part of the paths of the files to change")
    parser.add_argument("--only", default="", help="part of the function and change, as printed")
    parser.add_argument("--sample", type=int, default=10, help="most mutants of a file")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--slow", action="store_true", help="run the tests marked slow, too")
    parser.add_argument("--json", type=Path, help="write all results there")
    chosen = parser.parse_args(arguments)
    files = [file for file in HUNTED if chosen.files in file]
    reasons, begin = explained(EQUIVALENT), time.perf_counter()
    results: list[Result] = []
    unexplained = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = PackageCopy(Path(folder), slow=chosen.slow)
        for mutants in choose(files, chosen.sample, chosen.seed, chosen.only):
            if not mutants:
                continue
            print(f"# {mutants[0].file}", flush=True)
            found: list[Result] = []
            unexplained += len(report(_kept(hunt(mutants, copy), found), reasons))
            results += found
            if chosen.json:
                rows = [result.to_json() for result in results]
                chosen.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    print(f"{len(results)} mutants, {sum(bool(each.killed_by) for each in results)} killed, "
          f"{unexplained} unexplained, {time.perf_counter() - begin:.0f} s")  # fmt: skip
    return 1 if unexplained else 0


if __name__ == "__main__":
    sys.exit(main())

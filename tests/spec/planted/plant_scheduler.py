"""Copies of the scheduler with a planted bug; `plant` does the same for the cache."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import cache
from itertools import count
from pathlib import Path
from types import CodeType, ModuleType

import radixkv.scheduler.mixed
from radixkv.scheduler.fuzz import tiered_scheduler_adapter
from radixkv.scheduler.fuzz.scheduler_adapter import make_factory
from radixkv.spec.adapters.scheduler import SchedulerPromises
from radixkv.spec.harness.scheduler.world import SchedulerSubject

from .plant import Bug

FOLDER = Path(radixkv.scheduler.mixed.__file__).parent
FILES = ("errors", "request", "step_plan", "policy", "reservation",
         "batching/__init__", "batching/leases", "batching/transfers", "batching/queues",
         "batching/preemption", "batching/batch", "interface", "mixed", "fairness",
         "handoff/records", "handoff/messages", "handoff/gateway_messages", "handoff/actions",
         "handoff/part_cut", "handoff/states", "handoff/attempts", "handoff/deferred_asks",
         "handoff/decode_side",
         "handoff/prefill_side", "handoff/__init__", "decode")  # fmt: skip
"""Files of a copy, each after the files that it imports."""
NAMES = ("DecodeScheduler", "Fcfs", "MixedScheduler", "Priority", "Request", "RequestError",
         "StepOrderError", "StepPlan")  # fmt: skip
_numbers = count(1)


@cache
def _source(file: str) -> str:
    return (FOLDER / file).read_text("utf-8")


@cache
def _code(file: str) -> CodeType:
    return compile(_source(file), str(FOLDER / file), "exec", dont_inherit=True)


def planted_code(bug: Bug) -> dict[str, CodeType]:
    """Return the code of each file that a bug changes.

    Raises:
        AssertionError: if an edit does not fit exactly once.
    """
    changed: dict[str, str] = {}
    for file, old, new in bug.all_edits():
        source = changed.get(file, _source(file))
        fits = source.count(old)
        assert fits == 1, f"{file} has {old!r} {fits} times: write the bug {bug.name!r} anew"
        changed[file] = source.replace(old, new)
    return {
        file: compile(source, str(FOLDER / file), "exec", dont_inherit=True)
        for file, source in changed.items()
    }


def load_scheduler(bug: Bug | None) -> ModuleType:
    """Load a copy of the scheduler over our cache, with a bug if one is given."""
    changed = planted_code(bug) if bug is not None else {}
    name = f"radixkv.planted_scheduler_{next(_numbers)}"
    package = ModuleType(name)
    package.__path__ = []
    modules = {name: package}
    sys.modules[name] = package
    try:
        for stem in FILES:
            file = f"{stem}.py"
            path = [name, *stem.removesuffix("/__init__").split("/")]
            module = modules[".".join(path)] = ModuleType(".".join(path))
            if file.endswith("__init__.py"):
                module.__path__ = []
            module.__package__ = ".".join(path if file.endswith("__init__.py") else path[:-1])
            sys.modules[module.__name__] = module
            exec(changed.get(file) or _code(file), module.__dict__)
            for public in NAMES:
                if hasattr(module, public):
                    setattr(package, public, getattr(module, public))
        vars(package)["handoff"] = modules[f"{name}.handoff"]
    finally:
        for loaded in modules:
            sys.modules.pop(loaded, None)
    return package


def subject_with(bug: Bug | None) -> SchedulerSubject:
    """Return the scheduler with a bug as a test subject, with the promises that its hunt checks."""
    unclaimed = dict.fromkeys(bug.unclaimed if bug is not None else (), False)
    promises = replace(SchedulerPromises.all(), **unclaimed)
    package = load_scheduler(bug)
    if bug is not None and bug.world == "tiered_scheduler":
        return tiered_subject(package, promises)
    return SchedulerSubject(make_factory(package, promises))


def tiered_subject(
    package: ModuleType | None = None, promises: SchedulerPromises | None = None
) -> SchedulerSubject:
    """Return a scheduler over tiers as a test subject."""
    factory = tiered_scheduler_adapter.make_factory(package, promises)
    return SchedulerSubject(factory, has_tiers=True)

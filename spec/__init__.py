"""The executable specification of a KV cache: a model to test cache managers against.

Point it at your own manager through an adapter (see `Manager`)::

    from radixkv.spec import CacheSubject, run, shrink

    result = run(CacheSubject(make_my_manager), seed=0, num_steps=100_000)
    if result.finding is not None:
        print(shrink(CacheSubject(make_my_manager), result.finding))

It imports nothing else of this library, nor NumPy, nor JAX.
"""

from .adapters.cache import AdapterError, Events, Factory, Manager, Promises, Snapshot
from .adapters.recorder import recorded
from .harness.cache.world import CacheSubject
from .harness.engine import Finding, replay
from .harness.findings.script import to_script
from .harness.findings.shrink import shrink
from .harness.random_engine import Run, run
from .model.ghost import GhostMemory, Tag, prefix_tags
from .rules.rule import RULES, Rule, Violation

__all__ = [
    "RULES",
    "AdapterError",
    "CacheSubject",
    "Events",
    "Factory",
    "Finding",
    "GhostMemory",
    "Manager",
    "Promises",
    "Rule",
    "Run",
    "Snapshot",
    "Tag",
    "Violation",
    "prefix_tags",
    "recorded",
    "replay",
    "run",
    "shrink",
    "to_script",
]

"""The executable specification of a KV cache: a model to test cache managers against.

Point it at your own manager (`Manager` says what an adapter has)::

    from radixkv.spec import CacheSubject, run, shrink

    result = run(CacheSubject(make_my_manager), seed=0, num_steps=100_000)
    if result.finding is not None:
        print(shrink(CacheSubject(make_my_manager), result.finding))

Imports nothing else of this library, no NumPy and no JAX.
"""

from .adapter import AdapterError, Events, Factory, Manager, Promises, Snapshot
from .cache_world import CacheSubject
from .engine import Finding, replay
from .ghost import ContentError, GhostMemory, Tag, prefix_tags
from .random_engine import Run, run
from .rules import RULES, Rule, Violation
from .shrink import shrink

__all__ = [
    "RULES",
    "AdapterError",
    "CacheSubject",
    "ContentError",
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
    "replay",
    "run",
    "shrink",
]

"""The rules of the specification: name and meaning of each, for caches, tiers and schedulers.

Public: `RULES`, `Rule`, `Violation` and `require` in `rule`; each other module has one family. An
import of any of them enters all families in `RULES`, in the order of the document.
"""

from . import cache, tiers, scheduler, handoff, events, group  # noqa: F401, I001

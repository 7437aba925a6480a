"""The rules of the specification: name and meaning of each, for caches, tiers and schedulers.

Public: `RULES`, `Rule`, `Violation` and `require` in `rule`; each other module has one family.
"""

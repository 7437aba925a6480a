"""The rules of the specification: the name, meaning and check of each, for caches, tiers, schedulers.

Public: `RULES`, `Rule`, `Violation` and `require`; the other modules define one family of rules each.
"""

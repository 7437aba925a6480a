"""The model of the tiers: where each prefix is, and the operations that are not over.

`TierModel` is `CacheModel` with a host tier and storage below it.
"""

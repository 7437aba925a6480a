"""Adapters that test this package against the specification, and the campaigns of ``radixkv fuzz``.

An adapter gives the specification access to one kind of target: the cache manager, with tiers or
without, the block pool, or the scheduler. Nothing but the command and tests imports this folder.
"""

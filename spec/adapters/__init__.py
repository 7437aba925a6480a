"""What the specification asks of a system under test, and the target that calls it.

`Manager`, `TierManager` and `Scheduler` are the protocols; the target modules check what comes back.
"""

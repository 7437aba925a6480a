"""What the specification asks of a system under test, and the targets that call it.

`Manager`, `TierManager` and `Scheduler` are the protocols; the targets check every return value.
"""

"""The world of a hand-off: clients, a lossy network, transports, and nodes that may crash.

`HandoffSubject` makes its worlds. `state` has the parts of a world, `events` what the nodes and the
gateway do, `operations` the table of operations, and `drain` an end without faults.
"""

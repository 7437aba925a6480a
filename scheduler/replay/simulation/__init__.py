"""Discrete-event replay of a trace: real schedulers and managers, a virtual clock, a cost model.

`simulate` runs a single node and `simulate_cluster` prefill and decode nodes.
"""

"""Discrete-event replay of one node: the real scheduler on a virtual clock and a cost model."""

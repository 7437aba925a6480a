"""Prefix hits of a trace: the manager's counts, and the LRU and Belady oracles they must match.

`count_hits` counts at one capacity; `measure_hit_curve` compares with the oracles at several.
"""

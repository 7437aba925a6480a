"""Prefix hits of a trace: our manager, an LRU oracle and Belady, at one or many capacities."""

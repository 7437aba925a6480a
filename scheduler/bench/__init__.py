"""Benchmarks of the cache manager: whole requests, decode steps and evictions.

`radixkv bench` runs them. All measure the CPU time of the calling thread.
"""

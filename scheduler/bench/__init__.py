"""Benchmarks of the cache manager: CPU time of the calling thread, per request and per block."""

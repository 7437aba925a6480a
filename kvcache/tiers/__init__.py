"""Host and storage tiers: offload, load, park and prefetch, as operations without I/O.

`Tiers` (api.py) is the public face; `HostConfig`, `Operation`, `Parked` and `Prefetch` are its
values. The driver in `kvcache/copies` executes the operations and reports their results.
"""

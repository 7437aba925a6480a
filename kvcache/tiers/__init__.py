"""The host and storage tiers: offload, load, parking and prefetch, as operations without I/O.

The manager hands operations out and takes completions in; `kvcache/copies` executes them.
"""

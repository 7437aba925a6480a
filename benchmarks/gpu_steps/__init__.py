"""The steps of `benchmarks/gpu.py`; each runs in its own process and appends records to a file."""

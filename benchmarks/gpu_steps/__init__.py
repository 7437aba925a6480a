"""The steps of `benchmarks/gpu.py`: each runs by itself and adds records to a file."""

"""What points the specification at this package: adapters, and the runs of ``radixkv fuzz``."""

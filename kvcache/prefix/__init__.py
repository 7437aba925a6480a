"""Device tier: radix tree of cached blocks, block pool, block tables and leases.

It is complete without the tiers below it, and has no JAX, I/O or clock. Public classes are
exported by `radixkv.kvcache`.
"""

"""The device tier: a radix tree of cached blocks, the block pool, block tables and leases.

Complete without the tiers below it. No JAX, no I/O, no clock.
"""

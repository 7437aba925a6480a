"""The arrays of blocks, and what copies them between tiers.

Everything of the cache that needs JAX or threads is here.
"""

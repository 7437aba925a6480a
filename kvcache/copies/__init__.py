"""The arrays that hold the blocks, and the copies of blocks between tiers.

All code of the cache that needs JAX or threads is here. `TierDriver` executes a manager's
operations; `BlockArrays` and `HostArrays` are the memory of the device and host tiers.
`radixkv.kvcache` exports the public names.
"""

"""KV writes: the keys and values of new tokens go into the pools.

Public: `kv_write`. The modules are its two backends.
"""

from .api import kv_write

__all__ = ["kv_write"]

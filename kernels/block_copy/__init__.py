"""Block copies: within a pool, from a pool to contiguous staging memory, and back.

Public: `copy_blocks`, `gather_blocks` and `scatter_blocks`. The modules are their two backends.
"""

from .api import copy_blocks, gather_blocks, scatter_blocks

__all__ = ["copy_blocks", "gather_blocks", "scatter_blocks"]
